"""What a saga does next, decided from its journal alone. Pure: no I/O, clock or chance.

The journal is the entries of one key, in the order in which they were recorded. A driver does what is decided here,
records what became of it, and asks again; so a process that takes over goes on behind the last entry.

    begin           what was asked, and by which definition
    do:NAME         a step has happened; its result
    do:NAME!1       its first try failed, and why
    turn            the decision to compensate, with the step and the reason: from here on the saga only goes back
    undo:NAME       a step's compensation has happened
    undo:NAME!1     its first try failed
    again:1         a person had a saga in doubt go on: what failed before does not count any more

Every entry says when it was recorded (``at``) and by which attempt at the saga's key (``n``). Between two entries with
different numbers a process was lost, and what it ran then may have happened without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count, takewhile
from typing import Any, Literal, NamedTuple
from zlib import crc32

from ._outline import Group, Outline, Role, Task

Entry = dict[str, Any]
Kind = Literal["unknown", "nothing", "refused", "unstorable"]
"""What a failed try leaves behind: nobody knows; nothing; nothing, now and ever; a result that can't be recorded."""

BEGIN, TURN, AGAIN = "begin", "turn", "again"
RECORDED_TRIES = 20
"""Failures of one step that are recorded, if there is no end to its tries."""


class Trail:
    """A journal, read. It never changes: steps that run side by side may look at it while another is recorded."""

    def __init__(self, entries: Mapping[str, Entry] | None = None) -> None:
        self.entries: Mapping[str, Entry] = {} if entries is None else entries

    def plus(self, name: str, entry: Entry) -> Trail:
        """The trail with one entry more."""
        return Trail({**self.entries, name: entry})

    def holds(self, role: Role, task: Task) -> bool:
        """Whether this has happened. Of a compensation a person may have said so."""
        if f"{role}:{task.name}" in self.entries:
            return True
        return role == "undo" and any(task.name in entry["undone"] for entry in self._again())

    def tries(self, role: Role, task: Task) -> list[Entry]:
        """All tries that failed, in order."""
        names = (f"{role}:{task.name}!{number}" for number in count(1))
        return [self.entries[name] for name in takewhile(self.entries.__contains__, names)]

    def failures(self, role: Role, task: Task) -> list[Entry]:
        """Those that count: the ones after a person's last word."""
        names = list(self.entries)
        last = max((place for place, name in enumerate(names) if name.startswith(AGAIN)), default=-1)
        earlier = sum(name.startswith(f"{role}:{task.name}!") for name in names[: last + 1])
        return self.tries(role, task)[earlier:]

    def value(self, name: str) -> Any:
        """A step's result; None if it is not known."""
        return self.entries.get(f"do:{name}", {}).get("value")

    @property
    def turn(self) -> Entry | None:
        """The decision to compensate."""
        return self.entries.get(TURN)

    @property
    def last_number(self) -> int:
        """The attempt at the saga's key that recorded the last entry."""
        return max((entry["n"] for entry in self.entries.values()), default=0)

    def _again(self) -> list[Entry]:
        return [entry for name, entry in self.entries.items() if name.startswith(AGAIN)]


# One step


class Held(NamedTuple):
    """It has happened."""


class Try(NamedTuple):
    """Do it, not before this time."""

    after: float


class GaveUp(NamedTuple):
    """It can't be done."""

    reason: str


Turnout = Held | Try | GaveUp


def next_try(role: Role, task: Task, trail: Trail, is_clean: bool = False) -> Turnout:
    """Say whether a step, or its compensation, is tried (again).

    A pivot that may have happened is tried until it says so or refuses: nobody may undo what is final.
    """
    if trail.holds(role, task):
        return Held()
    failures = trail.failures(role, task)
    if not failures:
        return Try(0.0)
    last, limit = failures[-1], task.limit(role)
    if last["kind"] in ("refused", "unstorable"):
        return GaveUp(last["error"])
    if limit is not None and len(failures) >= limit and (is_clean or not task.is_pivot or role == "undo"):
        times = "once" if limit == 1 else f"{limit} times"
        return GaveUp(f"tried {times}, the last error was {last['error']}")
    return Try(last["at"] + _pause(task, len(failures), last["at"]))


def _pause(task: Task, failures: int, at: float) -> float:
    """Twice as long after each failure, less up to a quarter, so that many sagas don't come back at once."""
    pause = min(task.first_pause * 2.0 ** min(failures - 1, 60), task.longest_pause)
    return pause * (1 - crc32(f"{task.name} {at}".encode()) / 2**34)


# The saga


class Run(NamedTuple):
    """Do these side by side."""

    role: Role
    tasks: Group


class Turn(NamedTuple):
    """Record the decision to compensate."""

    step: str
    reason: str


class Completed(NamedTuple):
    """All steps have happened."""


class Undone(NamedTuple):
    """All that had happened is compensated."""


class Stuck(NamedTuple):
    """A person has to look at it."""

    role: Role
    step: str
    reason: str


Move = Run | Turn | Completed | Undone | Stuck


class Moment(NamedTuple):
    """A saga at one moment, as far as its next move depends on it."""

    outline: Outline
    trail: Trail
    number: int
    """Of the attempt at its key that is running."""
    now: float = 0.0
    max_lost: int | None = None
    """How many attempts in a row may be lost without a word in the journal."""

    def decide(self) -> Move:
        """Say what comes next."""
        if self.trail.turn is not None:  # 1. turned: undo the last group that is not undone
            return self._backward()
        group = next((group for group in self.outline.groups if not self._all_hold("do", group)), None)
        if group is None:  # 2. all has happened
            return Completed()
        todo = tuple(task for task in group if not self.trail.holds("do", task))
        failed = next(((task.name, why) for task in todo if (why := self.failure("do", task))), None)
        if failed is None:  # 3. nothing is wrong: go on
            return Run("do", todo)
        if self._may_turn(group):  # 4. all that was done is undone, which has to be recorded first
            return Turn(*failed)
        return Stuck("do", *failed)  # 5. there is no way back, and no way forward without a person

    def failure(self, role: Role, task: Task) -> str | None:
        """Why a step, or a compensation, can't be done; None if it can."""
        turnout = next_try(role, task, self.trail, self.is_untouched(task))
        if isinstance(turnout, GaveUp):
            return turnout.reason
        lost = self.number - self.trail.last_number
        is_counted = len(self.trail.tries(role, task)) < RECORDED_TRIES  # else a try need not leave a word
        if self.max_lost is not None and lost >= self.max_lost and is_counted:
            return f"the process died {lost} times while it ran"
        if role == "do" and self._is_late and self._is_open(task):
            return f"the saga was not done in {self.outline.timeout:g} s"
        return None

    def due(self) -> float:
        """When there is something to do: before this time every step that is next only waits for its next try."""
        move = self.decide()
        if not isinstance(move, Run):
            return 0.0
        turnouts = [next_try(move.role, task, self.trail) for task in move.tasks]
        return min(turnout.after if isinstance(turnout, Try) else 0.0 for turnout in turnouts)

    def is_untouched(self, task: Task) -> bool:
        """Whether nothing of a step can have happened: it never began, or each try said that nothing did.

        That is known only while no process was lost since the step before it was recorded.
        """
        trail, earlier = self.trail, list[str]()
        for group in self.outline.groups:
            if task in group:
                break
            if not self._all_hold("do", group):
                return True  # its turn never came
            earlier += [f"do:{each.name}" for each in group]
        before = [entry for name, entry in trail.entries.items() if name in (BEGIN, *earlier)]
        until = trail.turn or {"n": self.number}
        is_clean = all(entry["kind"] in ("nothing", "refused") for entry in trail.tries("do", task))
        has_no_gap = max((entry["n"] for entry in before), default=0) == until["n"]
        return not trail.holds("do", task) and is_clean and has_no_gap

    def results(self) -> dict[str, Any]:
        """What every step returned, of those that it began with."""
        begun = self.trail.entries.get(BEGIN)
        groups = self.outline.names if begun is None else begun["outline"]
        return {name: self.trail.value(name) for group in groups for name in group}

    def _backward(self) -> Move:
        for group in reversed(self.outline.groups):
            due = tuple(task for task in group if self._has_to_be_undone(task))
            for task in due:
                if why := self.failure("undo", task):
                    return Stuck("undo", task.name, why)
            if due:
                return Run("undo", due)
        return Undone()

    def _has_to_be_undone(self, task: Task) -> bool:
        is_done = task.undo is None or self.trail.holds("undo", task)
        return not is_done and not self.is_untouched(task)

    def _all_hold(self, role: Role, group: Group) -> bool:
        return all(self.trail.holds(role, task) for task in group)

    def _may_turn(self, group: Group) -> bool:
        """Whether all can still be undone: the pivot has not happened, nor may it have."""
        pivot = self.outline.pivot
        if pivot is None:
            return True
        if pivot not in group:
            return not self.trail.holds("do", pivot)
        failures = self.trail.failures("do", pivot)
        return self.is_untouched(pivot) or bool(failures and failures[-1]["kind"] == "refused")

    def _is_open(self, task: Task) -> bool:
        """Whether a step may be given up for want of time."""
        pivot = self.outline.pivot
        if pivot is None or (task is not pivot and not self.trail.holds("do", pivot)):
            return True
        return task is pivot and self.is_untouched(pivot)

    @property
    def _is_late(self) -> bool:
        timeout = self.outline.timeout
        return timeout is not None and self.now - self.trail.entries[BEGIN]["at"] > timeout
