"""``Saga``: the object people hold. A saga is one key; its journal is what that key's record holds until it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from .. import codec, keys
from .._answers import call_of
from .._attempt import current
from .._blocking import run
from .._durations import Duration
from .._handlers import is_awaited
from .._messages import Outcome
from .._operations import SAGA_OPERATION
from .._records import State
from ..errors import (
    ColourMismatch,
    Compensated,
    EffectOnceError,
    InDoubt,
    InProgress,
    StepMismatch,
    StoreError,
    StoreUnavailable,
    UsageError,
)
from ..policy import Policy, Resolution
from ..transactions._receiver import OnConnection
from ._decisions import BEGIN, Moment, Trail
from ._definition import outline_of
from ._driver import NOTHING, Driver, Rest, Unfinished
from ._form import Form
from ._outline import Group
from ._state import SagaState, state_of

if TYPE_CHECKING:
    from .._answers import Call
    from .._colours import Colour
    from .._receiver import Receiver
    from .._records import Record

BOOKKEEPING = 1 << 20
"""Bytes of a journal for all that is neither what was asked for nor a result."""


class Saga:
    """Steps that all happen, or are all undone, whatever crashes.

    receiver  whose store has the journal; every process that may go on with a saga has one on the same store
    name      what is done, such as "fulfil": a part of the key
    steps     ``step(…)``, ``pivot(…)`` and ``together(…)``, in order
    version   change it when the steps change: sagas that have begun go on only under the definition they began with
    scope     whose ids these are, unless a call says so
    policy    lease and keep; ``max_attempts`` is how many processes in a row may die without a word in the journal
    timeout   when it is over no step before the pivot is begun or tried again, and the saga is undone
    """

    def __init__(
        self,
        receiver: Receiver,
        name: str,
        *steps: Group,
        version: str | int = "",
        scope: str | None = None,
        policy: Policy | None = None,
        timeout: Duration | None = None,
    ) -> None:
        if isinstance(receiver, OnConnection):
            raise UsageError(
                "A saga outlives every transaction, so it can't be part of one. Give it the receiver itself; what its "
                "steps write can be: see effectonce.saga.barrier."
            )
        self.receiver, self.name, self.version = receiver, name, version
        self.operation = SAGA_OPERATION + name
        self.outline = outline_of(steps, timeout)
        self.form = Form(self.outline)
        self._scope = receiver.scope if scope is None else scope
        given = receiver._policy(policy)
        self.max_lost, self.max_result = given.max_attempts, given.max_result
        self.policy = _own_policy(given, given.max_result * (1 + len(self.outline.tasks)) + BOOKKEEPING)
        self.clock: Callable[[], float] = receiver._clock
        functions = [each for task in self.outline.tasks for each in (task.action, task.undo)]
        self.awaits = any(is_awaited(function) for function in functions)
        keys.prefix(self._scope, self.operation, version)

    # What people call

    def run(self, id: str, input: Any = None, *, scope: str | None = None) -> dict[str, Any]:
        """Bring a saga to its end: the results of its steps by name, the first time and every time.

        Raises ``Compensated`` if it was undone, and ``InDoubt`` if a person has to look at it.
        """
        return self.outcome(id, input, scope=scope).unwrap().value or {}

    async def arun(self, id: str, input: Any = None, *, scope: str | None = None) -> dict[str, Any]:
        """``run`` for callers on an event loop."""
        return (await self.aoutcome(id, input, scope=scope)).unwrap().value or {}

    def outcome(self, id: str, input: Any = None, *, scope: str | None = None) -> Outcome[dict[str, Any]]:
        """``run`` that says what happened instead of raising: the error of an outcome is what ``run`` raises."""
        self._check_blocking()
        return run(self._outcome(self.receiver.blocking, self._call(id, input, scope), input, None))

    async def aoutcome(
        self, id: str, input: Any = None, *, scope: str | None = None
    ) -> Outcome[dict[str, Any]]:
        """``outcome`` for callers on an event loop."""
        return await self._outcome(self.receiver.asyncio, self._call(id, input, scope), input, None)

    def resume(
        self, id: str, *, undone: Iterable[str] = (), scope: str | None = None
    ) -> Outcome[dict[str, Any]]:
        """Go on with a saga that its journal knows: one that was left behind, or that a person has looked at.

        ``undone`` names steps whose compensation was done by hand, of a saga that waits for a person or was on its way
        back when its process died.
        """
        self._check_blocking()
        return run(self._resume(self.receiver.blocking, self.key(id, scope=scope), tuple(undone)))

    async def aresume(
        self, id: str, *, undone: Iterable[str] = (), scope: str | None = None
    ) -> Outcome[dict[str, Any]]:
        """``resume`` for callers on an event loop."""
        return await self._resume(self.receiver.asyncio, self.key(id, scope=scope), tuple(undone))

    def state(self, id: str, *, scope: str | None = None) -> SagaState | None:
        """Where a saga is: its steps with tries, times, results and errors. None if nobody knows it."""
        return run(self._state(self.receiver.blocking, self.key(id, scope=scope)))

    async def astate(self, id: str, *, scope: str | None = None) -> SagaState | None:
        """``state`` for callers on an event loop."""
        return await self._state(self.receiver.asyncio, self.key(id, scope=scope))

    def key(self, id: str, *, scope: str | None = None) -> str:
        """The key of a saga, as stores and errors name it."""
        whose = self._scope if scope is None else scope
        return keys.Key.of(id, self.operation, whose, self.version).text

    # For the sweeper and the driver

    async def redrive(self, colour: Colour, record: Record, rest: Rest | None) -> Outcome[dict[str, Any]]:
        """Go on with an abandoned saga; one that somebody else goes on with is left alone."""
        policy = self.policy.but(busy="reject")
        call = call_of(record.key, record.fingerprint, policy, self._hint, may_create=False)
        return await self._outcome(colour, call, NOTHING, rest)

    def is_due(self, record: Record) -> bool:
        """Whether there is something to do for an abandoned saga, or its next try is still to wait for."""
        try:
            trail = self.trail_of(record)
        except EffectOnceError:  # who goes on with it says what is wrong
            return True
        now = self.clock()
        moment = Moment(self.outline, trail, record.attempts + 1, now, self.max_lost)
        return BEGIN not in trail.entries or moment.due() <= now

    def check_outline(self, names: Any, key: str) -> None:
        """Raise if a saga was begun by another definition."""
        mine = self.outline.names
        if names != mine:
            raise StepMismatch(
                f"This saga was begun with the steps {_shown(names)}, and {self.name!r} has {_shown(mine)} now. Give "
                "the changed definition a new version=, and keep the old one beside it until its sagas have ended.",
                key=key,
            )

    def trail_of(self, record: Record) -> Trail:
        """The journal that a record holds, in whatever state it is."""
        if record.state is State.COMPLETED and record.result is not None:
            return self.form.read(record.result)
        if record.state is State.FAILED and record.result is not None:
            error = codec.decode_error(record.result, (Compensated,))
            return self.form.read(getattr(error, "journal", "{}").encode())
        return self.form.read_journal(record.progress, record.key)

    @property
    def _hint(self) -> Any:
        return codec.Form(self.form.write, self.form.read)

    def _call(self, id: str, input: Any, scope: str | None) -> Call:
        # What can't be recorded is refused before anything is claimed.
        size = len(self.form.write_entry(BEGIN, {"input": input}))
        if size > self.max_result:
            raise UsageError(f"A saga is asked for {size} bytes, and max_result is {self.max_result}.")
        return call_of(self.key(id, scope=scope), keys.fingerprint(input), self.policy, self._hint)

    async def _outcome(
        self, colour: Colour, call: Call, given: Any, rest: Rest | None, undone: tuple[str, ...] | None = None
    ) -> Outcome[dict[str, Any]]:
        """Run a saga in the receiver's flow."""
        driver: Driver | None = None

        async def drive() -> Trail:
            nonlocal driver
            driver = Driver(self, colour, current(), rest)
            return await driver.drive(given, undone)

        handler = drive if colour.awaits else lambda: run(drive())
        try:
            outcome = await self.receiver.flow.run(colour, call, handler, (), {})
        except Unfinished as left:
            return _unfinished(call, left)
        if isinstance(outcome.value, Trail):
            moment = Moment(self.outline, outcome.value, outcome.attempt)
            outcome = outcome._replace(value=moment.results())
        elif driver is None and isinstance(outcome.error, InDoubt):
            outcome = outcome._replace(error=self._doubt(call.key))
        return outcome

    def _doubt(self, key: str) -> InDoubt:
        """What repeats of a saga in doubt get: it is settled by its own words, since only they know its journal."""
        return InDoubt(
            f"The saga {self.name!r} waits for a person. state(id) shows where it stands and why. When the cause is "
            "gone, let it go on with resume(id), or resume(id, undone=(…,)) for what was undone by hand.",
            key=key,
        )

    async def _resume(self, colour: Colour, key: str, undone: tuple[str, ...]) -> Outcome[dict[str, Any]]:
        record = await colour.store.get(key)
        if record is None:
            raise UsageError("No saga of this id is known, so there is nothing to go on with.", key=key)
        is_in_doubt = record.state is State.IN_DOUBT
        self._check_undone(record, undone)
        # Who goes on with it at this moment has not heard what was undone, so there is no sense in waiting for it.
        policy = self.policy.but(busy="reject") if undone else self.policy
        call = call_of(key, record.fingerprint, policy, self._hint)
        if is_in_doubt:
            await self.receiver.flow.settle(colour, call, record, Resolution.not_applied())
        return await self._outcome(colour, call, NOTHING, None, undone if undone or is_in_doubt else None)

    def _check_undone(self, record: Record, undone: tuple[str, ...]) -> None:
        """Raise if what was undone by hand can't be told any more, or not yet."""
        unknown = set(undone) - {task.name for task in self.outline.tasks}
        if unknown:
            raise UsageError(
                f"undone= names {', '.join(sorted(unknown))}, which {self.name!r} does not have."
            )
        if not undone or record.state is State.IN_DOUBT:
            return
        trail = self.trail_of(record)
        is_told = all(trail.holds("undo", task) for task in self.outline.tasks if task.name in undone)
        is_over = record.state in (State.COMPLETED, State.FAILED)
        if is_told or (trail.turn is not None and not is_over):
            return
        where = "has ended" if is_over else "is on its way forward"
        raise UsageError(
            f"undone= tells of {', '.join(undone)}, but the saga {self.name!r} waits for nobody: it {where}. What was "
            "undone by hand is told while it waits for a person. Look at state(id), and leave undone= out.",
            key=record.key,
        )

    async def _state(self, colour: Colour, key: str) -> SagaState | None:
        record = await colour.store.get(key)
        if record is None:
            return None
        return state_of(self, record, self.trail_of(record), await colour.store.now())

    def _check_blocking(self) -> None:
        if self.awaits:
            raise ColourMismatch(
                f"The saga {self.name!r} has coroutine functions. Use `await saga.arun(…)` for it."
            )


def _own_policy(policy: Policy, room: int) -> Policy:
    """A policy for sagas: what fails is in the journal, so what is left to say is how an end is remembered."""
    for word, is_wrong, why in (
        (
            "on_crash",
            policy.on_crash == "in_doubt",
            "it goes on after a crash, and steps say what is tried again",
        ),
        ("store_result", not policy.store_result, "its results are what its repeats get"),
        ("fallback", policy.fallback == "open", "without a journal nobody could go on or undo anything"),
    ):
        if is_wrong:
            given = getattr(policy, word)
            raise UsageError(f"A saga can't have {word}={given!r}: {why}. Give it a policy= of its own.")
    endings: dict[str, Any] = {"remember": (Compensated,), "in_doubt": (InDoubt,), "prober": None}
    return policy.but(max_attempts=None, max_result=room, **endings)


def _unfinished(call: Call, left: Unfinished) -> Outcome[Any]:
    """The outcome of a saga that was left where it is: somebody goes on with it when its lease is over."""
    lease = call.policy.lease
    later = f"The saga is not done. It goes on when its lease is over ({lease:g} s at most), by a sweeper or "
    if left.why is None:
        error: BaseException = InProgress(f"{later}by asking again.", key=call.key, retry_after=lease)
        return Outcome("in_progress", error=error)
    if not isinstance(left.why, StoreError):
        return Outcome("failed", error=left.why)
    error = StoreUnavailable(f"{left.why} {later}by asking again with the same id.", key=call.key)
    error.__cause__ = left.why
    return Outcome("store_error", error=error)


def _shown(names: Any) -> str:
    return ", ".join("+".join(group) for group in names)
