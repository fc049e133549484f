"""Simulated processes: each runs the real receiver, flow and keeper, and stands still wherever it would wait.

Everything a process learns comes in as an ``Input``: the time, a reply, a failure. So a process is a function of its
inputs, and ``Node`` remembers that function: where a process stands after them. A process is never copied; it is run
again from its start, once for each new list of inputs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from contextvars import Context, copy_context
from math import inf
from types import coroutine
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from ..._keeper import Keeper
from ..._receiver import Receiver
from ..._records import NOBODY, Claim, Completion, Decision, Ending, Record, Renewal, State
from ...errors import LeaseLost, StoreError, StoreUnavailable
from ...stores.base import Store, StoreStats
from ._digests import Digester

if TYPE_CHECKING:
    from collections.abc import Generator

    from ..._attempt import Attempt
    from ..._blocking import Gathered

T = TypeVar("T")


class Cancelled(BaseException):
    """What the simulated event loop throws into a cancelled task."""


class Asked(NamedTuple):
    """One key that a task asks for, and the fingerprint of what it asks."""

    key: str
    fingerprint: bytes


class Task(NamedTuple):
    """What one worker does: a coroutine function of the receiver, over its awaitable API.

    It returns an Outcome for each key in ``asks``: one, or a list in the same order. Tasks of the same ``kind`` do the
    same, so that exploring who of them comes first would only repeat itself.
    """

    name: str
    kind: Hashable
    asks: tuple[Asked, ...]
    script: Callable[[Receiver], Coroutine[Any, Any, Any]]
    remember: tuple[type[BaseException], ...] = ()
    """Errors that count as answers, because the policy records them."""


# What a task can wait for.


class Command(NamedTuple):
    """A verb of the store and what it is asked."""

    verb: str
    argument: Any


class Effect(NamedTuple):
    """A write to the sink: the world outside, which knows nothing of records."""

    key: str
    name: str
    fence: int


class Pause(NamedTuple):
    """Time has to pass. A pause after a failure is short; one after "busy" is over when the store has changed."""

    until: float
    short: bool


class Wait(NamedTuple):
    """An attempt of the same process has to end, or time has to pass."""

    until: float
    over: bool


class Start(NamedTuple):
    """The task waits to be started."""

    kind: Hashable


Request = Command | Effect | Pause | Wait | Start


@coroutine
def ask(request: Any) -> Generator[Any, Any, Any]:
    """Stand still until the explorer sends the reply."""
    return (yield request)


async def effect(attempt: Attempt, name: str) -> str:
    """Write to the sink under a key derived from the attempt; "applied", "duplicate" or "stale" comes back."""
    reply: str = await ask(Effect(attempt.key, attempt.key_for(name), attempt.fence))
    return reply


async def think() -> None:
    """A moment in a handler at which anything may happen elsewhere."""
    await ask(Effect("", "", 0))


# What happens to a process, and what it is seen to do.


class Input(NamedTuple):
    """One thing that happens to a process, at a time on its local clock."""

    kind: Literal["start", "reply", "unavailable", "cancel", "interrupt", "tick"]
    slot: int
    now: float
    reply: Any = None


class Began(NamedTuple):
    """A handler was started."""

    key: str
    owner: bytes
    fence: int
    once: bool


class Reported(NamedTuple):
    """A handler returned or raised: its own word about its effect."""

    key: str
    owner: bytes


class Ended(NamedTuple):
    """A task is over."""

    slot: int
    result: Any
    error: BaseException | None
    cancelled: bool
    """Whether it was told to end early."""
    owners: tuple[tuple[str, bytes], ...]
    """The keys it asked for, and the names it used."""
    began: bool


Event = Began | Reported | Ended


class Running(NamedTuple):
    """A handler that has begun and not ended."""

    slot: int
    key: str
    owner: bytes
    fence: int
    lost_at: float
    """When it knows by its local clock that its lease is over."""
    told: bool


class SimulatedStore(Store):
    """The store as one process sees it: every verb is a request. Owners get readable names on the way out."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def claim(self, claim: Claim) -> Decision:
        """Ask for a key."""
        decision: Decision = await ask(Command("claim", self._claim(claim)))
        return decision

    async def claim_many(self, claims: Sequence[Claim]) -> list[Decision]:
        """Ask for many keys in one request."""
        return list(await ask(Command("claim_many", tuple(map(self._claim, claims)))))

    async def renew(self, renewal: Renewal) -> bool:
        """Ask to hold a claim."""
        return (await self.renew_many([renewal]))[0]

    async def renew_many(self, renewals: Sequence[Renewal]) -> list[bool]:
        """Ask to hold many claims in one request."""
        renamed = tuple(r._replace(owner=self._process.alias(r.owner)) for r in renewals)
        return list(await ask(Command("renew_many", renamed)))

    async def complete(self, completion: Completion) -> Ending:
        """Ask to end a claim."""
        ending: Ending = await ask(Command("complete", self._completion(completion)))
        return ending

    async def complete_many(self, completions: Sequence[Completion]) -> list[Ending]:
        """Ask to end many claims in one request."""
        return list(await ask(Command("complete_many", tuple(map(self._completion, completions)))))

    async def get(self, key: str) -> Record | None:
        """Ask for a record."""
        record: Record | None = await ask(Command("get", key))
        return record

    async def purge(self, limit: int = 256) -> int:
        """Ask to forget what has expired."""
        gone: int = await ask(Command("purge", limit))
        return gone

    async def scan(self, state: State | None = None, after: str = "", limit: int = 256) -> list[Record]:
        """Ask for records."""
        return list(await ask(Command("scan", (state, after, limit))))

    async def now(self) -> float:
        """Ask for the store's clock."""
        now: float = await ask(Command("now", None))
        return now

    async def stats(self) -> StoreStats:
        """No protocol looks at it."""
        raise NotImplementedError

    def _claim(self, claim: Claim) -> Claim:
        renamed = claim._replace(owner=self._process.alias(claim.owner))
        self._process.asks(renamed)
        return renamed

    def _completion(self, completion: Completion) -> Completion:
        return completion._replace(owner=self._process.alias(completion.owner))


class Simulated:
    """The third colour: callers that stand still at every wait, until the explorer lets them go on."""

    awaits = True
    cancelled: tuple[type[BaseException], ...] = (Cancelled,)
    trouble: tuple[type[BaseException], ...] = (StoreError, Cancelled)

    def __init__(self, process: Process) -> None:
        self.store: Store = process.store
        self._process = process

    async def pause(self, seconds: float) -> None:
        """Let time pass."""
        process = self._process
        await ask(Pause(process.now + seconds, process.last.kind == "unavailable"))

    async def wait(self, attempt: Attempt, seconds: float) -> None:
        """Wait until an attempt of this process ends, at most ``seconds``."""
        await ask(_WaitFor(attempt, self._process.now + seconds))

    async def attend(self, attempt: Attempt, handler: Awaitable[T]) -> T:
        """Await the handler; interrupt it when the keeper says that the attempt's lease is lost."""
        process = self._process
        slot, key, owner = process.slot, attempt.key, process.alias(attempt.claim.owner)
        process.running[slot] = attempt
        process.began.add(slot)
        process.events.append(Began(key, owner, attempt.fence, attempt.claim.once))
        attempt.when_lost(lambda: process.told.add(slot))
        try:
            value = await handler
        except Cancelled:
            if process.last.kind == "interrupt":
                raise LeaseLost("The handler was interrupted because its lease was lost.", key=key) from None
            raise
        except Exception:
            process.events.append(Reported(key, owner))
            raise
        else:
            process.events.append(Reported(key, owner))
            return value
        finally:
            del process.running[slot]

    async def gather(self, jobs: Sequence[Callable[[], Coroutine[Any, Any, T]]], limit: int) -> Gathered[T]:
        """Run jobs one after the other; after a cancellation the rest never begin."""
        results: list[T | None] = []
        interrupted: BaseException | None = None
        for job in jobs:
            try:
                results.append(None if interrupted else await job())
            except Cancelled as error:
                interrupted = error
                results.append(None)
        return results, interrupted


class _WaitFor(NamedTuple):
    attempt: Attempt
    until: float


class _HandKeeper(Keeper):
    """The real keeper without its thread: the explorer says when it ticks."""

    def rouse(self, attempt: Attempt) -> None:
        """Nobody to rouse."""


class Process:
    """A live process: a receiver of its own, its tasks, and the keeper's tick in the last slot."""

    def __init__(self, name: str, tasks: Sequence[Task], offset: float) -> None:
        self.name, self.tasks, self.offset = name, tasks, offset
        self.now, self.slot = 0.0, 0
        self.last = Input("start", 0, 0.0)
        self.events: list[Event] = []
        self.running: dict[int, Attempt] = {}
        self.told: set[int] = set()
        self.began: set[int] = set()
        self.pending: list[Any] = [*(Start(task.kind) for task in tasks), None]
        self._coroutines: dict[int, tuple[Context, Coroutine[Any, Any, Any]]] = {}
        self._aliases: dict[bytes, bytes] = {NOBODY: NOBODY}
        self._asked: dict[int, list[tuple[str, bytes]]] = {}
        self._cancelled: set[int] = set()
        self.store = SimulatedStore(self)
        self.receiver = receiver = Receiver(self.store, monotonic=self.monotonic)
        self.keeper = receiver.flow.keeper = _HandKeeper(self.store, self.monotonic, receiver._lost)
        receiver.__dict__["asyncio"] = Simulated(self)

    def monotonic(self) -> float:
        """The local clock, which has nothing to do with the store's."""
        return self.now + self.offset

    def alias(self, owner: bytes) -> bytes:
        """A readable and repeatable name for a random owner."""
        return self._aliases.setdefault(owner, f"{self.name}.{len(self._aliases)}".encode())

    def asks(self, claim: Claim) -> None:
        """Remember which task asked for which key."""
        asked = self._asked.setdefault(self.slot, [])
        if (claim.key, claim.owner) not in asked:
            asked.append((claim.key, claim.owner))

    def feed(self, given: Input) -> None:
        """Let one thing happen, and run until every task stands still again."""
        self.now, self.slot, self.last = given.now, given.slot, given
        self.events = []
        if given.kind in ("start", "tick"):
            tick = given.kind == "tick"
            started = self.keeper.tick(self.store, self.monotonic()) if tick else self._task(given.slot)
            self._coroutines[given.slot] = (copy_context(), started)
            self._resume(given.slot, started.send, None)
            return
        started = self._coroutines[given.slot][1]
        if given.kind == "reply":
            self._resume(given.slot, started.send, given.reply)
        elif given.kind == "unavailable":
            self._resume(given.slot, started.throw, StoreUnavailable("the simulated network failed"))
        else:
            if given.kind == "cancel":
                self._cancelled.add(given.slot)
            self._resume(given.slot, started.throw, Cancelled())

    def digest(self) -> Hashable:
        """What this process will do next, as a value."""
        digester = Digester(lambda owner: self._aliases.get(owner, owner), (Process, Simulated))
        coroutines = [(slot, started) for slot, (_, started) in self._coroutines.items()]
        flow = self.receiver.flow
        mine = [self.told, self.began, self._cancelled, self._asked, self.pending, coroutines, vars(flow), vars(self.keeper)]
        return digester.of(mine)

    def close(self) -> None:
        """End what stands still."""
        for context, started in self._coroutines.values():
            context.run(started.close)

    def _task(self, slot: int) -> Coroutine[Any, Any, Any]:
        return self.tasks[slot].script(self.receiver)

    def _resume(self, slot: int, act: Callable[[Any], Any], value: Any) -> None:
        result, error = None, None
        try:
            self.pending[slot] = self._coroutines[slot][0].run(act, value)
            return
        except StopIteration as done:
            result = done.value
        except (Exception, Cancelled) as raised:
            error = raised.with_traceback(None)  # it would keep the whole process alive
        self.pending[slot] = None
        if slot < len(self.tasks):
            owners = tuple(self._asked.get(slot, ()))
            self.events.append(
                Ended(slot, result, error, slot in self._cancelled, owners, slot in self.began)
            )
        elif error is not None:
            raise error


class Node:
    """Where a process stands. Nodes are compared by identity: of those that behave alike there is one."""

    __slots__ = ("_after", "_family", "_inputs", "pending", "renew_at", "resting", "running")

    def __init__(self, family: Family, inputs: tuple[Input, ...], process: Process) -> None:
        self._family, self._inputs = family, inputs
        self._after: dict[Input, tuple[Node, tuple[Event, ...]]] = {}
        self.pending: tuple[Request | None, ...] = tuple(map(_seen, process.pending))
        self.running = tuple(
            Running(slot, a.key, process.alias(a.claim.owner), a.fence, a.deadline - process.offset, slot in process.told)
            for slot, a in process.running.items()
        )
        live = process.keeper.live.values()
        self.renew_at = min((attempt.renew_at - process.offset for attempt in live), default=inf)
        self.resting = not live and all(request is None for request in self.pending)

    def after(self, given: Input) -> tuple[Node, tuple[Event, ...]]:
        """Where the process stands when this has happened, too, and what it was seen to do meanwhile."""
        known = self._after.get(given)
        if known is None:
            known = self._after[given] = self._family.member((*self._inputs, given))
        return known

    @property
    def started(self) -> bool:
        """Whether anything has happened here yet."""
        return bool(self._inputs)


class Family:
    """All nodes of one process."""

    def __init__(self, name: str, tasks: Sequence[Task], offset: float) -> None:
        self._name, self._tasks, self._offset = name, tasks, offset
        self._nodes: dict[Hashable, Node] = {}

    def member(self, inputs: tuple[Input, ...]) -> tuple[Node, tuple[Event, ...]]:
        """Run a process with these inputs; where it stands, and what it was seen to do at the last one."""
        process = Process(self._name, self._tasks, self._offset)
        for given in inputs:
            process.feed(given)
        digest = process.digest()
        node = self._nodes.get(digest)
        if node is None:
            node = self._nodes[digest] = Node(self, inputs, process)
        process.close()
        return node, tuple(process.events)


def _seen(request: Any) -> Request | None:
    return Wait(request.until, request.attempt.ended) if isinstance(request, _WaitFor) else request
