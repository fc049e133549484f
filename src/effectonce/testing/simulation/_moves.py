"""What may happen next: the rules of the simulated world, and which orders of events come to the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ._moments import Action, Actor, Moment, Scenario
from ._processes import Node
from ._requests import Command, Effect, Pause, Start, Wait

READS = ("get", "scan", "now")
"""Verbs that change nothing: whether they arrive late or twice makes no difference."""


class Moves:
    """Lists the moves of one scenario. ``look`` tells what a poll of a store would notice."""

    def __init__(
        self, scenario: Scenario, roots: Sequence[Node], look: Callable[[int], int], reduced: bool
    ) -> None:
        self._steps, self._faults = scenario.steps, tuple(scenario.faults)
        self._roots, self._look, self._reduced = roots, look, reduced

    def at(self, moment: Moment) -> list[Action]:
        """Everything that may happen next, without orders that come to the same.

        Getting a reply, starting and waking up change nothing outside of a process, so between two steps of the clock
        it is the same when they happen: at once, or else (``hold``) not before the next step of the clock. A process
        that does several things at a time is excepted, because there they may change each other.
        """
        left = dict(zip(self._faults, moment.left, strict=True))
        ticking = any(left[step.name] for step in self._steps)
        found: list[Action] = []
        for index, actor in enumerate(moment.actors):
            if actor.node is None or actor.node.resting:
                continue
            own, inward = self._moves_of(moment, index, actor, actor.node, left)
            if self._reduced and inward and self._does_one_thing(moment, actor.node, left):
                if not actor.held:
                    return [*own, Action("hold", index)] if ticking else own
            else:
                found += own
        found += [Action("arrive", slot=place) for place in range(len(moment.network))]
        found += [Action(step.name) for step in self._steps if left[step.name]]
        if left["purges"]:
            found.append(Action("purge"))
        return found

    def _moves_of(
        self, moment: Moment, index: int, actor: Actor, node: Node, left: dict[str, int]
    ) -> tuple[list[Action], bool]:
        """What one process may do or meet next, and whether some of it happens inside of it alone."""
        found: list[Action] = []
        inward = False
        for slot, request in enumerate(node.pending):
            if request is None:
                continue
            if isinstance(request, Start):
                if not self._waits_for_twin(moment, index, slot):
                    found.append(Action("start", index, slot))
                    inward = True
                continue
            if isinstance(request, Command | Effect):
                answered = actor.replies[slot] is not None
                inward = inward or answered
                found += self._fates(request, answered, index, slot, left)
            elif self._is_over(moment, actor, slot, request):
                found.append(Action("wake", index, slot))
                inward = True
            if left["cancels"] and slot < len(node.pending) - 1:
                found.append(Action("cancel", index, slot))
        found += [
            Action("interrupt", index, running.slot)
            for running in node.running
            if running.told and not running.interrupted
        ]
        if self._may_tick(moment, node, left):
            found.append(Action("tick", index, len(node.pending) - 1))
        # A crashed worker is one that never goes on. So crashing it between a command and its reply shows nothing new.
        if left["crashes"] and node.started and not inward:
            found.append(Action("crash", index))
        return found, inward

    def _fates(
        self, request: Command | Effect, answered: bool, index: int, slot: int, left: dict[str, int]
    ) -> list[Action]:
        """What may become of a request."""
        found = [Action("deliver" if answered else "apply", index, slot)]
        if isinstance(request, Command):
            if left["losses"]:
                found.append(Action("lose" if answered else "delay", index, slot))
            if left["copies"] and not answered and request.verb not in READS:
                found.append(Action("copy", index, slot))
        return found

    def _may_tick(self, moment: Moment, node: Node, left: dict[str, int]) -> bool:
        return bool(left["ticks"]) and node.pending[-1] is None and node.renew_at <= moment.local_now

    def _does_one_thing(self, moment: Moment, node: Node, left: dict[str, int]) -> bool:
        busy = sum(request is not None for request in node.pending)
        told = any(running.told for running in node.running)
        return busy == 1 and not told and not self._may_tick(moment, node, left)

    def _waits_for_twin(self, moment: Moment, index: int, slot: int) -> bool:
        """Of two that do the same, the first starts first: the other order would only rename them."""
        pending = self._roots[index].pending
        if slot and pending[slot] == pending[slot - 1]:
            node = moment.actors[index].node
            return node is not None and isinstance(node.pending[slot - 1], Start)
        if index and pending == self._roots[index - 1].pending:
            before = moment.actors[index - 1].node
            return before is not None and not before.started
        return False

    def _is_over(self, moment: Moment, actor: Actor, slot: int, request: Pause | Wait) -> bool:
        if moment.local_now >= request.until:
            return True
        if isinstance(request, Wait):
            return request.over
        return request.short or actor.replies[slot] != self._look(moment.store)
