"""Which server has which key, and how a command gets there: to the only one, or through a cluster.

Nothing here speaks to a server. ``Routes`` has dialogues: they yield what to ask which servers, and get the answers,
whoever carries them.
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import islice, repeat
from typing import Any, Final, NamedTuple, TypeVar

from ..errors import StoreError, StoreUnavailable
from ._redis_commands import Answer, Commands, Order, command, key_of
from ._redis_wire import HANG_UP, MAP, Address, Answers, ReplyError, Requests, Target, complaint

T = TypeVar("T")

SLOTS: Final = 16_384
MOST_TURNS: Final = 5
"""How often a command is sent on."""

NO_PRIMARY: Final = ("READONLY", "MASTERDOWN")
"""After these errors the next connection may find another server under the same name."""

Dialogue = Generator[Requests, Answers, T]
"""Asks servers and gets their answers, whoever carries them."""


class Errand(NamedTuple):
    """A command on its way to a server. Of its replies the last one counts."""

    address: Address
    data: bytes
    replies: int = 1


class Routes:
    """Which server has which key, and how a command gets there: to the only one, or through a cluster."""

    def __init__(self, target: Target, commands: Commands) -> None:
        self.only = None if target.clustered else target.seeds[0]
        self._seeds = target.seeds
        self._commands = commands
        self._slots: list[Address | None] = []
        self._homes = self._slots

    def guess(self, key: str) -> Address | None:
        """The server that has a key, as far as is known."""
        slots = self._slots
        return slots[slot_of(self._commands.name(key))] if slots else self.only

    def home(self, key: str) -> Address | None:
        """The server of a cluster that has a key, or had it when that was last known."""
        homes = self._homes
        return homes[slot_of(self._commands.name(key))] if homes else None

    def forget(self) -> None:
        """Look for the servers of a cluster anew: one can't be reached, and perhaps others have its keys now."""
        self._slots = []

    def servers(self, *, anew: bool = True) -> Dialogue[list[Address]]:
        """Every server that has keys."""
        if self.only is not None:
            return [self.only]
        if anew or not self._slots:
            yield from self._discovering()
        return sorted({address for address in self._slots if address is not None})

    def finding(self, key: str) -> Dialogue[Address]:
        """The server that has a key."""
        if self.only is None and not self._slots:
            yield from self._discovering()
        return self._address_of(key)

    def delivering(self, orders: Sequence[Order]) -> Dialogue[list[Answer | StoreError]]:
        """Have steps taken where their keys are, each of them alone: an answer for each, or its own error."""
        if self.only is None and not self._slots:
            yield from self._discovering()
        keys, commands = list(map(key_of, orders)), list(map(self._commands.of, orders))
        taken: dict[int, Answer | StoreError] = {}
        errands: dict[int, Errand] = {}
        for number, (place, data) in enumerate(zip(map(self.guess, keys), commands, strict=True)):
            if place is None:
                taken[number] = _nowhere(keys[number])
            else:
                errands[number] = Errand(place, data)
        if taken:
            self.forget()
        for _ in range(MOST_TURNS):
            if not errands:
                break
            streams = self._streams((yield _requests(errands.values())))
            replicas = set[Address]()
            for number, errand in list(errands.items()):
                *_, answer = islice(streams[errand.address], errand.replies)
                if type(answer) is not ReplyError:
                    taken[number] = answer
                elif onward := self._onward(errand.address, commands[number], str(answer).split()):
                    errands[number] = onward
                    continue
                else:
                    if str(answer).startswith(NO_PRIMARY):
                        replicas.add(errand.address)
                    taken[number] = complaint(errand.address, answer, keys[number])
                del errands[number]
            if replicas:
                yield dict.fromkeys(replicas, HANG_UP)
        if errands:
            astray = (
                "Keys move, or scripts vanish, faster than a command can follow. Try again with the same key."
            )
            taken |= dict.fromkeys(errands, StoreUnavailable(astray))
        return [taken[number] for number in range(len(orders))]

    def _streams(self, answers: Answers) -> dict[Address, Iterator[Any]]:
        """What each server says, piece by piece; one that can't be reached says so to everyone."""
        if any(isinstance(answer, StoreError) for answer in answers.values()):
            self.forget()
        return {
            address: repeat(answer) if isinstance(answer, StoreError) else iter(answer)
            for address, answer in answers.items()
        }

    def _onward(self, address: Address, data: bytes, words: list[str]) -> Errand | None:
        """Where a command goes next whose reply was an error; None if nowhere."""
        if words[0] == "NOSCRIPT":
            load = self._commands.load
            return Errand(address, b"".join([*load, data]), len(load) + 1)
        if self.only is None and words[0] in ("MOVED", "ASK"):
            host, _, port = words[2].rpartition(":")
            place = (host or address[0], int(port))
            if words[0] == "ASK":
                return Errand(place, command(b"ASKING") + data, 2)
            if slots := self._slots:
                slots[int(words[1])] = place
            return Errand(place, data)
        return None

    def _address_of(self, key: str) -> Address:
        address = self.guess(key)
        if address is None:
            self.forget()
            raise _nowhere(key)
        return address

    def _discovering(self) -> Dialogue[None]:
        """Ask for the map of the cluster, one server after another until one knows."""
        failure: StoreError = StoreUnavailable("No server of the cluster is known.")
        for address in self._seeds:
            answer = (yield {address: MAP})[address]
            if isinstance(answer, StoreError):
                failure = answer
            elif isinstance(answer[0], ReplyError):
                failure = complaint(address, answer[0])
            else:
                self._draw(answer[0], address)
                return
            # Another is asked first next time.
            self._seeds = (*(seed for seed in self._seeds if seed != address), address)
        raise failure

    def _draw(self, ranges: list[Any], asked: Address) -> None:
        slots: list[Address | None] = [None] * SLOTS
        for first, last, (host, port, *_), *_ in ranges:
            place = (host.decode() if host else asked[0], port)
            slots[first : last + 1] = [place] * (last + 1 - first)
        self._slots = self._homes = slots
        self._seeds = tuple(dict.fromkeys([*self._seeds, *(place for place in slots if place)]))


def _nowhere(key: str) -> StoreUnavailable:
    return StoreUnavailable("No server of the cluster is known to have this key. Try again.", key=key)


def all_of(taken: list[Answer | StoreError]) -> list[Any]:
    """What was delivered, if all of it was; else the first error."""
    for answer in taken:
        if isinstance(answer, StoreError):
            raise answer
    return taken


def slot_of(name: bytes) -> int:
    """The slot of a cluster that a key is in. What stands in its first braces decides, if anything does."""
    start = name.find(b"{") + 1
    end = name.find(b"}", start) if start else -1
    return crc_hqx(name[start:end] if end > start else name, 0) % SLOTS


def _requests(errands: Iterable[Errand]) -> Requests:
    """One request for each server."""
    places: dict[Address, list[Errand]] = {}
    for errand in errands:
        places.setdefault(errand.address, []).append(errand)
    return {
        address: (b"".join([errand.data for errand in those]), sum([errand.replies for errand in those]))
        for address, those in places.items()
    }
