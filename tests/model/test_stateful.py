"""A receiver beside a plain dictionary that says what has to be remembered: whatever is done, the two agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from tests.model import bugs

from effectonce import (
    EffectOnceError,
    InDoubt,
    InProgress,
    KeyReused,
    Message,
    NotApplied,
    Outcome,
    Policy,
    Receiver,
    State,
    codec,
    current,
)
from effectonce.errors import AttemptsExhausted
from effectonce.hooks import Hook
from effectonce.policy import Resolution
from effectonce.steps import finished
from effectonce.stores.memory import MemoryStore
from effectonce.testing.clocks import ManualClock

LEASE, KEEP, MOST = 30.0, 600.0, 2
RUNS = "the handler has to run"


class Declined(Exception):
    """An error that is a result."""


class TimedOut(Exception):
    """An error after which nobody knows."""


class Killed(BaseException):
    """What ends a worker without a word."""


RETRY = Policy(lease=LEASE, keep=KEEP, busy="reject", remember=(Declined,), in_doubt=(TimedOut,))
POLICIES = {
    "a": RETRY,
    "b": RETRY,
    "once": RETRY.but(on_crash="in_doubt"),
    "twice": RETRY.but(max_attempts=MOST),
    "blind": RETRY.but(store_result=False),
    "cached": RETRY.but(local_cache=2),
}
"""Each id has a policy of its own, for good."""


@dataclass
class Memory:
    """What has to be remembered of one id."""

    state: State
    payload: int
    attempts: int
    until: float
    """When it may be forgotten."""
    value: Any = None
    lease_until: float = 0.0
    steps: tuple[str, ...] = ()
    """What attempts have finished, as long as there is no answer."""


@dataclass
class Model:
    """The plain dictionary, and the one rule for what a delivery gets."""

    now: Callable[[], float]
    ids: dict[str, Memory] = field(default_factory=dict)

    def look(self, id: str) -> Memory | None:
        memory = self.ids.get(id)
        if memory is None or memory.state is State.IN_DOUBT or memory.until > self.now():
            return memory
        crashed_once = memory.state is State.PENDING and POLICIES[id].on_crash == "in_doubt"
        return memory if crashed_once else None

    def expect(self, id: str, payload: int) -> Any:
        """A remembered answer as it is raised or returned, a type of refusal, or RUNS."""
        memory = self.look(id)
        if memory is None:
            return RUNS
        if memory.payload != payload:
            return KeyReused
        if memory.state is State.PENDING:
            if memory.lease_until > self.now():
                return InProgress
            if POLICIES[id].on_crash == "in_doubt":
                return InDoubt
        if memory.state is State.IN_DOUBT:
            return InDoubt
        if memory.state in (State.COMPLETED, State.FAILED):
            return memory.value
        if POLICIES[id].max_attempts is not None and memory.attempts >= MOST:
            return AttemptsExhausted
        return RUNS

    def delivered(self, id: str, payload: int) -> Any:
        """What a delivery gets, with what it leaves behind: a new attempt, a doubt or a poisoned key."""
        expected = self.expect(id, payload)
        if expected is RUNS:
            self.begin(id, payload)
        elif expected is InDoubt:
            self.ids[id].state = State.IN_DOUBT
        elif expected is AttemptsExhausted and self.ids[id].state is not State.FAILED:
            self.end(id, State.FAILED, AttemptsExhausted)
        return expected

    def begin(self, id: str, payload: int) -> None:
        memory = self.look(id)
        attempts = memory.attempts + 1 if memory else 1
        lease_until = self.now() + LEASE
        steps = memory.steps if memory else ()
        self.ids[id] = Memory(State.PENDING, payload, attempts, lease_until + KEEP, None, lease_until, steps)

    def end(self, id: str, state: State, value: Any = None) -> None:
        steps = () if state in (State.COMPLETED, State.FAILED) else self.ids[id].steps
        self.ids[id] = replace(self.ids[id], state=state, value=value, until=self.now() + KEEP, steps=steps)

    def hold(self, id: str, *steps: str) -> None:
        """A lease was renewed, perhaps with steps that were finished."""
        memory, lease_until = self.ids[id], self.now() + LEASE
        done = (*memory.steps, *(step.split()[1] for step in steps))
        self.ids[id] = replace(memory, steps=done, lease_until=lease_until, until=lease_until + KEEP)


ENDS: dict[str, tuple[State, type[BaseException] | None]] = {
    "returns": (State.COMPLETED, None),
    "fails": (State.ABSENT, OSError),
    "declines": (State.FAILED, Declined),
    "doubts": (State.IN_DOUBT, TimedOut),
    "gives back": (State.ABSENT, NotApplied),
    "is killed": (State.PENDING, Killed),
}
"""What a handler does, and what becomes of the key."""

ids = st.sampled_from(sorted(POLICIES))
payloads = st.sampled_from([1, 1, 1, 2])
deeds = st.sampled_from(sorted(ENDS))
STEPS = ("one", "two", "three")


class ReceiverMachine(RuleBasedStateMachine):
    """Deliveries, deaths and time, in any order."""

    hooks: tuple[Hook, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.store = MemoryStore(clock=self.clock)
        self.receiver = Receiver(self.store, policy=RETRY, monotonic=self.clock, hooks=self.hooks)
        # The clock is moved by hand, so a thread that waits for it has nothing to do here.
        self.receiver.flow.keeper.rouse = lambda at: None  # type: ignore[method-assign]
        self.model = Model(self.clock)
        self.runs: list[str] = []
        self.fences: dict[str, int] = {}

    def teardown(self) -> None:
        self.receiver.close()

    def handler(self, deed: str, slow: bool = False) -> Callable[[Message], Any]:
        def handle(message: Message) -> Any:
            self.runs.append(message.id)
            fence = current().fence
            assert fence > self.fences.get(message.id, 0), "a fence was given out twice"
            self.fences[message.id] = fence
            if slow:
                self.clock.advance(LEASE + 1)
            error = ENDS[deed][1]
            if error is not None:
                raise error(f"{message.id} with fence {fence}")
            return [message.id, fence]

        return handle

    @staticmethod
    def finish(done: list[str], value: str) -> str:
        """What a step does."""
        done.append(value)
        return value

    def learn(self, id: str, deed: str, started: float) -> Any:
        """Tell the model how the handler ended; what its caller has to get."""
        state, error = ENDS[deed]
        fence = self.fences[id]
        told = error or [id, fence]
        remembered = told
        if error is None and not POLICIES[id].store_result:
            remembered = None
        if state is State.PENDING:
            self.model.ids[id].lease_until = started + LEASE
        else:
            self.model.end(id, state, remembered)
        return told

    @rule(id=ids, payload=payloads, deed=deeds, slow=st.booleans())
    def process(self, id: str, payload: int, deed: str, slow: bool) -> None:
        """A delivery runs its handler if nothing is remembered, and else gets what is."""
        expected, ran, started = self.model.delivered(id, payload), len(self.runs), self.clock()
        handle, message = self.handler(deed, slow), Message(id, payload)
        runs = expected is RUNS
        got = self.deliver(message, handle)
        assert len(self.runs) - ran == runs
        if runs:
            expected = self.learn(id, deed, started)
        self._same(got, expected)

    @rule(
        id=ids,
        payload=payloads,
        deed=deeds,
        count=st.integers(1, len(STEPS)),
        pauses=st.lists(
            st.sampled_from([0.0, LEASE / 2, LEASE + 1]), min_size=len(STEPS), max_size=len(STEPS)
        ),
    )
    def process_by_steps(self, id: str, payload: int, deed: str, count: int, pauses: list[float]) -> None:
        """A handler that does some steps, and then its deed: what an attempt has finished no later one runs."""
        expected, ran, started = self.model.delivered(id, payload), len(self.runs), self.clock()
        plain = self.handler(deed)

        def handle(message: Message) -> Any:
            nonlocal started
            for step, pause in zip(STEPS[:count], pauses, strict=False):
                self.clock.advance(pause)
                is_fresh, is_over, done = step not in self.model.ids[id].steps, current().lost, list[str]()
                assert current().step(step, self.finish, done, f"{id} {step}") == f"{id} {step}"
                assert bool(done) is is_fresh, "a finished step was run again, or an unfinished one was not"
                if is_fresh or is_over:
                    started = self.clock()
                    self.model.hold(id, *done)
            return plain(message)

        got = self.deliver(Message(id, payload), handle)
        assert len(self.runs) - ran == (expected is RUNS)
        if expected is RUNS:
            expected = self.learn(id, deed, started)
        self._same(got, expected)

    @rule(id=ids, payload=payloads)
    def process_during_a_run(self, id: str, payload: int) -> None:
        """A duplicate that comes while the handler runs is refused; the first one still gets its own answer."""
        started = self.clock()
        if self.model.expect(id, payload) is not RUNS:
            return
        self.model.begin(id, payload)
        plain = self.handler("returns")

        def handle(message: Message) -> Any:
            value = plain(message)
            for asked, refusal in ((payload, InProgress), (payload + 1, KeyReused)):
                refused = self.deliver(Message(id, asked), plain)
                assert type(refused) is refusal
            return value

        got = self.deliver(Message(id, payload), handle)
        self._same(got, self.learn(id, "returns", started))

    @rule(id=st.sampled_from(["a", "b"]), payload=payloads)
    def process_is_overtaken(self, id: str, payload: int) -> None:
        """A handler that outlives its lease and is taken over gets the other's answer, never its own."""
        if self.model.expect(id, payload) is not RUNS:
            return
        self.model.begin(id, payload)
        plain = self.handler("returns")

        def handle(message: Message) -> Any:
            plain(message)
            self.clock.advance(LEASE + 1)
            self.model.begin(id, payload)
            second = self.receiver.process(Message(id, payload), plain, policy=POLICIES[id])
            assert second.status == "executed"
            return "never seen"

        got = self.receiver.process(Message(id, payload), handle, policy=POLICIES[id])
        assert got.replayed
        self._same(got.value, self.learn(id, "returns", self.clock()))

    @rule(batch=st.lists(st.tuples(ids, payloads), min_size=1, max_size=5), deed=deeds)
    def process_batch(self, batch: list[tuple[str, int]], deed: str) -> None:
        """A batch gives each message what it would get alone; repeats inside of it get the first one's outcome."""
        deed = "fails" if deed == "is killed" else deed
        batch = [(id, payload) for id, payload in batch if POLICIES[id] is RETRY]
        expected: dict[tuple[str, int], Any] = {}
        ran, started = len(self.runs), self.clock()
        running: list[str] = []
        for id, payload in dict.fromkeys(batch):
            expected[id, payload] = self.model.delivered(id, payload)
            if expected[id, payload] is RUNS:
                running.append(id)
        messages = [Message(id, payload) for id, payload in batch]
        outcomes = self.receiver.process_batch(messages, self.handler(deed), concurrency=1)
        assert sorted(self.runs[ran:]) == sorted(running)  # a batch promises no order among its handlers
        learnt = {id: self.learn(id, deed, started) for id in running}
        for (id, payload), outcome in zip(batch, outcomes, strict=True):
            wanted = expected[id, payload]
            self._same(_shown(outcome), learnt[id] if wanted is RUNS else wanted)

    @rule(seconds=st.sampled_from([1.0, LEASE / 2, LEASE + 1, KEEP / 2, KEEP + LEASE + 1]))
    def time_passes(self, seconds: float) -> None:
        """Leases end and memories fade."""
        self.clock.advance(seconds)

    @rule(id=ids, kind=st.sampled_from(["completed", "failed", "not_applied"]))
    def resolve(self, id: str, kind: Any) -> None:
        """A person settles what is in doubt, and nothing else."""
        memory = self.model.look(id)
        doubt = memory is not None and memory.state is State.IN_DOUBT
        value = {"completed": ["by hand"], "failed": Declined("by hand"), "not_applied": None}[kind]
        assert self.receiver.resolve(self.key(id), kind, value) is doubt
        if doubt:
            state, told = {
                "completed": (State.COMPLETED, ["by hand"]),
                "failed": (State.FAILED, Declined),
                "not_applied": (State.ABSENT, None),
            }[kind]
            self.model.end(id, state, told)

    @rule()
    def purge(self) -> None:
        """Forgetting what has expired changes no answer."""
        self.receiver.purge()

    @rule()
    def sweep(self) -> None:
        """Crashed at-most-once attempts become doubts without waiting for a retry; the others stay as they are."""
        self.receiver.sweep()
        memory = self.model.ids.get("once")
        if memory and memory.state is State.PENDING and memory.lease_until <= self.clock():
            self.model.ids["once"] = replace(memory, state=State.IN_DOUBT)

    @rule(outcome=st.sampled_from(["completed", "not_applied", None]))
    def sweep_with_prober(self, outcome: Any) -> None:
        """A prober settles every doubt that it can tell about."""
        told = {
            "completed": Resolution.completed(["probed"]),
            "not_applied": Resolution.not_applied(),
            None: None,
        }
        self.sweep()
        self.receiver.sweep(policy=RETRY.but(prober=lambda record: told[outcome]))
        for id, memory in list(self.model.ids.items()):
            if memory.state is State.IN_DOUBT and outcome is not None:
                completed = outcome == "completed"
                self.model.end(
                    id, State.COMPLETED if completed else State.ABSENT, ["probed"] if completed else None
                )

    @invariant()
    def finished_records_are_in_the_store(self) -> None:
        """What has to be remembered is there, as it was recorded."""
        for id in self.model.ids:
            memory, record = self.model.look(id), self.receiver.get(self.key(id))
            if memory is None or id == "cached":
                continue
            assert record is not None
            assert (record.state, record.attempts) == (memory.state, memory.attempts), id
            assert tuple(finished(record)) == memory.steps, id
            if memory.state is State.COMPLETED and record.result is not None:
                assert codec.decode(record.result) == memory.value

    @invariant()
    def nothing_is_left_running(self) -> None:
        """The keeper renews nothing when no handler runs."""
        assert not self.receiver.flow.keeper.live

    def key(self, id: str) -> str:
        return self.receiver.key_of(Message(id))

    def deliver(self, message: Message, handle: Callable[[Message], Any]) -> Any:
        """The value that a delivery returns, or what it raises."""
        try:
            return self.receiver.process(message, handle, policy=POLICIES[message.id]).value
        except (Exception, Killed) as error:
            return error

    def _same(self, got: Any, expected: Any) -> None:
        if isinstance(expected, type):
            assert type(got) is expected, f"{got!r} instead of {expected.__name__}"
        else:
            assert got == expected


def _shown(outcome: Outcome[Any]) -> Any:
    return outcome.value if outcome.error is None else outcome.error


class ListenedMachine(ReceiverMachine):
    """The same while somebody listens: telling events changes nothing else."""

    hooks = (lambda event: None,)


TestReceiver = ReceiverMachine.TestCase
TestListenedReceiver = ListenedMachine.TestCase


@pytest.mark.parametrize(
    "bug",
    [
        bugs.unchecked_fingerprint,
        bugs.unfenced_complete,
        bugs.takeover_at_most_once,
        bugs.no_takeover,
        bugs.short_memory,
        bugs.fence_reset_by_purge,
        bugs.progress_lost_by_takeover,
        bugs.progress_lost_by_release,
        bugs.steps_run_again,
    ],
    ids=lambda bug: bug.__name__,
)
def test_the_machine_finds_a_seeded_bug(bug: bugs.Bug) -> None:
    """A receiver with a bug and the dictionary don't agree for long."""
    once = settings(
        max_examples=1_000, phases=[Phase.generate], database=None, derandomize=True, print_blob=False
    )
    with bug(), pytest.raises((AssertionError, EffectOnceError, ExceptionGroup)):
        run_state_machine_as_test(ReceiverMachine, settings=once)
