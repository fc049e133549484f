"""What a contender on a server has to offer, and the subject that a case makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.workers.base import AsyncRun, Counter, Fill, Run, Setup, Subject, chunks
from benchmarks.workers.gauges import GAUGES, Gauged, settle
from benchmarks.workers.timing import stream
from benchmarks.workers.waiting import Body, WaitAcrossProcesses

BATCH = 100
LARGE = 10_000


def _nothing() -> None:
    """Nothing to close."""


@dataclass(frozen=True, kw_only=True)
class Forms:
    """The ways in which a contender can be used; a case is about one of them."""

    counter: Counter
    run: Run | None = None
    """One blocking caller, key after key; threads call it side by side."""
    arun: AsyncRun | None = None
    """The same on an event loop."""
    batch: Fill | None = None
    """Up to a hundred keys at once."""
    call: Callable[[str, Body], object] | None = None
    """One key with a handler of its own; waits when another process runs it."""
    fill: Fill | None = None
    """A quicker way than `run` to put the same records in place."""
    close: Callable[[], object] = _nothing
    aopen: Callable[[], Awaitable[object]] | None = None
    """What has to be made on the event loop before the first call of `arun`."""
    aclose: Callable[[], Awaitable[object]] | None = None


def key_by_key(once: Callable[[str], object]) -> Run:
    """One blocking caller of a function of the key."""

    def run(keys: Iterable[str]) -> None:
        for key in keys:
            once(key)

    return run


def key_by_key_on_loop(once: Callable[[str], Awaitable[object]]) -> AsyncRun:
    """The same on an event loop."""

    async def arun(keys: Iterable[str]) -> None:
        for key in keys:
            await once(key)

    return arun


def subject(setup: Setup, forms: Forms) -> Subject:
    """What the case measures: a contender that lacks the form it is about says so."""
    if setup.op == "wait":
        return WaitAcrossProcesses(setup, _there(forms.call, "waiting"), forms.close)
    run, close = _run(setup, forms)
    timed = stream(setup, run, forms.counter, fill=forms.fill, close=close)
    if setup.store == "postgres" and setup.prefill >= LARGE:
        settle(setup.url)
    return Gauged(timed, GAUGES[setup.gauge], setup.url) if setup.gauge else timed


def _run(setup: Setup, forms: Forms) -> tuple[Run, Callable[[], object]]:
    if setup.op == "batch":
        batch = _there(forms.batch, "batches")
        return lambda keys: [batch(chunk) for chunk in chunks(list(keys), BATCH)], forms.close
    if setup.tasks or forms.run is None:
        callers = Callers(max(1, setup.tasks), _there(forms.arun, "asyncio"), forms)
        return callers.run, callers.close
    return forms.run, forms.close


def _there(form: Any, name: str) -> Any:
    if form is None:
        raise NotImplementedError(f"no {name}")
    return form


class Callers:
    """Many callers on one event loop, each with its share of the keys."""

    def __init__(self, tasks: int, arun: AsyncRun, forms: Forms) -> None:
        self._tasks, self._arun, self._forms = tasks, arun, forms
        self._loop = asyncio.new_event_loop()
        if forms.aopen is not None:
            self._loop.run_until_complete(forms.aopen())

    def run(self, keys: Iterable[str]) -> None:
        """Hand the keys out and wait until the last caller is done."""
        self._loop.run_until_complete(self._gather(list(keys)))

    async def _gather(self, keys: Sequence[str]) -> None:
        await asyncio.gather(*(self._arun(keys[first :: self._tasks]) for first in range(self._tasks)))

    def close(self) -> None:
        """Close the contender where it lives, then the loop."""
        if self._forms.aclose is not None:
            self._loop.run_until_complete(self._forms.aclose())
        self._forms.close()
        self._loop.close()
