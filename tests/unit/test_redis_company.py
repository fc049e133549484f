"""Threads that share round trips to Redis: who goes with whom, and that one's trouble is no other's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
from hiredis import ReplyError
from tests.integration.sqlite_helpers import Caller

from effectonce._records import Claim
from effectonce.errors import StoreUnavailable
from effectonce.stores import _redis_threads
from effectonce.stores._redis_commands import LARGEST, MOST, Commands
from effectonce.stores._redis_threads import Company, Pool
from effectonce.testing.clocks import wait_until

COMMANDS = Commands("eo:", waits_for_replicas=False)
SERVER = ("server", 6379)
NOW = 1_800_000_000_000_000


class World:
    """A server that answers when it is told to, and a company that asks it."""

    timeout = 5.0

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        """The keys of each round trip."""
        self.gates: list[threading.Event] = []
        self.reply: Callable[[list[str]], Any] = lambda keys: NOW
        self.company = Company(cast("Pool", self), SERVER)

    def ask(self, server: object, request: tuple[bytes, int]) -> list[Any]:
        """Wait for this round trip's gate, then reply."""
        data, count = request
        keys = [part.decode() for part in data.split(b"\r\n") if part.startswith(b"eo:")]
        gate = threading.Event()
        self.asked.append(keys)
        self.gates.append(gate)
        assert gate.wait(20)
        return [self.reply(keys)] * count

    def send(self, key: str, size: int = 0) -> Caller:
        parts = COMMANDS.parts(Claim(key, b"o" * 16, b"f" * size, 1.0, 2.0))
        return Caller(lambda: self.company.take(parts))

    def begin(self, *keys: str) -> list[Caller]:
        """One that is under way, and others who wait for it."""
        first = self.send(keys[0])
        wait_until(lambda: self.gates, what="One who is under way")
        others = [self.send(key) for key in keys[1:]]
        wait_until(lambda: len(self.company._queue) == len(others), what="A queue")
        return [first, *others]

    def open(self, number: int) -> None:
        """Let a round trip come back."""
        wait_until(lambda: len(self.gates) > number, what="A round trip")
        self.gates[number].set()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is too far away to be waited for."""
    monkeypatch.setattr(_redis_threads, "PATIENCE_SECONDS", 20.0)


@pytest.mark.usefixtures("patient")
def test_those_who_come_meanwhile_go_together() -> None:
    """One goes alone; all who come while it is under way share the next round trip."""
    world = World()
    callers = world.begin("a", "b", "c", "d")
    world.open(0)
    world.open(1)
    assert [caller.answer() for caller in callers] == [NOW] * 4
    assert [sorted(keys) for keys in world.asked] == [["eo:a"], ["eo:b", "eo:c", "eo:d"]]


def test_a_far_server_is_not_waited_for_twice() -> None:
    """Who has waited long enough for the one under way goes, though that one is not back."""
    world = World()
    (first,) = world.begin("a")
    others = [world.send("b"), world.send("c")]
    wait_until(lambda: sum(map(len, world.asked)) == 3, what="All of them under way")
    for gate in world.gates[1:]:
        gate.set()
    assert [caller.answer() for caller in others] == [NOW] * 2
    assert first.is_alive()
    world.open(0)
    assert first.answer() == NOW


@pytest.mark.usefixtures("patient")
def test_an_answer_reaches_its_own_caller() -> None:
    """Of those who go together each gets what was said about its own key, an error too."""
    world = World()
    world.reply = lambda keys: keys[0] if len(keys) == 1 else [_about(key) for key in keys]
    callers = world.begin("a", "b", "bad", "c")
    world.open(0)
    world.open(1)
    first, b, bad, c = [caller.answer() for caller in callers]
    assert (first, b, c) == ("eo:a", "eo:b", "eo:c")
    assert isinstance(bad, ReplyError)


def _about(key: str) -> Any:
    return ReplyError("WRONGTYPE") if key == "eo:bad" else key


@pytest.mark.usefixtures("patient")
def test_what_fails_for_all_is_told_to_each() -> None:
    """A server that can't be reached is every caller's trouble; each has an error of its own to raise."""
    world = World()

    def fail(keys: list[str]) -> None:
        raise StoreUnavailable("gone")

    callers = world.begin("a", "b", "c")
    world.open(0)
    assert callers[0].answer() == NOW
    world.reply = fail
    world.open(1)
    for caller in callers[1:]:
        caller.join(20)
    errors = [caller.error for caller in callers[1:]]
    assert {type(error) for error in errors} == {StoreUnavailable}
    assert errors[0] is not errors[1]


@pytest.mark.usefixtures("patient")
def test_an_interrupted_leader_leaves_nobody_behind() -> None:
    """Ctrl-C ends the one who went for all: another goes for the rest, and the steps are taken after all."""
    world = World()

    def interrupt(keys: list[str]) -> int:
        world.reply = lambda keys: NOW
        raise KeyboardInterrupt

    callers = world.begin("a", "b", "c", "d")
    world.open(0)
    assert callers[0].answer() == NOW
    world.reply = interrupt
    world.open(1)
    world.open(2)
    for caller in callers[1:]:
        caller.join(20)
    errors = [caller.error for caller in callers[1:] if caller.error is not None]
    assert [type(error) for error in errors] == [KeyboardInterrupt]
    assert [caller.result for caller in callers[1:] if caller.error is None] == [NOW] * 2
    assert len(world.asked[2]) == 2


@pytest.mark.usefixtures("patient")
def test_one_who_leaves_the_queue_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while waiting: the step is not taken, and the next caller goes on as if nothing had been."""
    world = World()

    def interrupted(mine: object) -> None:
        raise KeyboardInterrupt

    (first,) = world.begin("a")
    with monkeypatch.context() as patch:
        patch.setattr(world.company, "_wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            world.company.take(COMMANDS.parts("b"))
    world.open(0)
    assert first.answer() == NOW
    later = world.send("c")
    world.open(1)
    assert later.answer() == NOW
    assert world.asked == [["eo:a"], ["eo:c"]]


def test_steps_of_one_kind_travel_in_one_command() -> None:
    """Others in others, so many in each and no more, and a large one alone."""
    claims = [Claim(f"{n}", b"o" * 16, b"", 1.0, 2.0) for n in range(MOST + 1)]
    large = Claim("large", b"o" * 16, b"f" * LARGEST, 1.0, 2.0)
    reads = ["read 1", "read 2"]
    bundles = COMMANDS.bundled([claims[0], reads[0], large, *claims[1:], reads[1]])
    assert [len(bundle.whose) for bundle in bundles] == [MOST, 2, 1, 1]
    assert sorted(number for bundle in bundles for number in bundle.whose) == list(range(MOST + 4))
