"""Every way a small saga can go, explored whole: tries that fail in every manner, processes that die anywhere, a clock
that runs out. Whatever happens, it ends completed, or undone, or with a person; and the world agrees with its end.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from effectonce.saga import _decisions
from effectonce.saga._decisions import Completed, Moment, Move, Run, Stuck, Trail, Turn, Undone
from effectonce.saga._outline import Outline, Role, Task


def task(name: str, **changes: Any) -> Task:
    kept = Task(name, print, print, 2, 2, 1.0, 8.0, None, (), False)
    return kept._replace(**changes)


A, B, C = (task(name) for name in "abc")
PIVOT = task("p", undo=None, is_pivot=True)
AFTER = task("z", undo=None, attempts=None)
X, Y = (task(name, attempts=1, undo_attempts=1) for name in "xy")
"""Once each: side by side, more tries would be too many ways to go."""
LOOK = task("look", undo=None)
"""A step that has nothing to take back."""

OUTLINES = {
    "two steps": Outline(((A,), (B,))),
    "pivot in the middle": Outline(((A,), (PIVOT,), (AFTER,))),
    "side by side": Outline(((X, Y),)),
    "side by side, then a pivot": Outline(((X, Y), (PIVOT,))),
    "nothing to take back": Outline(((X,), (LOOK,))),
    "in a hurry": Outline(((X,), (PIVOT,)), timeout=10.0),
}
MOST_TRIES = 2
SOAK = bool(os.environ.get("EFFECTONCE_SOAK"))


class World(NamedTuple):
    """The journal, and what has really happened."""

    entries: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]
    effects: frozenset[str]
    number: int = 1
    now: float = 0.0

    @property
    def trail(self) -> Trail:
        return Trail({name: dict(content) for name, content in self.entries})

    def noted(self, name: str, **content: Any) -> World:
        entry = tuple({"at": self.now, "n": self.number, **content}.items())
        return self._replace(entries=(*self.entries, (name, entry)))

    def happened(self, *names: str) -> World:
        return self._replace(effects=self.effects | set(names))

    def crashed(self) -> World:
        return self._replace(number=self.number + 1)


def beginning() -> World:
    return World((), frozenset()).noted("begin")


def failed(world: World, role: Role, task: Task, kind: str) -> World:
    number = 1 + len(world.trail.tries(role, task))
    return world.noted(f"{role}:{task.name}!{number}", kind=kind, error=kind)


def tries(world: World, role: Role, task: Task) -> Iterator[World]:
    """All that one try can come to."""
    name = f"{role}:{task.name}"
    done = world.happened(name)
    yield done.noted(name, value=None)
    if len(world.trail.tries(role, task)) < min(MOST_TRIES, task.limit(role) or MOST_TRIES):
        yield failed(world, role, task, "unknown")
        yield failed(done, role, task, "unknown")
        if role == "undo":
            return
        yield failed(world, role, task, "nothing")
        yield failed(done, role, task, "unstorable")
        if task.attempts is not None and name not in world.effects:
            yield failed(world, role, task, "refused")


def deaths(world: World, run: Run) -> Iterator[World]:
    """The process dies; of a group, any may have happened."""
    names = [f"{run.role}:{task.name}" for task in run.tasks]
    for chosen in range(2 ** len(names)):
        yield world.happened(*(name for bit, name in enumerate(names) if chosen >> bit & 1)).crashed()


def explore(outline: Outline, max_lost: int | None = None) -> Counter[str]:
    """Go every way, and judge every end; how often each kind of end is met."""
    ends = Counter[str]()
    most_crashes = 2 if SOAK else max_lost or 1
    todo, seen = [beginning()], set[Any]()
    while todo:
        world = todo.pop()
        same = (frozenset(world.entries), *world[1:])  # in whichever order steps side by side were recorded
        if same in seen:
            continue
        seen.add(same)
        move = Moment(outline, world.trail, world.number, world.now, max_lost).decide()
        if isinstance(move, Run):
            todo += deaths(world, move) if world.number <= most_crashes else ()
            for each in move.tasks:
                todo += tries(world, move.role, each)
            if outline.timeout and world.now == 0:
                todo.append(world._replace(now=100.0))
        elif isinstance(move, Turn):
            assert move.reason
            todo.append(world.noted("turn", step=move.step, reason=move.reason))
            if world.number <= most_crashes:
                todo.append(world.crashed())
        else:
            judge(outline, world, move)
            ends[type(move).__name__] += 1
    return ends


def judge(outline: Outline, world: World, move: Move) -> None:
    """What an end promises is true of the world."""
    done = {task.name for task in outline.tasks if f"do:{task.name}" in world.effects}
    undone = {task.name for task in outline.tasks if f"undo:{task.name}" in world.effects}
    if isinstance(move, Completed):
        assert done == {task.name for task in outline.tasks}, "completed, but not all of it happened"
        assert not undone, "completed, but something was undone"
    elif isinstance(move, Undone):
        left = (
            done - undone - {task.name for task in outline.tasks if task.undo is None and not task.is_pivot}
        )
        assert not left, "undone, but something is left"
    else:
        assert isinstance(move, Stuck)
        pivot = outline.pivot
        may_be_final = pivot is not None and pivot.name in done
        assert move.role == "undo" or may_be_final or pivot_is_unknown(outline, world), "gave up too early"


def pivot_is_unknown(outline: Outline, world: World) -> bool:
    return outline.pivot is not None and not Moment(outline, world.trail, world.number).is_untouched(
        outline.pivot
    )


@pytest.mark.parametrize("name", OUTLINES)
@pytest.mark.parametrize("max_lost", [None, 2], ids=["no limit", "two lost processes"])
def test_every_way_ends_well(name: str, max_lost: int | None) -> None:
    """Completed: all happened, nothing was undone. Undone: all that may have happened was taken back. Else a person."""
    ends = explore(OUTLINES[name], max_lost)
    assert ends["Completed"] and ends["Undone"] and ends["Stuck"]


def test_nothing_is_undone_that_never_began() -> None:
    """Without a lost process, steps that said that nothing happened and steps that were not reached are left alone."""
    outline = Outline(((A,), (B,), (C,)))
    world = beginning().happened("do:a").noted("do:a", value=None)
    world = failed(world, "do", B, "refused")
    move = Moment(outline, world.trail, 1).decide()
    assert move == Turn("b", "refused")
    world = world.noted("turn", step="b", reason="refused")
    assert Moment(outline, world.trail, 1).decide() == Run("undo", (A,))


def test_what_a_lost_process_may_have_done_is_undone() -> None:
    """The same after a crash: nobody knows what the dead process did, so its step is taken back, too."""
    outline = Outline(((A,), (B,), (C,)))
    world = beginning().noted("do:a", value=None).crashed()
    world = failed(world, "do", B, "refused").noted("turn", step="b", reason="refused")
    assert Moment(outline, world.trail, 2).decide() == Run("undo", (B,))


def test_a_pivot_that_may_have_happened_is_tried_again() -> None:
    """Attempts don't end it: only its own word that nothing happened does."""
    outline = OUTLINES["pivot in the middle"]
    world = beginning().noted("do:a", value=None)
    for _ in range(5):
        world = failed(world, "do", PIVOT, "unknown")
        assert Moment(outline, world.trail, 1).decide() == Run("do", (PIVOT,))
    world = failed(world, "do", PIVOT, "refused")
    assert Moment(outline, world.trail, 1).decide() == Turn("p", "refused")


def test_pauses_double_and_are_bounded() -> None:
    """From the first pause to the longest, less up to a quarter."""
    pauses = []
    world = beginning()
    for _ in range(6):
        world = failed(world, "do", AFTER, "unknown")
        turnout = _decisions.next_try("do", AFTER, world.trail)
        assert isinstance(turnout, _decisions.Try)
        pauses.append(turnout.after)
    for pause, whole in zip(pauses, [1, 2, 4, 8, 8, 8], strict=True):
        assert 0.75 * whole <= pause <= whole


def test_a_person_lets_it_go_on() -> None:
    """What failed before does not count any more, and what was undone by hand is not undone again."""
    outline = Outline(((A,), (B,)))
    world = (
        beginning().noted("do:a", value=None).noted("do:b", value=None).noted("turn", step="b", reason="x")
    )
    for _ in range(2):
        world = failed(world, "undo", B, "unknown")
    stuck = Moment(outline, world.trail, 1).decide()
    assert isinstance(stuck, Stuck)
    world = world._replace(now=5.0)
    assert Moment(outline, world.noted("again:1", undone=[]).trail, 1).decide() == Run("undo", (B,))
    assert Moment(outline, world.noted("again:1", undone=["b"]).trail, 1).decide() == Run("undo", (A,))


# A model that can't say no is worse than none.

Broken = Callable[[pytest.MonkeyPatch], None]


def forget_the_lost(patch: pytest.MonkeyPatch) -> None:
    """A step without an entry is taken for one that never began, also after a crash."""
    patch.setattr(Moment, "is_untouched", lambda self, task: not self.trail.holds("do", task))


def give_up_the_pivot(patch: pytest.MonkeyPatch) -> None:
    """A pivot is given up like any other step."""
    patch.setattr(
        Moment, "_may_turn", lambda self, group: not self.trail.holds("do", self.outline.pivot or A)
    )


def turn_after_the_pivot(patch: pytest.MonkeyPatch) -> None:
    """The way back is open for ever."""
    patch.setattr(Moment, "_may_turn", lambda self, group: True)


def count_on_every_undo(patch: pytest.MonkeyPatch) -> None:
    """A compensation that failed often enough is taken for done."""
    plain = Trail.holds

    def holds(self: Trail, role: Role, task: Task) -> bool:
        return plain(self, role, task) or (role == "undo" and len(self.tries(role, task)) >= 2)

    patch.setattr(Trail, "holds", holds)


@pytest.mark.parametrize(
    "broken", [forget_the_lost, give_up_the_pivot, turn_after_the_pivot, count_on_every_undo]
)
def test_a_rule_that_is_broken_is_noticed(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the rules that keep a saga from ending half is needed."""
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        for outline in OUTLINES.values():
            explore(outline)
