"""The journal of an attempt's finished steps: how it is written, and which step may be asked for next. Pure.

It is a list in JSON, with an entry for every step in the order in which they were finished::

    [["reserve", {"shelf": 4}], ["charge", "ch_1", 2], ["mail", null, 1, true]]

An entry has a name and a result. Where they are not usual, it goes on with the version by which its order is checked,
with whether the step went aside (asked for by a task or thread that the handler had started), and with why there is
no result. Entries are only ever added at the end, so that of two journals the longer one is the later one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from . import codec
from .errors import ResultUnavailable, StepMismatch, StoreMismatch, UsageError


class Entry(NamedTuple):
    """A step that was finished."""

    name: str
    tree: Any
    """Its result, as ``codec.unpack`` takes it."""
    version: int = 1
    aside: bool = False
    lacks: str = ""
    """Why there is no result."""

    def value(self, hint: Any, key: str) -> Any:
        """What the step returned. Raises ``ResultUnavailable`` if that was not kept, or is of another type now."""
        if self.lacks:
            raise unavailable(self.name, self.lacks, key)
        try:
            return codec.unpack(self.tree, hint)
        except ResultUnavailable as error:
            raise ResultUnavailable(f"The step {self.name!r} was done once. {error}", key=key) from error


def read(journal: bytes | None, key: str | None = None) -> list[Entry]:
    """The entries of a journal, in the order in which they were finished."""
    if journal is None:
        return []
    try:
        entries = [Entry(*entry) for entry in codec.parse(journal)]
    except Exception as error:
        raise StoreMismatch(
            "The journal of this attempt's steps can't be read, so nothing was run. A newer effectonce wrote it: use "
            "that one.",
            key=key,
        ) from error
    return entries


def added(journal: bytes | None, entry: Entry, result: bytes) -> bytes:
    """A journal with one entry more; ``result`` is its result as ``codec.encode`` gave it."""
    name, _, version, aside, lacks = entry
    rest: tuple[Any, ...] = ()
    if lacks:
        rest = (version, aside, lacks)
    elif aside:
        rest = (version, aside)
    elif version != 1:
        rest = (version,)
    parts = b",".join([codec.encode(name), result, *map(codec.encode, rest)])
    return b"[[%b]]" % parts if journal is None else b"%b,[%b]]" % (journal[:-1], parts)


class Program:
    """What one run of a handler has asked for so far, beside what earlier runs have finished.

    A handler asks for its own steps in the same order each time, so that they are expected in the order of the journal;
    that order is checked among steps of one version. What its tasks and threads ask for is only known by its name.
    """

    def __init__(self, journal: bytes | None, key: str) -> None:
        self._key = key
        self._left = {entry.name: entry for entry in read(journal, key)}
        self._asked: dict[str, Entry | None] = {}
        self._given_back: dict[str, Entry | None] = {}

    def ask(self, name: str, version: int, aside: bool) -> Entry | None:
        """Ask for a step: what is in the journal of it; None if it has to be run."""
        if name in self._asked:
            raise asked_before(name, self._key)
        if name in self._given_back:
            entry = self._given_back.pop(name)
        else:
            entry = self._left.get(name)
            if not aside and (entry is None or (entry.version == version and not entry.aside)):
                self._check_order(name, version)
            self._left.pop(name, None)
        self._asked[name] = entry
        return entry

    def finish(self, entry: Entry) -> None:
        """A step that was asked for has been run."""
        self._asked[entry.name] = entry

    def give_back(self, name: str) -> None:
        """The handler was not given a step's result: it may ask again, or not. What has been run is not run again."""
        if name in self._asked:
            self._given_back[name] = self._asked.pop(name)

    def _check_order(self, name: str, version: int) -> None:
        mine = (entry for entry in self._left.values() if entry.version == version and not entry.aside)
        expected = next(mine, None)
        if expected is not None and expected.name != name:
            raise StepMismatch(
                f"The handler asks for the step {name!r}, where an earlier attempt finished {expected.name!r}: it has "
                "changed since, or asks in another order each time. The step was not run; what is finished stays so. "
                "If steps have been added, removed or moved, give those that are asked for at another point now "
                "step(…, version=2); if the operation as a whole means something else now, give it a new version=.",
                key=self._key,
                recorded=expected.name,
                asked=name,
            )


def asked_before(name: str, key: str) -> UsageError:
    """The error of a name that stands for two steps."""
    return UsageError(
        f"This attempt has asked for a step {name!r} before. Give every step a name of its own, such as "
        f"'{name} 2': its result is remembered under it.",
        key=key,
    )


def unavailable(name: str, why: str, key: str) -> ResultUnavailable:
    """The error of a step that has happened, and whose result nobody will know."""
    return ResultUnavailable(
        f"The step {name!r} has been done, and will not be done again, but its result can't be remembered: {why}. "
        "Return less from the step, or plain data: what the rest of the handler needs to go on after a crash.",
        key=key,
    )
