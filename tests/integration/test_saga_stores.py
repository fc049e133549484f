"""Sagas on every store: a process is lost in a step, and the sweeper of another one goes on, forward or back."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from effectonce import Policy, Receiver, current
from effectonce.saga import Saga, pivot, step, together
from effectonce.sweeper import Sweeper
from effectonce.testing.clocks import wait_until

QUICK = ("1ms", "1ms")


class Crash(BaseException):
    """Ends a process where it is."""


class Refused(Exception):
    """The carrier says no."""


class Shop:
    """The outside world, and a process of the shop for every call."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.did = Counter[str]()
        self.keys: dict[str, set[str]] = {}
        self.crashes: set[str] = set()

    def function(self, name: str) -> Callable[[str], str]:
        def work(id: str) -> str:
            self.did[f"{name} {id}"] += 1
            self.keys.setdefault(f"{name} {id}", set()).add(current().key_for("sink"))
            if f"{name} {id}" in self.crashes:
                self.crashes.discard(f"{name} {id}")
                raise Crash
            if (name, id[0]) == ("ship", "u"):
                raise Refused(id)
            return name

        return work

    def process(self) -> Saga:
        receiver = Receiver(self.url, policy=Policy(lease="1s"))
        undoable = [
            step(self.function(name), self.function(f"undo {name}"), name=name, backoff=QUICK)
            for name in ("reserve", "charge", "label")
        ]
        return Saga(
            receiver,
            "fulfil",
            undoable[0],
            together(*undoable[1:]),
            pivot(self.function("ship"), name="ship", refused=(Refused,), backoff=QUICK),
            step(self.function("mail"), name="mail", backoff=QUICK),
        )


URLS: dict[str, Callable[[Any, Path, str], str]] = {
    "sqlite": lambda get, path, name: f"sqlite:///{path / 'effects.db'}",
    "postgres": lambda get, path, name: f"{get('postgres').url}?table={name}",
    "mariadb": lambda get, path, name: f"{get('mariadb').url}?table={name}",
    "valkey": lambda get, path, name: f"{get('valkey').url}?prefix={name}:",
    "dynamodb": lambda get, path, name: f"dynamodb://{name}?{get('dynamodb').url.partition('?')[2]}",
}


@pytest.fixture(params=URLS)
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Shop:
    return Shop(URLS[request.param](request.getfixturevalue, tmp_path, f"sagas_{uuid4().hex[:12]}"))


def test_a_sweeper_goes_on_with_what_was_left(shop: Shop) -> None:
    """Forward and back: each step once more at most, with the same key; the journal came with the claim."""
    crashes = {"o-1": "reserve", "o-2": "charge", "o-3": "mail", "u-1": "ship", "u-2": "undo charge"}
    for id, where in crashes.items():
        shop.crashes = {f"{where} {id}"}
        victim = shop.process()
        with victim.receiver, pytest.raises(Crash):
            victim.run(id, id)
    saga = shop.process()
    sweeper = Sweeper(saga.receiver, saga, every="50ms")
    thread = threading.Thread(target=sweeper.run)
    thread.start()
    try:
        wait_until(
            lambda: sweeper.figures.completed + sweeper.figures.compensated == len(crashes), seconds=60
        )
    finally:
        sweeper.stop()
        thread.join(30)
    states = {id: saga.state(id) for id in crashes}
    assert {id: state.status for id, state in states.items() if state} == {
        "o-1": "completed", "o-2": "completed", "o-3": "completed", "u-1": "compensated", "u-2": "compensated",
    }  # fmt: skip
    twice = {name for name, count in shop.did.items() if count > 1}
    assert twice <= {f"{where} {id}" for id, where in crashes.items()} | {
        "charge o-2",
        "label o-2",
        "undo label u-2",
    }
    assert all(len(keys) == 1 for keys in shop.keys.values())
    assert sweeper.figures.failed == 0
    saga.receiver.close()
