"""The searches: every schedule of a scenario, or the shortest one that breaks an invariant."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ._moments import Action, Moment, Scenario, Violation
from ._stories import tell
from ._world import World

PROGRESS_EVERY = 20_000


class Explored(NamedTuple):
    """What an exploration has seen. Schedules that meet in the same moment are explored on from there once."""

    scenario: str
    moments: int
    steps: int
    schedules: int
    """Different orders of events, from the first to one after which nothing more can happen."""
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.scenario:<24} {self.moments:>8,} moments {self.steps:>9,} steps "
            f"{self.schedules:>9.1e} schedules {self.seconds:6.1f} s"
        )


class Counterexample(AssertionError):
    """A schedule that breaks an invariant, told as a story. ``choices`` makes ``replay`` do it again."""

    def __init__(
        self, scenario: Scenario, choices: Sequence[Action], violation: Violation, story: str
    ) -> None:
        super().__init__(
            f"{scenario.name}: {violation.invariant} does not hold.\n{story}\n"
            f"To see it again: replay(scenario, {[tuple(choice) for choice in choices]})"
        )
        self.scenario, self.choices = scenario, tuple(choices)
        self.invariant, self.complaint, self.story = violation.invariant, violation.complaint, story


def explore(scenario: Scenario, *, checked: Iterable[str] | None = None, progress: bool = False) -> Explored:
    """Go through every schedule of a scenario. Raises ``Counterexample``, with the shortest one there is."""
    names = None if checked is None else tuple(checked)
    search = _Everything(World(scenario, names), progress)
    try:
        return search.run()
    except Violation as violation:
        found = find(scenario, checked=names)
        # The shortest schedule may break another invariant than the first one found; either is a bug.
        raise found or _counterexample(scenario, search.path, violation) from violation


def find(scenario: Scenario, *, checked: Iterable[str] | None = None) -> Counterexample | None:
    """The shortest schedule that breaks an invariant, or None when there is none."""
    world = World(scenario, checked)
    begin = world.begin()
    came_from: dict[Moment, tuple[Moment, Action] | None] = {begin: None}
    layer = [begin]
    while layer:
        following: list[Moment] = []
        for moment in layer:
            for action in world.moves(moment):
                try:
                    after = world.step(moment, action)
                except Violation as violation:
                    return _counterexample(scenario, [*_way_to(moment, came_from), action], violation)
                if after not in came_from:
                    came_from[after] = (moment, action)
                    following.append(after)
        layer = following
    return None


def replay(scenario: Scenario, choices: Sequence[Action | tuple[str, int, int]]) -> str:
    """Go through one schedule and tell what happens. Raises ``Counterexample`` if it breaks an invariant."""
    world = World(scenario)
    taken = [Action(*choice) for choice in choices]
    story, violation = tell(world, taken)
    if violation is not None:
        raise Counterexample(scenario, taken, violation, story)
    return story


def _counterexample(scenario: Scenario, path: Sequence[Action], violation: Violation) -> Counterexample:
    story, _ = tell(World(scenario, (violation.invariant,)), path)
    return Counterexample(scenario, path, violation, story)


def _way_to(moment: Moment, came_from: dict[Moment, tuple[Moment, Action] | None]) -> list[Action]:
    way: list[Action] = []
    step = came_from[moment]
    while step is not None:
        moment, action = step
        way.append(action)
        step = came_from[moment]
    return way[::-1]


class _Everything:
    """Depth first, so that schedules can be counted on the way back."""

    def __init__(self, world: World, progress: bool) -> None:
        self._world, self._progress = world, progress
        self._schedules: dict[Moment, int] = {}
        self._steps = 0
        self._began = time.perf_counter()
        self.path: list[Action] = []

    def run(self) -> Explored:
        schedules = self._visit(self._world.begin())
        seconds = time.perf_counter() - self._began
        return Explored(self._world.scenario.name, len(self._schedules), self._steps, schedules, seconds)

    def _visit(self, moment: Moment) -> int:
        world, known, path = self._world, self._schedules, self.path
        total = 0
        for action in world.moves(moment):
            path.append(action)
            self._steps += 1
            after = world.step(moment, action)
            count = known.get(after)
            total += self._visit(after) if count is None else count
            path.pop()
        known[moment] = total = total or 1
        if self._progress and len(known) % PROGRESS_EVERY == 0:
            rate = len(known) / (time.perf_counter() - self._began)
            sys.stderr.write(f"{world.scenario.name}: {len(known):,} moments, {rate:,.0f}/s\n")
        return total
