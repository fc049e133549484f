"""The sweeper: goes on with work that was left behind, without waiting for a client to ask again.

It looks through the store for attempts whose lease is over. A saga's journal has all that is needed to go on with it;
any other operation needs a handler that finds its arguments by the key. What was claimed at most once becomes IN_DOUBT.
Whoever goes on claims the key first, so any number of sweepers may run at once: one gets each key, with a higher fence,
and the others leave it alone.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from . import _blocking, _service
from ._answers import call_of
from ._durations import Duration, seconds
from ._operations import is_saga
from ._protocol import is_abandoned
from ._records import Record, State
from .errors import (
    Compensated,
    EffectOnceError,
    InDoubt,
    InProgress,
    InvalidKey,
    LateArrival,
    LeaseLost,
    NotApplied,
    UsageError,
)
from .keys import Key
from .saga._driver import Unfinished
from .sweeping import Redrive, doubted, every

if TYPE_CHECKING:
    from ._colours import Colour
    from ._messages import Outcome
    from ._receiver import Receiver
    from .policy import Policy
    from .saga import Saga

IDLE_SHARE = 9
"""A sweeper rests at least so many times as long as its last look took: it never has more than a tenth of a server."""

PATIENCE_SECONDS = 5.0
"""A saga that waits longer for its next try is let go, and found again when its lease is over and the try is due."""
NAP_SECONDS = 0.1
"""How long a thread that rests goes without a look at whether it shall stop."""

log = logging.getLogger("effectonce.sweeper")

Job = Callable[[], Coroutine[Any, Any, None]]


@dataclass
class Figures:
    """What a sweeper has done since it was made."""

    looks: int = 0
    abandoned: int = 0
    """Attempts that were found with their lease over; some by several sweepers."""
    completed: int = 0
    compensated: int = 0
    """Sagas that were undone here."""
    given_back: int = 0
    """Sagas that had not begun: nothing was done, and nobody knows what was asked for. Their clients may ask again."""
    redriven: int = 0
    """Handlers of other operations that returned."""
    in_doubt: int = 0
    settled: int = 0
    """Doubts that the policy's prober has settled."""
    failed: int = 0
    waiting: int = 0
    """Sagas whose next try is still to wait for, at the last look."""
    unknown: int = 0
    """Abandoned attempts at operations that nothing is registered for, at the last look."""
    seconds: float = 0.0
    """How long the last look took."""


class Sweeper(_service.Service["_Crew", Figures]):
    """Looks for work that was left behind and goes on with it: ``run`` until ``stop``, ``run_once`` for one look.

    receiver     whose store is looked through
    sagas        those that it may go on with
    handlers     by operation: called with the record of an abandoned attempt, they start its work again, usually by
                 calling the decorated function with arguments that they find by the key
    every        the time between two looks
    concurrency  how many it goes on with at the same time
    policy       for what was claimed at most once: how long a doubt is kept, and who settles it (``prober``)
    """

    def __init__(
        self,
        receiver: Receiver,
        *sagas: Saga,
        handlers: Mapping[str, Redrive] | None = None,
        every: Duration = "30s",
        concurrency: int = 32,
        policy: Policy | None = None,
    ) -> None:
        if concurrency < 1:
            raise UsageError(f"concurrency={concurrency!r} must be 1 or more.")
        self.receiver = receiver
        self._sagas = {(saga.operation, str(saga.version)): saga for saga in sagas}
        self._handlers = dict(handlers or {})
        self._check(sagas)
        self._policy = receiver._policy(policy)
        self.every, self._concurrency = seconds(every, "every"), concurrency
        self.figures = Figures()
        self.stopping = False
        self._strangers: set[str] = set()

    def _check(self, sagas: tuple[Saga, ...]) -> None:
        for saga in sagas:
            if saga.receiver.store is not self.receiver.store:
                raise UsageError(
                    f"The saga {saga.name!r} has another receiver than this sweeper looks through."
                )
        if len(self._sagas) < len(sagas):
            raise UsageError("Two sagas have the same name and version. Give the newer one another version=.")
        for operation, handler in self._handlers.items():
            if not callable(handler):
                raise UsageError(f"The handler of {operation!r}, {handler!r}, can't be called.")

    def stop(self) -> None:
        """Have ``run`` return soon. May be called in a signal handler, and from any thread."""
        self.stopping = True  # no lock: a signal handler may come while it is held
        if self._crew is not None:
            self._crew.wake()

    # The one body of both colours

    def _on_threads(self) -> _Crew:
        return _Threads(self)

    def _on_loop(self) -> _Crew:
        return _Tasks(self)

    async def _run(self, crew: _Crew) -> None:
        while not self.stopping:
            try:
                await self._look(crew)
            except EffectOnceError as error:
                log.warning("the store can't be looked through: %s", error)
            pause = max(self.every, IDLE_SHARE * self.figures.seconds)
            await crew.rest(pause * random.uniform(0.75, 1.0))

    async def _run_once(self, crew: _Crew) -> Figures:
        await self._look(crew)
        return self.figures

    async def _look(self, crew: _Crew) -> None:
        """One way through the store."""
        began, colour, figures = time.monotonic(), crew.colour, self.figures
        figures.unknown = figures.waiting = 0
        waited = 0.0
        now = await colour.store.now()
        async for record in every(colour, State.PENDING):
            if self.stopping:
                return
            if is_abandoned(record, now):
                figures.abandoned += 1
                asked = time.monotonic()
                await self._go_on(crew, record)
                waited += time.monotonic() - asked
        if self._policy.prober is not None:
            async for record in every(colour, State.IN_DOUBT):
                if is_saga(record.key):
                    continue  # a person says how it goes on
                call = call_of(record.key, record.fingerprint, self._policy)
                figures.settled += await self.receiver.flow.probe(colour, call, record)
        figures.looks += 1
        figures.seconds = time.monotonic() - began - waited

    async def _go_on(self, crew: _Crew, record: Record) -> None:
        """See to one abandoned attempt; a saga, or a handler, runs beside the look."""
        if record.once:
            self.figures.in_doubt += await doubted(self.receiver.flow, crew.colour, record, self._policy)
            return
        key = _parsed(record.key)
        saga = self._sagas.get((key.operation, key.version))
        handler = self._handlers.get(key.operation)
        if saga is not None and not saga.is_due(record):
            self.figures.waiting += 1
        elif saga is not None:
            await crew.start(lambda: self._saga(crew, saga, record))
        elif handler is not None:
            await crew.start(lambda: self._handler(handler, record))
        else:
            self._note_stranger(key.operation)

    async def _saga(self, crew: _Crew, saga: Saga, record: Record) -> None:
        async def rest(pause: float) -> None:
            if self.stopping or pause > PATIENCE_SECONDS or await crew.rest(pause):
                raise Unfinished

        try:
            self._tally(record, await saga.redrive(crew.colour, record, rest))
        except BaseException as error:
            # A mistake here, or a step that ends its process, must not go unnoticed.
            self.figures.failed += 1
            log.exception("could not go on with %s", record.key)
            if not isinstance(error, Exception):
                raise

    def _tally(self, record: Record, outcome: Outcome[Any]) -> None:
        figures, error = self.figures, outcome.error
        if outcome.status == "executed":
            figures.completed += 1
            log.info("completed %s", record.key)
        elif outcome.replayed or isinstance(error, InProgress | LateArrival | LeaseLost):
            pass  # somebody else was first
        elif isinstance(error, NotApplied):
            figures.given_back += 1
        elif isinstance(error, Compensated):
            figures.compensated += 1
            log.info("compensated %s: %s", record.key, error.reason)
        elif isinstance(error, InDoubt):
            figures.in_doubt += 1
            log.warning("%s", error)
        else:
            figures.failed += 1
            log.warning("could not go on with %s: %s", record.key, error)

    async def _handler(self, handler: Redrive, record: Record) -> None:
        try:
            result = handler(record)
            if inspect.isawaitable(result):
                await result
            self.figures.redriven += 1
        except (InProgress, LeaseLost):
            pass  # somebody else was first
        except Exception as error:
            self.figures.failed += 1
            self.receiver.flow.tell_aside("failed", record, f"sweep: {error!r}")
            log.warning("could not go on with %s: %s", record.key, error)

    def _note_stranger(self, operation: str) -> None:
        self.figures.unknown += 1
        if operation not in self._strangers:
            self._strangers.add(operation)
            log.warning(
                "attempts at %r were left behind, and this sweeper has nothing registered for it", operation
            )

    def _awaits(self) -> bool:
        handlers = self._handlers.values()
        return any(saga.awaits for saga in self._sagas.values()) or any(
            inspect.iscoroutinefunction(handler) for handler in handlers
        )


class _Crew(_service.Crew, Protocol):
    """Runs jobs beside the look, in one colour."""

    colour: Colour

    async def start(self, job: Job) -> None:
        """Begin a job, when there is room."""
        ...

    def rest(self, pause: float) -> Awaitable[bool]:
        """Let time pass; True, perhaps at once, when the sweeper is stopping."""
        ...

    def wake(self) -> None:
        """End every rest."""
        ...


class _Threads:
    """Callers without an event loop: every job has a thread."""

    def __init__(self, sweeper: Sweeper) -> None:
        self.colour: Colour = sweeper.receiver.blocking
        self._sweeper = sweeper
        self._room = threading.Semaphore(sweeper._concurrency)
        self._pool = ThreadPoolExecutor(sweeper._concurrency, thread_name_prefix="effectonce-sweeper")
        self._running: set[Future[None]] = set()

    async def start(self, job: Job) -> None:
        self._room.acquire()
        future = self._pool.submit(lambda: _blocking.run(job()))
        self._running.add(future)
        future.add_done_callback(self._done)

    def _done(self, future: Future[None]) -> None:
        self._running.discard(future)
        self._room.release()

    async def rest(self, pause: float) -> bool:
        until = time.monotonic() + pause
        while not self._sweeper.stopping and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, NAP_SECONDS))  # noqa: ASYNC251 - there is no loop here to block
        return self._sweeper.stopping

    def wake(self) -> None:
        """Nothing: who rests looks often enough."""

    async def end(self) -> None:
        wait(list(self._running))
        self._pool.shutdown()


class _Tasks:
    """Callers on an event loop: every job is a task."""

    def __init__(self, sweeper: Sweeper) -> None:
        self.colour: Colour = sweeper.receiver.asyncio
        self._sweeper = sweeper
        self._room = asyncio.Semaphore(sweeper._concurrency)
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()

    async def start(self, job: Job) -> None:
        await self._room.acquire()
        task = asyncio.ensure_future(job())
        self._running.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._room.release()

    async def rest(self, pause: float) -> bool:
        if not self._sweeper.stopping:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._woken.wait()
        return self._sweeper.stopping

    def wake(self) -> None:
        with suppress(RuntimeError):  # its loop is closed: nobody rests there
            self._loop.call_soon_threadsafe(self._woken.set)

    async def end(self) -> None:
        while self._running:
            await asyncio.wait(list(self._running))


def _parsed(text: str) -> Key:
    try:
        return Key.parse(text)
    except InvalidKey:  # a store that another program writes to as well
        return Key("", "", "", text)


__all__ = ["Figures", "Sweeper"]
