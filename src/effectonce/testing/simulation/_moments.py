"""The values that a search goes through: what a scenario allows, what may happen, and what a moment is made of."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from ._processes import Family, Node
from ._requests import Task

H = TypeVar("H", bound=Hashable)
T = TypeVar("T")


class Step(NamedTuple):
    """A way for time to pass: how far the store's clock and the local clocks move, and how often it may happen."""

    name: str
    store: float
    local: float
    times: int = 1


@dataclass(frozen=True)
class Scenario:
    """Who takes part, and how much may go wrong. Everything within these bounds is explored."""

    name: str
    processes: tuple[tuple[Task, ...], ...]
    retries: tuple[Task, ...]
    """What is asked again at the end: for each key, at least one of them has to get an answer."""
    steps: tuple[Step, ...] = ()
    crashes: int = 0
    losses: int = 0
    """Requests and replies that the network loses or delays; the sender gets StoreUnavailable."""
    copies: int = 0
    """Requests that the network delivers a second time, at any later moment."""
    cancels: int = 0
    ticks: int = 0
    """How often keepers look after leases that are due; a keeper that never does stands for a paused process."""
    purges: int = 0
    patience: float = 100.0
    """After so many seconds every lease is over."""
    without: frozenset[str] = field(default_factory=frozenset)
    """Invariants that this scenario can not ask for, because it breaks what they rest on."""

    @property
    def faults(self) -> dict[str, int]:
        """How often each fault may happen."""
        names = ("crashes", "losses", "copies", "cancels", "ticks", "purges")
        return {name: getattr(self, name) for name in names} | {step.name: step.times for step in self.steps}


class Action(NamedTuple):
    """One thing that may happen next. Its numbers are indexes: of a process, and of a task or a delayed command."""

    kind: str
    process: int = -1
    slot: int = -1


class Actor(NamedTuple):
    """One process at a moment. ``node`` is None after a crash."""

    node: Node | None
    replies: tuple[int | None, ...]
    """By task: the reply that is on its way, or what the store looked like when a pause began."""
    since: tuple[tuple[int, ...], ...]
    """By task: how many finished records each key had had when it first asked for something."""
    held: bool = False
    """Whether what may happen inside of it waits for the next step of the clock."""


RESTED = Actor(Family("nobody", (), 0.0).member(())[0], (), ())
"""A process that has nothing left to do is the same whatever it did."""
CRASHED = Actor(None, (), ())


class Moment(NamedTuple):
    """Everything that can matter from here on. Numbers without a unit are pool ids."""

    store: int
    store_now: float
    local_now: float
    actors: tuple[Actor, ...]
    network: tuple[int, ...]
    """Commands that may still arrive, though nobody waits for their reply."""
    left: tuple[int, ...]
    """How many of each fault may still happen."""
    ghosts: int


class Violation(Exception):
    """An invariant did not hold."""

    def __init__(self, invariant: str, complaint: str) -> None:
        super().__init__(f"{invariant}: {complaint}")
        self.invariant, self.complaint = invariant, complaint


class Pool(Generic[H]):
    """Gives equal values one small number, so that moments are compared quickly."""

    def __init__(self) -> None:
        self._ids: dict[H, int] = {}
        self.values: list[H] = []

    def id(self, value: H) -> int:
        """The number of a value."""
        found = self._ids.get(value)
        if found is None:
            found = self._ids[value] = len(self.values)
            self.values.append(value)
        return found


def alive(moment: Moment, index: int) -> Node:
    """Where a process stands that has not crashed."""
    node = moment.actors[index].node
    assert node is not None
    return node


def put(values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    """The same values, with another one in one place."""
    return (*values[:place], value, *values[place + 1 :])
