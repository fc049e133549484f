"""Every schedule, within bounds: the real receiver, flow and keeper against the real memory store.

``./test tests/model -rP -k exploration`` shows how many moments and schedules each scenario has.
"""

from __future__ import annotations

from collections.abc import Collection

import pytest
from tests.model.scenarios import (
    LEASE_OVER,
    QUICK,
    THIRD,
    WAIT,
    WIDE,
    ask,
    declines,
    fails,
    scenario,
)

from effectonce import _colours, _flow
from effectonce.testing.simulation import INVARIANTS, Counterexample, Scenario, explore, find, replay
from effectonce.testing.simulation._world import World

pytestmark = pytest.mark.timeout(600)  # of work without a pause, which takes long beside others


def named(cases: list[Scenario], wide: Collection[str] = ()) -> pytest.MarkDecorator:
    """Cases under their names. Those that are wide are for ``./test --soak``."""
    marked = [pytest.param(case, marks=[pytest.mark.soak] if case.name in wide else []) for case in cases]
    return pytest.mark.parametrize("case", marked, ids=lambda case: case.name)


@named(QUICK)
def test_every_schedule_keeps_every_invariant(case: Scenario) -> None:
    """Whatever the order of events and wherever it goes wrong, what the protocol promises holds at every step."""
    print(explore(case))


@pytest.mark.soak
@pytest.mark.timeout(7200)
@named(WIDE)
def test_every_schedule_with_more_faults_keeps_every_invariant(case: Scenario) -> None:
    """The same, with more going wrong at a time than fits into a minute."""
    print(explore(case, progress=True))


@named(
    [
        scenario("a result", ask("ada"), ask("bob"), losses=2, ticks=1),
        scenario("a failure", ask("ada", fails), ask("bob"), losses=2, ticks=1, cancels=1),
        scenario("a remembered error", ask("ada", declines), ask("bob"), losses=2, ticks=1, cancels=1),
        scenario("a result of another time", ask("ada"), losses=2, ticks=1, steps=(THIRD, LEASE_OVER)),
        scenario("a result of any time", ask("ada"), losses=2, ticks=2, steps=(THIRD, LEASE_OVER)),
    ],
    wide=["a result of any time"],
)
def test_endings_that_the_keeper_carries_home_keep_every_invariant(
    case: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ending that could not be written is tried again by the keeper, beside everything else that goes on."""
    monkeypatch.setattr(_colours, "SENDS", 1)  # so that two losses are enough to leave it to the keeper
    # Giving a claim back is tried as often, so one loss is enough to leave that to the lease.
    print(explore(_without(case, "cancelled_leaves_nothing")))


def _without(case: Scenario, *names: str) -> Scenario:
    return Scenario(**{**vars(case), "without": frozenset(names)})


@named(
    [
        scenario("losses", ask("ada"), ask("bob"), losses=1, steps=(LEASE_OVER,)),
        scenario("copies", ask("ada", fails), ask("bob"), copies=1, steps=(LEASE_OVER,)),
        scenario("cancels", ask("ada"), ask("bob"), cancels=1, losses=1),
        scenario("crashes", ask("ada"), ask("bob"), ask("cyd"), crashes=1, steps=(LEASE_OVER,)),
        scenario("ticks", ask("ada"), ask("bob"), ticks=1, steps=(LEASE_OVER,)),
        scenario("waiting", ask("ada", policy=WAIT), ask("bob", policy=WAIT), steps=(LEASE_OVER,)),
    ]
)
def test_leaving_out_equal_orders_leaves_out_no_state(case: Scenario) -> None:
    """What is not explored because it comes to the same does come to the same: every store at every time is reached."""
    assert reached(World(case)) == reached(World(case, reduced=False))


def reached(world: World) -> set[object]:
    begin = world.begin()
    seen, todo = {begin}, [begin]
    while todo:
        moment = todo.pop()
        for action in world.moves(moment):
            after = world.step(moment, action)
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return {(world.stores.values[m.store], m.store_now, world.ghosts.values[m.ghosts]) for m in seen}


def test_a_schedule_is_told_as_a_story() -> None:
    """A list of choices goes through one schedule again and says, step by step, who did what."""
    case = scenario("alone", ask("ada"))
    choices = [("start", 0, 0), ("apply", 0, 0), ("deliver", 0, 0), ("apply", 0, 0), ("deliver", 0, 0)]
    story = replay(case, choices)
    assert [line.split(";")[0] for line in story.splitlines()] == [
        "  1. ada starts",
        "  2. ada's claim(key='|message||k', owner=b'ada.1') is carried out",
        "  3. ada gets the reply",
        "  4. ada's effect with fence 1 is carried out",
        "  5. ada gets the reply",
    ]
    assert "its handler begins with fence 1" in story


def test_a_counterexample_is_short_and_can_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a search finds is the shortest schedule there is; its message tells the story, its choices repeat it."""

    async def careless(*_: object) -> None:
        """Keeps the claim of a cancelled caller."""

    monkeypatch.setattr(_flow.Flow, "withdraw", careless)
    case = scenario("careless", ask("ada"), ask("bob"), cancels=1)
    with pytest.raises(Counterexample, match=r"(?s)ada is cancelled.*!! cancelled_leaves_nothing") as found:
        explore(case)
    assert found.value.invariant == "cancelled_leaves_nothing"
    assert len(found.value.choices) == 4
    with pytest.raises(Counterexample, match="cancelled_leaves_nothing"):
        replay(case, found.value.choices)
    monkeypatch.undo()
    assert find(case) is None


def test_every_invariant_says_what_it_demands() -> None:
    """The names that a counterexample uses are explained."""
    assert all(INVARIANTS.values())
