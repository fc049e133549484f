"""A signal's exception at any moment is its own caller's only: the SQLite store goes on for everybody."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from effectonce import EffectOnceError, Message, Policy, Receiver
from effectonce.stores.sqlite import SQLiteStore


class Interrupted(BaseException):
    """What the signal handler raises."""


@pytest.fixture
def alarms() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_moment_leaves_the_store_usable(alarms: None, tmp_path: Path) -> None:
    """After each of many interrupts, at moments drawn from a seed, the next call is answered."""
    chance = random.Random(7)
    store = SQLiteStore(tmp_path / "effects.db", durability="off")
    receiver = Receiver(store, policy=Policy(lease="1s", wait="2s"))
    interrupts = 0
    for number in range(1500):
        try:
            signal.setitimer(signal.ITIMER_REAL, chance.random() * 0.0004 + 1e-6)
            try:
                receiver.process(Message(f"m-{number}"), lambda message: message.id)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupted:
            interrupts += 1
        except EffectOnceError:
            continue
    assert interrupts > 10
    assert receiver.process(Message("last"), lambda message: message.id).value == "last"
    receiver.close(drain="1ms")
