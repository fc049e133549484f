"""Steps: parts of a handler that are finished one by one, so that a crash costs the part that was running, not all.

The results of finished steps are a journal in the record of the attempt. It is written by a renewal that carries it,
under the attempt's owner and fence: one round trip for each step, and a result is given to the handler only when it is
recorded. Whoever takes the key over, or tries again after an error, gets the journal with its claim, and is given what
is in it instead of running those steps again.

Every write has the whole journal, and a journal only grows. So a write may be sent twice, arrive late or pass another:
the longest one stays, and steps that run side by side need not wait for one another.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Token
from types import CoroutineType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from . import _progress as progress
from . import codec, keys
from ._answers import call_of
from ._attempt import CURRENT, STEP, STEP_OPERATION, Attempt, take_back
from ._blocking import not_awaited, run
from ._colours import insist
from ._records import Record, Renewal
from .errors import ColourMismatch, LeaseLost, StoreError, StoreUnavailable, UsageError

if TYPE_CHECKING:
    from ._colours import Colour

__all__ = ["Step", "finished"]

UNKEPT = "it has {} bytes, and all results of an attempt's steps together may have max_result = {}"


def finished(record: Record) -> dict[str, Any]:
    """The steps that a record's attempts have finished, in that order, with their results as plain data.

    For probers, sweepers and people: of a key that has no answer yet, or is in doubt.
    """
    return {entry.name: entry.tree for entry in progress.read(record.progress, record.key)}


class Journal:
    """The journal of a running attempt: what earlier attempts left of it, and what this one adds.

    An attempt whose effects are a transaction of the user's has nothing to add: they are committed together or not
    at all. One that runs unprotected has nobody to tell.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._lock = threading.Lock()
        self._text = attempt.progress
        self._recorded = attempt.guarantee in ("fenced", "at_most_once")
        self._unsaved: dict[str, int] = {}  # by name, the length of the journal that has to be written for it
        self._program = progress.Program(self._text, attempt.key)
        self._elsewhere: set[str] = set()  # steps of this run that have records of their own, in transactions

    @property
    def entries(self) -> list[progress.Entry]:
        """What is finished, in the order in which it was."""
        return progress.read(self._text, self._attempt.key)

    @property
    def unsaved(self) -> bytes | None:
        """The whole of it if there is something in it that may not be in the store."""
        return self._text if self._unsaved else None

    def ask(self, name: str, version: int, aside: bool) -> progress.Entry | None:
        """Ask for a step: what is in the journal of it; None if it has to be run."""
        with self._lock:
            return self._program.ask(name, version, aside)

    def give_back(self, name: str) -> None:
        """The handler was not given this step's result: it may ask again."""
        with self._lock:
            self._program.give_back(name)

    def was_elsewhere(self, name: str) -> bool:
        """Whether a step was done in a transaction before. That may have been rolled back: its own record knows."""
        with self._lock:
            if name not in self._elsewhere:
                return False
            self._program.give_back(name)
            return True

    def is_elsewhere(self, name: str) -> None:
        """A step was done in a transaction, which is still to be committed."""
        with self._lock:
            self._elsewhere.add(name)

    async def add(self, colour: Colour, entry: progress.Entry, value: Any, hint: Any) -> progress.Entry:
        """Record a step that was run. One whose result can't be kept is recorded all the same: it did happen."""
        if not self._recorded:
            return entry
        with self._lock:
            entry, text = self._extended(entry, value, hint)
            self._text, self._unsaved[entry.name] = text, len(text)
            self._program.finish(entry)
        await self.save(colour, entry.name)
        return entry

    async def save(self, colour: Colour, name: str) -> None:
        """Write the journal, unless it is known to be in the store with this step in it."""
        if name not in self._unsaved:
            return
        attempt, held = self._attempt, await self._write(colour, self._text)
        if isinstance(held, StoreError):
            raise StoreUnavailable(
                f"The step {name!r} has run, but could not be recorded: {held} It goes with the next word about this "
                "attempt that reaches the store. If none does, it runs again when the attempt is repeated: give its "
                "effect the key that current().key_for(…) makes, and it happens once all the same.",
                key=attempt.key,
            ) from held
        if not held:
            raise LeaseLost(
                f"The step {name!r} has run, but the lease of its attempt was over and another has taken over, so it "
                "was not recorded, and its result must not be used.",
                key=attempt.key,
            )

    async def hold(self, colour: Colour) -> None:
        """Make sure that the attempt may go on. A lease that is over by the local clock may still be had."""
        attempt = self._attempt
        while self._recorded and attempt.lost and not attempt.was_told:
            if await self._write(colour, None) is not True:
                break
        attempt.check()

    async def _write(self, colour: Colour, text: bytes | None) -> bool | StoreError:
        """Renew the claim with the journal, until there is an answer, or else the error of the last try."""
        attempt = self._attempt
        claim, asked_at = attempt.claim, attempt.flow.monotonic()
        renewal = Renewal(claim.key, claim.owner, attempt.fence, claim.lease, claim.keep, text)
        held, cancelled = await insist(colour, lambda: colour.store.renew(renewal))
        if held is False and not attempt.was_told:
            attempt.flow.keeper.lose(attempt, "another attempt took over")
        elif held is True:
            attempt.hold(asked_at)
            if text is not None:
                with self._lock:
                    self._unsaved = {each: size for each, size in self._unsaved.items() if size > len(text)}
        if cancelled is not None:
            raise cancelled
        if isinstance(held, UsageError):
            raise held
        return held

    def _extended(self, entry: progress.Entry, value: Any, hint: Any) -> tuple[progress.Entry, bytes]:
        try:
            result = codec.encode(value, hint)
            text = progress.added(self._text, entry, result)
            most = self._attempt.policy.max_result
            if len(text) <= most:
                return entry._replace(tree=codec.parse(result)), text
            lacks = UNKEPT.format(len(result), most)
        except codec.Unencodable as error:
            lacks = str(error)
        entry = entry._replace(lacks=lacks)
        return entry, progress.added(self._text, entry, b"null")


def journal_of(attempt: Attempt) -> Journal:
    """The journal of an attempt. Only those that have steps get one."""
    if attempt.journal is not None:
        return attempt.journal
    made = Journal(attempt)
    journal: Journal = attempt.__dict__.setdefault("journal", made)  # at once: several threads may ask
    return journal


class Step:
    """One step of an attempt; as a block ``with attempt.stepping("reserve") as step``, also ``async with``.

    ``step.first`` says whether this block has to do the work. It then ends with ``step.complete(value)`` (or ``await
    step.acomplete(value)``); leaving the block without it completes with None, leaving it by an exception leaves the
    step undone. ``step.value`` is the result, however often the attempt is repeated. ``step.key`` is the step's own
    downstream key, and inside it ``current().key_for(…)`` derives from that.
    """

    def __init__(
        self, attempt: Attempt, name: str, *, hint: Any = Any, version: int = 1, aside: bool | None = None
    ) -> None:
        if type(name) is not str or not name.strip() or len(name) > keys.LONGEST:
            raise UsageError(
                f"{name!r} can't be the name of a step. Use one such as 'reserve'.", key=attempt.key
            )
        if type(version) is not int or version < 1:
            raise UsageError(
                f"version={version!r} of a step must be a whole number, 1 or more.", key=attempt.key
            )
        self.attempt, self.name, self.version = attempt, name, version
        self.key = keys.derived(f"{attempt.key}\0step", name)  # no key has a \0, so it is nobody else's
        self._hint, self._aside = hint, aside
        self._entry: progress.Entry | None = None
        self._first = False
        self._tokens: tuple[Token[Attempt], Token[Step]] | None = None
        self._awaits: bool | None = None
        self._value: Any = None
        self._told = False
        self._done = False

    @property
    def first(self) -> bool:
        """Whether this block runs the step. False: an earlier attempt finished it, and ``value`` has its result."""
        return self._first

    @property
    def value(self) -> Any:
        """The result, once there is one."""
        if not self._done:
            raise UsageError(
                f"The step {self.name!r} has no result yet. Call complete(value) first.", key=self.attempt.key
            )
        return self._value

    def key_for(self, name: str) -> str:
        """A key for a call downstream: the same on every attempt, and another one than that of any other step."""
        return keys.derived(self.key, name)

    # As a block

    def complete(self, value: Any = None) -> Any:
        """Record the result, then return it."""
        self._colour_is(awaits=False, instead="await step.acomplete(value)")
        return run(self._complete(self.attempt.flow.home.blocking, value))

    async def acomplete(self, value: Any = None) -> Any:
        """``complete`` for ``async with``."""
        self._colour_is(awaits=True, instead="step.complete(value)")
        return await self._complete(self.attempt.flow.home.asyncio, value)

    def __enter__(self) -> Self:
        return run(self._enter(self.attempt.flow.home.blocking))

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        run(self._exit(self.attempt.flow.home.blocking, error))

    async def __aenter__(self) -> Self:
        return await self._enter(self.attempt.flow.home.asyncio)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._exit(self.attempt.flow.home.asyncio, error)

    # As a call

    async def call(
        self, colour: Colour, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a function as this step, or give what it returned to an earlier attempt."""
        if await self.ask(colour):
            with self.inside():
                value = function(*args, **kwargs)
                if type(value) is CoroutineType or (colour.awaits and inspect.isawaitable(value)):
                    value = await value if colour.awaits else self._not_awaited(value)
            await self.record(colour, value)
        return self._value

    async def call_on(
        self, connection: Any, function: Callable[..., Any], args: Any, kwargs: Any, *, awaits: bool
    ) -> Any:
        """The same in a transaction of the user's: recorded there, under the step's own key, and committed with it."""
        if self.attempt.guarantee == "atomic":
            raise UsageError(
                f"The step {self.name!r} is part of a transaction as it is; on= has no place here.",
                key=self.attempt.key,
            )
        self._aside = True  # it is not in the journal, so it has no place in its order
        home = self.attempt.flow.home
        receiver = home.on(connection)
        colour = receiver.asyncio if awaits else receiver.blocking
        journal = journal_of(self.attempt)
        was_done = journal.was_elsewhere(self.name)
        if await self.ask(home.asyncio if awaits else home.blocking):
            call = call_of(keys.prefix("", STEP_OPERATION) + self.key, b"", self.attempt.policy, self._hint)
            with self._or_again():
                outcome = (await receiver.flow.run(colour, call, function, args, kwargs)).unwrap()
                if was_done and outcome.replayed:  # it was not rolled back, so this is another step
                    raise progress.asked_before(self.name, self.attempt.key)
            journal.is_elsewhere(self.name)
            self.attempt.flow.tell_step(self.attempt, f"{self.name}: {outcome.status}")
            self._settle(outcome.value)
        return self._value

    # The parts of both

    async def ask(self, colour: Colour) -> bool:
        """Whether the step has to be run. Raises if it is not the one that is expected, or was asked for before."""
        attempt = self.attempt
        if attempt.ending or attempt.ended:
            raise UsageError(
                f"The step {self.name!r} comes after the end of its attempt. A handler has to wait for the tasks and "
                "threads that it starts.",
                key=attempt.key,
            )
        outer = STEP.get(None)
        if outer is not None and outer.attempt is attempt:
            raise UsageError(
                f"The step {self.name!r} is inside of the step {outer.name!r}. A step is done as a whole or not at "
                "all: let the handler ask for one after the other.",
                key=attempt.key,
            )
        journal = journal_of(attempt)
        await journal.hold(colour)
        aside = attempt.is_aside if self._aside is None else self._aside
        entry = journal.ask(self.name, self.version, aside)
        self._entry, self._first = entry, entry is None
        if entry is None:
            self._entry = progress.Entry(self.name, None, self.version, aside)
            return True
        with self._or_again():
            await journal.save(colour, self.name)  # a try before may have run it, and failed to record it
            self._settle(entry.value(self._hint, attempt.key))
        attempt.flow.tell_step(attempt, f"{self.name}: replayed")
        return False

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Where the step is run. What leaves this by an exception is not done, and may be asked for again."""
        self._step_in()
        try:
            with self._or_again():
                yield
        finally:
            self._step_out()

    async def record(self, colour: Colour, value: Any) -> None:
        """Record the result of the step, which was run."""
        assert self._entry is not None
        with self._or_again():
            entry = await journal_of(self.attempt).add(colour, self._entry, value, self._hint)
            self.attempt.flow.tell_step(self.attempt, self.name)
            if entry.lacks:
                raise progress.unavailable(self.name, entry.lacks, self.attempt.key)
        self._settle(value)

    @contextmanager
    def _or_again(self) -> Iterator[None]:
        """Who leaves this by an exception has no result, and may ask for the step again."""
        try:
            yield
        except BaseException:
            journal_of(self.attempt).give_back(self.name)
            raise

    def _step_in(self) -> None:
        """Let ``current()`` and its keys be the step's: also on a thread that the handler has started."""
        self._tokens = CURRENT.set(self.attempt), STEP.set(self)

    def _step_out(self) -> None:
        assert self._tokens is not None
        take_back(CURRENT, self._tokens[0])
        take_back(STEP, self._tokens[1])

    def _settle(self, value: Any) -> None:
        self._value, self._done = value, True

    def _not_awaited(self, value: Any) -> NoReturn:
        raise not_awaited(self.attempt, value)

    async def _enter(self, colour: Colour) -> Self:
        if self._awaits is not None:
            raise UsageError("A step can be entered once. Ask the attempt for another.", key=self.attempt.key)
        self._awaits = colour.awaits
        if await self.ask(colour):
            self._step_in()
        return self

    async def _complete(self, colour: Colour, value: Any) -> Any:
        if self._done or not self._first:
            raise UsageError(f"The step {self.name!r} has its result already.", key=self.attempt.key)
        journal = journal_of(self.attempt)
        entry = journal.ask(self.name, self.version, aside=True) if self._told else None
        self._told = True
        if entry is None:
            await self.record(colour, value)
            return value
        with self._or_again():  # the store was away when it was told: what it was told then stays
            await journal.save(colour, self.name)
            self._settle(entry.value(self._hint, self.attempt.key))
        return self._value

    async def _exit(self, colour: Colour, error: BaseException | None) -> None:
        if self._tokens is None:
            return
        self._step_out()
        if self._done:
            return
        if error is None and not self._told:
            await self._complete(colour, None)
        else:
            journal_of(self.attempt).give_back(self.name)

    def _colour_is(self, *, awaits: bool, instead: str) -> None:
        if self._awaits is None:
            raise UsageError("This step has not been entered. Write `with attempt.stepping(…) as step:`.")
        if self._awaits is not awaits:
            raise ColourMismatch(f"This block has the other colour; use {instead}.", key=self.attempt.key)
