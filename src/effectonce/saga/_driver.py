"""Runs a saga inside an attempt at its key: asks what is next, does it, records what became of it, and asks again.

Whatever it may not decide by itself (an entry that could not be recorded, a stop) ends the attempt without a word, so
that the claim stays, its lease ends, and a sweeper or the next caller goes on.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from .._attempt import STEP
from .._progress import Entry as Line
from ..errors import (
    ColourMismatch,
    Compensated,
    InDoubt,
    LeaseLost,
    NotApplied,
    ResultUnavailable,
    Unencodable,
    UsageError,
)
from ..steps import Step, journal_of
from ._decisions import (
    AGAIN,
    BEGIN,
    RECORDED_TRIES,
    TURN,
    Completed,
    Entry,
    Kind,
    Moment,
    Run,
    Stuck,
    Trail,
    Try,
    Turn,
    next_try,
)
from ._definition import parameters_of
from ._outline import Role, Task

if TYPE_CHECKING:
    from .._attempt import Attempt
    from .._colours import Colour
    from ._saga import Saga

Rest = Callable[[float], Awaitable[None]]
"""Lets time pass between two tries; raises Unfinished when nobody shall wait any longer."""


LONGEST_ERROR = 300
"""Characters of an error in the journal."""


class Unfinished(BaseException):
    """Ends an attempt without a word: its claim stays, and whoever comes after its lease goes on."""

    def __init__(self, why: Exception | None = None) -> None:
        super().__init__(why)
        self.why = why


class Here(NamedTuple):
    """Where a step runs: what its barrier goes by."""

    key: str
    step: str


HERE: ContextVar[Here] = ContextVar("effectonce_saga_step")


class Driver:
    """Brings one saga to its end."""

    def __init__(self, saga: Saga, colour: Colour, attempt: Attempt, rest: Rest | None) -> None:
        self._saga, self._colour, self._attempt = saga, colour, attempt
        self._rest = rest or colour.pause
        self._journal = journal_of(attempt)
        self._lock = threading.Lock()
        self.trail = Trail()

    async def drive(self, given: Any, undone: tuple[str, ...] | None = None) -> Trail:
        """Go on until there is an end: the trail of a completed saga, or Compensated, or InDoubt.

        ``undone`` is given by a person who has looked at a saga in doubt: what was undone by hand.
        """
        try:
            self.trail = self._saga.form.read_journal(self._attempt.progress, self._attempt.key)
            await self._begin(given)
            if undone is not None:
                told = sum(1 for name in self.trail.entries if name.startswith(AGAIN))
                await self._note(f"{AGAIN}:{told + 1}", undone=list(undone))
            while isinstance(move := self._moment().decide(), Run | Turn):
                if isinstance(move, Run):
                    await self._run(move)
                else:
                    await self._note(TURN, step=move.step, reason=move.reason)
        except (LeaseLost, NotApplied):
            raise
        except Exception as error:  # not a step's: these are in the journal
            raise Unfinished(error) from error
        return self._ended(move)

    def _ended(self, move: Any) -> Trail:
        key = self._attempt.key
        if isinstance(move, Completed):
            return self.trail
        if isinstance(move, Stuck):
            what = f"The step {move.step!r}" if move.role == "do" else f"The compensation of {move.step!r}"
            raise InDoubt(
                f"{what} of the saga {self._saga.name!r} can't be done: {move.reason}. A person has to look at it. "
                f"When the cause is gone, let it go on with resume(id), or resume(id, undone=({move.step!r},)) for "
                "what was undone by hand; state(id) shows all of it.",
                key=key,
            )
        turn = self.trail.entries[TURN]
        raise Compensated(
            f"The saga {self._saga.name!r} could not go on at {turn['step']!r}: {turn['reason']}. What it had done is "
            "undone, and every repeat gets this answer. A new try needs a new id.",
            key=key,
            step=turn["step"],
            reason=turn["reason"],
            journal=self._saga.form.write(self.trail).decode(),
        )

    def _moment(self) -> Moment:
        saga = self._saga
        return Moment(saga.outline, self.trail, self._attempt.number, saga.clock(), saga.max_lost)

    async def _begin(self, given: Any) -> None:
        begun = self.trail.entries.get(BEGIN)
        if begun is not None:
            self._saga.check_outline(begun["outline"], self._attempt.key)
        elif given is NOTHING:
            # Its process was lost before it had recorded what it was asked for, so before anything was done.
            raise NotApplied("This saga never began. Its client may ask again.", key=self._attempt.key)
        else:
            await self._note(BEGIN, input=given, outline=self._saga.outline.names)

    async def _run(self, run: Run) -> None:
        """Do all of a group, side by side."""
        if len(run.tasks) == 1:
            await self._bring_about(run, run.tasks[0])
            return
        jobs = [self._job(run, task) for task in run.tasks]
        problems, interrupted = await self._colour.gather(jobs, len(jobs))
        for problem in (interrupted, *problems):
            if problem is not None:
                raise problem

    def _job(self, run: Run, task: Task) -> Callable[[], Coroutine[Any, Any, Any]]:
        async def job() -> BaseException | None:
            try:
                await self._bring_about(run, task)
            except BaseException as error:  # whatever it is, it is raised where the saga runs
                return error
            return None

        return job

    async def _bring_about(self, run: Run, task: Task) -> None:
        """Try until it holds, is given up, or one beside it is."""
        role = run.role
        while not any(self._moment().failure(role, each) for each in run.tasks):
            turnout = next_try(role, task, self.trail)
            if not isinstance(turnout, Try):
                return
            pause = min(turnout.after - self._saga.clock(), task.longest_pause)  # a clock may be set back
            await self._rest(max(0.0, pause))
            self._attempt.check()
            await self._try(role, task)

    async def _try(self, role: Role, task: Task) -> None:
        """Try once, and record what became of it."""
        name, began = f"{role}:{task.name}", self._saga.clock()
        try:
            value = await self._called(role, task)
        except Exception as error:
            await self._fail(role, task, failure(kind_of(task, error), error) | {"began": began})
            return
        if role == "undo":
            await self._note(name, began=began)
        elif why := self._unstorable(name, value):
            await self._fail(role, task, failure("unstorable", why) | {"began": began})
        else:
            await self._note(name, began=began, value=value)

    async def _fail(self, role: Role, task: Task, entry: Entry) -> None:
        """Record a failure. What is tried for ever has a journal that ends: of its later failures it has none."""
        tries = len(self.trail.tries(role, task))
        if tries < max(RECORDED_TRIES, task.limit(role) or 0) or entry["kind"] not in ("unknown", "nothing"):
            await self._note(f"{role}:{task.name}!{tries + 1}", **entry)
        else:
            await self._rest(task.longest_pause)

    def _unstorable(self, name: str, value: Any) -> Exception | None:
        """Why a result can't be recorded."""
        try:
            size = len(self._saga.form.write_entry(name, {"value": value}))
        except Unencodable as error:
            return error
        most = self._saga.max_result
        return None if size <= most else UsageError(f"the result has {size} bytes, max_result is {most}")

    async def _called(self, role: Role, task: Task) -> Any:
        function = task.function(role)
        assert function is not None
        with self._inside(role, task):
            args, kwargs = self._arguments(function)
            value = function(*args, **kwargs)
            if inspect.isawaitable(value):
                if not self._colour.awaits:
                    close = getattr(value, "close", None)
                    if close is not None:
                        close()
                    raise ColourMismatch(
                        "A coroutine was returned to a saga that runs without an event loop."
                    )
                value = await (value if task.timeout is None else _limited(value, task.timeout))
            return value

    @contextmanager
    def _inside(self, role: Role, task: Task) -> Iterator[None]:
        """Make ``current()`` and ``barrier`` those of a step."""
        here = HERE.set(Here(self._attempt.key, task.name))
        step = STEP.set(Step(self._attempt, f"{role}:{task.name}"))
        try:
            yield
        finally:
            STEP.reset(step)
            HERE.reset(here)

    def _arguments(self, function: Callable[..., Any]) -> tuple[list[Any], dict[str, Any]]:
        _, *others = parameters_of(function)
        args, kwargs = [self.trail.entries[BEGIN]["input"]], dict[str, Any]()
        names = {task.name for task in self._saga.outline.tasks}
        for parameter in others:
            value = self.trail.value(parameter.name) if parameter.name in names else parameter.default
            if parameter.kind is parameter.KEYWORD_ONLY:
                kwargs[parameter.name] = value
            else:
                args.append(value)
        return args, kwargs

    async def _note(self, name: str, **content: Any) -> None:
        """Record an entry; only then it counts."""
        entry: Entry = {"at": self._saga.clock(), "n": self._attempt.number, **content}
        line = await self._journal.add(self._colour, Line(name, None), entry, self._saga.form.hint(name))
        if line.lacks:
            raise ResultUnavailable(f"The journal of this saga is full: {line.lacks}", key=self._attempt.key)
        with self._lock:
            self.trail = self.trail.plus(name, entry)
        self._attempt.flow.tell_step(self._attempt, name)


class _Nothing:
    """In place of what a saga is asked for, where nobody asks but the journal knows."""


NOTHING = _Nothing()


def kind_of(task: Task, error: Exception) -> Kind:
    """What a step's exception says about its effect."""
    if isinstance(error, (*task.refused, ColourMismatch)):  # a coroutine nobody could await has not begun
        return "refused"
    return "nothing" if isinstance(error, NotApplied) else "unknown"


def failure(kind: Kind, error: Exception) -> Entry:
    """The entry of a failed try."""
    try:
        text = str(error)
    except Exception:  # its words are not worth a saga that never ends
        text = ""
    return {
        "kind": kind,
        "error": f"{type(error).__name__}: {text}"[:LONGEST_ERROR] if text else type(error).__name__,
    }


async def _limited(value: Awaitable[Any], seconds: float) -> Any:
    from asyncio import timeout

    async with timeout(seconds):
        return await value
