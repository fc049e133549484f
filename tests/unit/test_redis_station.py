"""Threads on their way to Redis: each has a connection to itself, there are only so many, and others wait in line."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hiredis import ProtocolError
from tests.integration.sqlite_helpers import Caller

from effectonce._records import Claim
from effectonce.errors import StoreMismatch, StoreUnavailable
from effectonce.stores import _redis_threads
from effectonce.stores._redis_commands import LARGEST, MOST, Commands
from effectonce.stores._redis_threads import Pool, Station
from effectonce.stores._redis_wire import Address, Target
from effectonce.testing.clocks import wait_until

SERVER, OTHER = ("server", 6379), ("other", 6379)


class World:
    """A server that answers when it is told to, with what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int = 2, timeout: float = 60.0) -> None:
        monkeypatch.setattr(_redis_threads, "MOST_AT_ONCE", most)
        monkeypatch.setattr(_redis_threads, "LOOK_AFTER_SECONDS", 60.0)  # who waits relies on being told
        monkeypatch.setattr(_redis_threads, "Wire", self.wire)
        self.wires: list[Wire] = []
        self.asked: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        self.reply: Callable[[str], Any] = str
        self.pool = Pool(Target((SERVER,), timeout=timeout))
        self.station: Station = self.pool.to(SERVER)

    def wire(self, target: Target, address: Address) -> Wire:
        return Wire(self, address)

    @property
    def opened(self) -> list[Wire]:
        return [wire for wire in self.wires if wire.is_open]

    def send(self, text: str) -> Caller:
        """Ask in a thread."""
        return Caller(lambda: self.station.ask(text.encode()), text)

    def under_way(self, *texts: str) -> list[Caller]:
        """Threads whose questions have reached the server, one after the other."""
        callers = []
        for text in texts:
            callers.append(self.send(text))
            wait_until(lambda text=text: text in self.asked, what=f"The question {text}")
        return callers

    def in_line(self, *texts: str) -> list[Caller]:
        """Threads that wait for a connection, one after the other."""
        callers = []
        for text in texts:
            before = len(self.station._line)
            callers.append(self.send(text))
            wait_until(lambda before=before: len(self.station._line) > before, what=f"{text} in line")
        return callers

    def open(self, text: str) -> None:
        """Let the server answer a question."""
        wait_until(lambda: text in self.gates, what=f"The question {text}")
        self.gates[text].set()


class Wire:
    """A connection to it."""

    can_tell = True

    def __init__(self, world: World, address: Address) -> None:
        self._world, self._address = world, address
        self._sent = ""
        self.used = self.is_open = self.is_closed = self.is_stale = False

    def open(self) -> None:
        self.is_open = True
        self._world.wires.append(self)

    def ask(self, data: bytes) -> Any:
        self.write(data)
        return self.read(1)[0]

    def write(self, data: bytes) -> None:
        assert not self._sent, "a connection has one caller at a time"
        self._sent = data.decode()
        self._world.gates.setdefault(self._sent, threading.Event())
        self._world.asked.append(self._sent)

    def read(self, count: int) -> list[Any]:
        if self.is_stale:
            raise ConnectionError
        assert self._world.gates[self._sent].wait(60)
        sent, self._sent = self._sent, ""
        return [self._world.reply(sent)] * count

    def watch(self, channel: bytes, request: bytes, seconds: float) -> Any:
        return self.ask(request)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A server to which two connections may be used at a time."""
    return World(monkeypatch)


def test_callers_at_the_same_time_have_a_connection_each(world: World) -> None:
    """Nobody waits for anybody, and whoever comes later uses one that is there."""
    first, second = world.under_way("a", "b")
    world.open("b")
    assert second.answer() == "b"
    assert first.is_alive()
    (third,) = world.under_way("c")
    world.open("a")
    world.open("c")
    assert (first.answer(), third.answer()) == ("a", "c")
    assert len(world.opened) == 2


def test_connections_that_the_server_has_closed_meanwhile(world: World) -> None:
    """It was started again, say: who meets an old connection asks on a new one, and not on another of the old."""
    callers = world.under_way("a", "b")
    world.open("a")
    world.open("b")
    assert [caller.answer() for caller in callers] == ["a", "b"]
    for wire in world.wires:
        wire.is_stale = True
    callers = world.under_way("c", "d")
    world.open("c")
    world.open("d")
    assert [caller.answer() for caller in callers] == ["c", "d"]
    assert [wire.is_closed for wire in world.opened] == [True, True, False, False]


def test_the_others_wait_in_line(world: World) -> None:
    """As soon as a connection is free, the one who came first has it."""
    callers = world.under_way("a", "b") + world.in_line("c", "d", "e")
    assert world.asked == ["a", "b"]
    for answered, next_one in zip("abc", "cde", strict=True):
        world.open(answered)
        wait_until(lambda text=next_one: text in world.asked, what=f"{next_one} under way")
    world.open("d")
    world.open("e")
    assert [caller.answer() for caller in callers] == list("abcde")
    assert world.asked == list("abcde")
    assert len(world.opened) == 2


def test_a_latecomer_does_not_go_first(world: World) -> None:
    """A connection is handed to who waits: whoever happens to run at that moment finds it gone."""
    first, _ = world.under_way("a", "b")
    world.in_line("c")
    handed = world.station._hand_over
    latecomers: list[Caller] = []

    def slowly(wire: Any) -> bool:
        latecomers.extend(world.in_line("d"))
        return handed(wire)

    world.station._hand_over = slowly  # type: ignore[method-assign]
    world.open("a")
    assert first.answer() == "a"
    del world.station._hand_over
    wait_until(lambda: "c" in world.asked, what="The one who came first under way")
    for text in "bcd":
        world.open(text)
    assert latecomers[0].answer() == "d"
    assert world.asked == ["a", "b", "c", "d"]


def test_who_joins_the_line_when_a_connection_is_given_back(world: World) -> None:
    """It was not in line yet when somebody looked, and saw no connection when it looked: it has it all the same."""
    joined: list[Caller] = []

    class Idle(list[Any]):
        def append(self, wire: Any) -> None:
            joined.extend(world.in_line("c"))
            super().append(wire)

    first, _ = world.under_way("a", "b")
    world.station._idle = Idle()
    world.open("a")
    wait_until(lambda: "c" in world.asked, what="The one in line under way")
    world.station._idle = []
    world.open("b")
    world.open("c")
    assert (first.answer(), joined[0].answer()) == ("a", "c")


def test_a_place_that_was_left_holds_nobody_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interruption at the worst moment leaves a place in the line: it costs one connection, and no time."""
    world.station._line.append(_redis_threads.Place())
    for text in ("a", "b", "c", "d"):
        (caller,) = world.under_way(text)
        world.open(text)
        assert caller.answer() == text
        del world.wires[:]
    assert not world.station._line


def test_a_connection_that_broke_makes_room(world: World) -> None:
    """Who waits gets a new one in its place. Only the caller whose connection it was hears of it."""
    broken, other = world.under_way("a", "b")
    (waiting,) = world.in_line("c")
    world.reply = _broken
    world.open("a")
    with pytest.raises(StoreMismatch, match="does not speak"):
        broken.answer()
    wait_until(lambda: "c" in world.asked, what="The next one under way")
    world.reply = str
    world.open("b")
    world.open("c")
    assert (other.answer(), waiting.answer()) == ("b", "c")
    assert [wire.is_closed for wire in world.opened] == [True, False, False]


def _broken(text: str) -> None:
    raise ProtocolError(text)


def test_who_waits_in_vain_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """All connections are in use for as long as a server may take: nothing was asked, and it may be asked again."""
    world = World(monkeypatch, most=1, timeout=0.01)
    (first,) = world.under_way("a")
    with pytest.raises(StoreUnavailable, match=r"was not asked: all 1 connections"):
        world.station.ask(b"b")
    world.open("a")
    assert first.answer() == "a"
    assert "b" not in world.asked
    assert not world.station._line


def test_one_who_leaves_the_line_is_not_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while waiting in line: its question is not asked, and whoever is behind it moves up."""

    class Interrupted:
        def acquire(self, timeout: float = 0.0) -> None:
            if timeout:
                raise KeyboardInterrupt

    first, second = world.under_way("a", "b")
    with monkeypatch.context() as patch:
        patch.setattr(_redis_threads, "Lock", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            world.station.ask(b"interrupted")
    (later,) = world.in_line("c")
    for text in "abc":
        world.open(text)
    assert [caller.answer() for caller in (first, second, later)] == ["a", "b", "c"]
    assert world.asked == ["a", "b", "c"]


def test_one_who_leaves_the_line_too_late_gives_back_what_it_was_handed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after a connection was handed over: the next caller has it."""
    first, _ = world.under_way("a", "b")

    class Interrupted:
        def acquire(self, timeout: float = 0.0) -> None:
            if timeout:
                world.open("a")
                assert first.answer() == "a"
                raise KeyboardInterrupt

        def release(self) -> None:
            """Nobody hears it."""

    with monkeypatch.context() as patch:
        patch.setattr(_redis_threads, "Lock", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            world.station.ask(b"interrupted")
    (later,) = world.under_way("c")
    world.open("b")
    world.open("c")
    assert later.answer() == "c"
    assert len(world.opened) == 2


def test_an_interrupted_caller_takes_its_connection_along(world: World) -> None:
    """Nobody knows what is still to come on it, so nobody else may have it."""

    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    for text in ("a", "b", "c"):
        (caller,) = world.under_way(text)
        world.reply = interrupt
        world.open(text)
        with pytest.raises(KeyboardInterrupt):
            caller.answer()
    assert [wire.is_closed for wire in world.opened] == [True] * 3


def test_a_connection_that_was_forgotten_takes_up_no_room(world: World) -> None:
    """An interruption at the worst moment: nobody holds it any more, and nobody has said so."""
    for _ in range(3):
        world.station.begin((b"forgotten", 1))
        world.wires.clear()
        gc.collect()
    (caller,) = world.under_way("a")
    world.open("a")
    assert caller.answer() == "a"


def test_who_listens_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A duplicate may wait for a long time: its connection is not one of the many."""
    world = World(monkeypatch, most=1)
    (first,) = world.under_way("a")
    listener = Caller(lambda: world.station.watch(b"channel", b"x", 20.0))
    wait_until(lambda: world.station._line, what="One who wants to listen")
    (second,) = world.in_line("b")
    world.open("a")
    world.open("b")
    assert (first.answer(), second.answer()) == ("a", "b")
    assert listener.is_alive()
    world.open("x")
    assert listener.answer() == "x"


def test_closing(world: World) -> None:
    """Who waits for a reply gets it; who waits in line, and whoever comes later, is told."""
    first, second = world.under_way("a", "b")
    (waiting,) = world.in_line("c")
    world.pool.close()
    for late in (waiting, world.send("d"), Caller(lambda: world.pool.to(OTHER).ask(b"e"))):
        with pytest.raises(StoreUnavailable, match="closed"):
            late.answer()
    world.open("a")
    world.open("b")
    assert (first.answer(), second.answer()) == ("a", "b")
    assert world.asked == ["a", "b"]
    assert [wire.is_closed for wire in world.opened] == [True, True]


def test_servers_are_asked_in_one_order(world: World) -> None:
    """So no two callers who wait in line each hold what the other waits for."""
    for gate in ("to server", "to other"):
        world.gates[gate] = threading.Event()
        world.gates[gate].set()
    requests = {SERVER: (b"to server", 1), OTHER: (b"to other", 1)}
    answers = world.pool.exchange(requests)
    assert answers == {SERVER: ["to server"], OTHER: ["to other"]}
    world.pool.exchange(dict(reversed(requests.items())))
    assert world.asked == ["to other", "to server"] * 2


def test_steps_of_one_kind_travel_in_one_command() -> None:
    """Others in others, so many in each and no more, and a large one alone."""
    commands = Commands("eo:", waits_for_replicas=False)
    claims = [Claim(f"{n}", b"o" * 16, b"", 1.0, 2.0) for n in range(MOST + 1)]
    large = Claim("large", b"o" * 16, b"f" * LARGEST, 1.0, 2.0)
    reads = ["read 1", "read 2"]
    bundles = commands.bundled([claims[0], reads[0], large, *claims[1:], reads[1]])
    assert [len(bundle.whose) for bundle in bundles] == [MOST, 2, 1, 1]
    assert sorted(number for bundle in bundles for number in bundle.whose) == list(range(MOST + 4))
