"""Simulated processes: each runs the real receiver, flow and keeper, and stands still wherever it would wait.

Everything a process learns comes in as an ``Input``: the time, a reply, a failure. So a process is a function of its
inputs, and ``Node`` remembers that function: where a process stands after them. A process is never copied; it is run
again from its start, once for each new list of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Hashable, Sequence
from contextvars import Context, copy_context
from math import inf
from typing import TYPE_CHECKING, Any

from ..._keeper import Keeper
from ..._receiver import Receiver
from ..._records import NOBODY, Claim
from ...errors import StoreUnavailable
from ._colour import Simulated, SimulatedStore, WaitFor
from ._digests import Digester
from ._requests import Cancelled, Ended, Event, Input, Request, Running, Start, Task, Wait

if TYPE_CHECKING:
    from ..._attempt import Attempt


BEGIN_SECONDS = 1_000_000_000.0
"""The time of day at which every scenario begins."""


class _HandKeeper(Keeper):
    """The real keeper without its thread: the explorer says when it ticks."""

    def rouse(self, at: float) -> None:
        """Nobody to rouse."""


class Process:
    """A live process: a receiver of its own, its tasks, and the keeper's tick in the last slot."""

    digested_by_name = True  # its digest lists what matters of it

    def __init__(self, name: str, tasks: Sequence[Task], offset: float) -> None:
        self.name, self.tasks, self.offset = name, tasks, offset
        self.now, self.slot = 0.0, 0
        self.last = Input("start", 0, 0.0)
        self.events: list[Event] = []
        self.running: dict[int, Attempt] = {}
        self.told: set[int] = set()
        self.interrupted: set[int] = set()
        self.denied: set[bytes] = set()
        self.began: set[int] = set()
        self.pending: list[Any] = [*(Start(task.kind) for task in tasks), None]
        self._coroutines: dict[int, tuple[Context, Coroutine[Any, Any, Any]]] = {}
        self._aliases: dict[bytes, bytes] = {NOBODY: NOBODY}
        self._asked: dict[int, list[tuple[str, bytes]]] = {}
        self.cancelled: set[int] = set()
        self.store = SimulatedStore(self)
        self.receiver = receiver = Receiver(self.store, monotonic=self.monotonic, clock=self.wall_clock)
        self.keeper = receiver.flow.keeper = _HandKeeper(self.store, self.monotonic, receiver._hear)
        receiver.__dict__["asyncio"] = Simulated(self)

    def monotonic(self) -> float:
        """The local clock, which has nothing to do with the store's."""
        return self.now + self.offset

    def wall_clock(self) -> float:
        """The time of day, by which messages are old."""
        return BEGIN_SECONDS + self.now

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
            (self.cancelled if given.kind == "cancel" else self.interrupted).add(given.slot)
            self._resume(given.slot, started.throw, Cancelled())

    def digest(self) -> Hashable:
        """What this process will do next, as a value."""
        digester = Digester(lambda owner: self._aliases.get(owner, owner))
        coroutines = [(slot, started) for slot, (_, started) in self._coroutines.items()]
        mine = [
            self.told,
            self.interrupted,
            self.denied,
            self.began,
            self.cancelled,
            self._asked,
            self.pending,
        ]
        return digester.of([*mine, coroutines, vars(self.receiver.flow), vars(self.keeper)])

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
            self.events.append(Ended(slot, result, error, slot in self.cancelled, owners, slot in self.began))
        elif error is not None:
            raise error


class Node:
    """Where a process stands. Nodes are compared by identity: of those that behave alike there is one."""

    __slots__ = ("_after", "_family", "_inputs", "pending", "renew_at", "resting", "running")

    def __init__(self, family: Family, inputs: tuple[Input, ...], process: Process) -> None:
        self._family, self._inputs = family, inputs
        self._after: dict[Input, tuple[Node, tuple[Event, ...]]] = {}
        self.pending: tuple[Request | None, ...] = tuple(map(_seen, process.pending))
        self.running = tuple(_running(process, slot, attempt) for slot, attempt in process.running.items())
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
    return Wait(request.until, request.attempt.ended) if isinstance(request, WaitFor) else request


def _running(process: Process, slot: int, attempt: Attempt) -> Running:
    owner, lost_at = process.alias(attempt.claim.owner), attempt.deadline - process.offset
    told, denied = slot in process.told, owner in process.denied
    return Running(
        slot, attempt.key, owner, attempt.fence, lost_at, told, slot in process.interrupted, denied
    )
