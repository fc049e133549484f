"""The simulated world: processes, one real MemoryStore, a network that delays and repeats, clocks and a sink.

A ``Moment`` is everything that can matter from here on, as a plain value. ``World.moves`` lists what may happen next
and ``World.step`` makes it happen, so that a search needs nothing else.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from ..._records import Record, State
from . import _invariants as invariants
from ._ghosts import Applied, Ghost, observed
from ._moments import CRASHED, RESTED, Action, Actor, Moment, Pool, Scenario, Violation, alive, put
from ._moves import READS, Moves
from ._processes import Family, Node, Process
from ._requests import Began, Command, Effect, Ended, Event, Input, Pause, Running, Task, Wait
from ._shelf import Contents, Shelf

SKEW = 1000.0
"""How far the local clocks of two processes are apart."""


class World:
    """One scenario, with everything that was ever seen in it.

    ``checked`` names the invariants to hold. ``reduced=False`` goes through orders that come to the same, too.
    """

    def __init__(
        self, scenario: Scenario, checked: Iterable[str] | None = None, *, reduced: bool = True
    ) -> None:
        self.scenario = scenario
        self.checked = frozenset(invariants.INVARIANTS if checked is None else checked) - scenario.without
        self._of_commands = [c for c in invariants.OF_COMMANDS if c.__name__ in self.checked]
        self._of_calls = [c for c in invariants.OF_CALLS if c.__name__ in self.checked]
        self.shelf = Shelf()
        self.stores: Pool[Contents] = Pool()
        self.replies: Pool[Hashable] = Pool()
        self.commands: Pool[Command] = Pool()
        self.ghosts: Pool[tuple[Ghost, ...]] = Pool()
        self.fault_names = tuple(scenario.faults)
        self.names = tuple(tasks[0].name for tasks in scenario.processes)
        self._keys = sorted(
            {asked.key for tasks in scenario.processes for task in tasks for asked in task.asks}
        )
        self._carried: dict[tuple[int, float, int, int, int, bool], tuple[int, int, int]] = {}
        self._settled: dict[tuple[int, float], list[str]] = {}
        self._roots = [
            Family(self.names[index], tasks, index * SKEW).member(())[0]
            for index, tasks in enumerate(scenario.processes)
        ]
        self.moves = Moves(scenario, self._roots, self._look, reduced).at

    def begin(self) -> Moment:
        """The first moment: an empty store, and nobody has started."""
        actors = tuple(
            Actor(root, (None,) * len(root.pending), ((),) * len(root.pending)) for root in self._roots
        )
        store = self.stores.id(Contents((), 0, (), float("inf")))
        ghosts = self.ghosts.id(tuple(Ghost(key) for key in self._keys))
        return Moment(store, 0.0, 0.0, actors, (), tuple(self.scenario.faults.values()), ghosts)

    def _look(self, store: int) -> int:
        """What a poll would notice: two stores that differ only in how long leases last look the same."""
        return self.replies.id(tuple((r.key, r.state, r.fence) for r in self.stores.values[store].records))

    # What happens.

    def step(self, moment: Moment, action: Action) -> Moment:
        """The moment after an action. Raises ``Violation``."""
        kind, index, slot = action
        do = getattr(self, f"_do_{kind}", None)
        after: Moment = self._pass_time(moment, kind) if do is None else do(moment, index, slot)
        self._check_moment(after)
        return after

    def _do_start(self, moment: Moment, index: int, slot: int) -> Moment:
        return self._feed(moment, index, Input("start", slot, moment.local_now))

    def _do_apply(self, moment: Moment, index: int, slot: int) -> Moment:
        node = alive(moment, index)
        request = node.pending[slot]
        if isinstance(request, Effect):
            moment, reply = self._affect(moment, request)
        else:
            assert isinstance(request, Command)
            moment, reply = self._carry_out(moment, self.commands.id(request), index)
        actor = moment.actors[index]
        since = actor.since if actor.since[slot] else put(actor.since, slot, self._counts(moment))
        actor = actor._replace(replies=put(actor.replies, slot, reply), since=since)
        return moment._replace(actors=put(moment.actors, index, actor))

    def _do_hold(self, moment: Moment, index: int, slot: int) -> Moment:
        actor = moment.actors[index]._replace(held=True)
        return moment._replace(actors=put(moment.actors, index, actor))

    def _do_deliver(self, moment: Moment, index: int, slot: int) -> Moment:
        actor = moment.actors[index]
        number = actor.replies[slot]
        assert number is not None
        return self._feed(moment, index, Input("reply", slot, moment.local_now, self.replies.values[number]))

    def _do_lose(self, moment: Moment, index: int, slot: int) -> Moment:
        return self._feed(self._spend(moment, "losses"), index, Input("unavailable", slot, moment.local_now))

    def _do_delay(self, moment: Moment, index: int, slot: int) -> Moment:
        return self._do_lose(self._post(moment, index, slot), index, slot)

    def _do_copy(self, moment: Moment, index: int, slot: int) -> Moment:
        return self._do_apply(self._post(self._spend(moment, "copies"), index, slot), index, slot)

    def _do_wake(self, moment: Moment, index: int, slot: int) -> Moment:
        return self._feed(moment, index, Input("reply", slot, moment.local_now))

    def _do_tick(self, moment: Moment, index: int, slot: int) -> Moment:
        return self._feed(self._spend(moment, "ticks"), index, Input("tick", slot, moment.local_now))

    def _do_interrupt(self, moment: Moment, index: int, slot: int) -> Moment:
        return self._feed(moment, index, Input("interrupt", slot, moment.local_now))

    def _do_cancel(self, moment: Moment, index: int, slot: int) -> Moment:
        moment = self._post(self._spend(moment, "cancels"), index, slot)
        return self._feed(moment, index, Input("cancel", slot, moment.local_now))

    def _do_crash(self, moment: Moment, index: int, slot: int) -> Moment:
        return self._spend(moment, "crashes")._replace(actors=put(moment.actors, index, CRASHED))

    def _do_arrive(self, moment: Moment, index: int, slot: int) -> Moment:
        network = moment.network
        rest = moment._replace(network=network[:slot] + network[slot + 1 :])
        return self._carry_out(rest, network[slot], index, late=True)[0]

    def _do_purge(self, moment: Moment, index: int, slot: int) -> Moment:
        return self._carry_out(self._spend(moment, "purges"), self.commands.id(Command("purge", 256)), index)[
            0
        ]

    def _pass_time(self, moment: Moment, name: str) -> Moment:
        step = next(step for step in self.scenario.steps if step.name == name)
        actors = tuple(actor._replace(held=False) if actor.held else actor for actor in moment.actors)
        moment = self._spend(moment, name)._replace(actors=actors)
        return moment._replace(
            store_now=moment.store_now + step.store, local_now=moment.local_now + step.local
        )

    def _spend(self, moment: Moment, fault: str) -> Moment:
        place = self.fault_names.index(fault)
        return moment._replace(left=put(moment.left, place, moment.left[place] - 1))

    def _post(self, moment: Moment, index: int, slot: int) -> Moment:
        """Leave a command that has not been applied in the network: it may arrive at any later moment, or never."""
        request = alive(moment, index).pending[slot]
        if not isinstance(request, Command) or moment.actors[index].replies[slot] is not None:
            return moment
        if request.verb in READS:
            return moment
        return moment._replace(network=tuple(sorted((*moment.network, self.commands.id(request)))))

    def _feed(self, moment: Moment, index: int, given: Input) -> Moment:
        """Let something happen to a process and look at what it does."""
        actor, slot = moment.actors[index], given.slot
        node, events = alive(moment, index).after(given)
        for event in events:
            moment = self._witness(moment, index, event)
        request = node.pending[slot]
        if request is None and slot == len(node.pending) - 1:  # the keeper has done its round
            self._check("loser_is_told", [running for running in node.running if running.denied])
        replies = put(actor.replies, slot, self._look(moment.store) if isinstance(request, Pause) else None)
        since = put(actor.since, slot, ()) if request is None else actor.since
        after = RESTED if node.resting else Actor(node, replies, since)
        return moment._replace(actors=put(moment.actors, index, after))

    def _witness(self, moment: Moment, index: int, event: Event) -> Moment:
        if isinstance(event, Ended):
            self._check_calls(moment, index, event)
            return moment
        ghost = self._ghost(moment, event.key)
        if isinstance(event, Began):
            self._check("starts_once", event, ghost)
            ghost = ghost._replace(running=ghost.running | {event.owner}, begun=ghost.begun + 1)
        else:
            ghost = ghost._replace(running=ghost.running - {event.owner})
        return self._remember(moment, ghost)

    # The store and the sink.

    def _carry_out(self, moment: Moment, command: int, asker: int, late: bool = False) -> tuple[Moment, int]:
        known = (moment.store, moment.store_now, moment.ghosts, command, asker, late)
        if known not in self._carried:
            self._carried[known] = self._carry_out_anew(moment, self.commands.values[command], asker, late)
        store, reply, ghosts = self._carried[known]
        after = moment._replace(store=store, ghosts=ghosts)
        if ghosts != moment.ghosts and "loser_knows_in_time" in self.checked:
            self._check_overtaken(moment, after)
        return after, reply

    def _carry_out_anew(
        self, moment: Moment, command: Command, asker: int, late: bool
    ) -> tuple[int, int, int]:
        self.shelf.put(self.stores.values[moment.store])
        self.shelf.clock.now, self.shelf.clock.asker = moment.store_now, asker
        reply, steps = self.shelf.carry_out(command)
        for verb, item, before, after, answer in steps:
            ghost = self._ghost(moment, before.key if verb == "purge" and before else item.key)
            applied = Applied(verb, item, before, after, answer, moment.store_now, ghost)
            self._check_command(applied)
            moment = self._remember(moment, observed(applied, late))
        return self.stores.id(self.shelf.take()), self.replies.id(reply), moment.ghosts

    def _affect(self, moment: Moment, effect: Effect) -> tuple[Moment, int]:
        """The sink refuses lower fences than it has seen, and does what it is asked once per derived key."""
        if not effect.key:
            return moment, self.replies.id("thought")
        ghost = self._ghost(moment, effect.key)
        if effect.step:
            tried = (effect.fence, effect.step)
            for check in ("finished_step_rests", "step_recorded_first"):
                self._check(check, invariants.Tried(*tried, ghost))
            if tried not in ghost.tried:
                ghost = ghost._replace(tried=(*ghost.tried, tried))
        if effect.fence < ghost.sink_fence:
            return self._remember(moment, ghost), self.replies.id("stale")
        ghost = ghost._replace(sink_fence=effect.fence)
        did = (effect.step, effect.name)
        fresh = did not in ghost.effects
        if fresh:
            ghost = ghost._replace(effects=(*ghost.effects, did))
            self._check_command(Applied("effect", None, None, None, None, moment.store_now, ghost))
        return self._remember(moment, ghost), self.replies.id("applied" if fresh else "duplicate")

    def record(self, moment: Moment, key: str) -> Record | None:
        """What the store holds of a key."""
        return next((r for r in self.stores.values[moment.store].records if r.key == key), None)

    def standing(self, moment: Moment, index: int, slot: int, kind: Any) -> tuple[Node, tuple[Event, ...]]:
        """Where a process stands after something has happened to it, and what it was seen to do."""
        number = moment.actors[index].replies[slot]
        pauses = isinstance(alive(moment, index).pending[slot], Pause | Wait)
        reply = None if number is None or pauses or kind != "reply" else self.replies.values[number]
        return alive(moment, index).after(Input(kind, slot, moment.local_now, reply))

    def _counts(self, moment: Moment) -> tuple[int, ...]:
        return tuple(len(ghost.done) for ghost in self.ghosts.values[moment.ghosts])

    def _ghost(self, moment: Moment, key: str) -> Ghost:
        return self.ghosts.values[moment.ghosts][self._keys.index(key)]

    def _remember(self, moment: Moment, ghost: Ghost) -> Moment:
        ghosts = self.ghosts.values[moment.ghosts]
        return moment._replace(ghosts=self.ghosts.id(put(ghosts, self._keys.index(ghost.key), ghost)))

    # Checks.

    def _check(self, name: str, *seen: Any) -> None:
        if name in self.checked:
            complaint = getattr(invariants, name)(*seen)
            if complaint is not None:
                raise Violation(name, complaint)

    def _check_command(self, applied: Applied) -> None:
        for check in self._of_commands:
            complaint = check(applied)
            if complaint is not None:
                raise Violation(check.__name__, complaint)

    def _check_calls(self, moment: Moment, index: int, ended: Ended) -> None:
        task = self.scenario.processes[index][ended.slot]
        self._check("errors_are_known", task, ended)
        outcomes = ended.result if isinstance(ended.result, list) else [ended.result] * len(task.asks)
        since = moment.actors[index].since[ended.slot] or self._counts(moment)
        for asked, outcome in zip(task.asks, outcomes, strict=True):
            before, record = since[self._keys.index(asked.key)], self.record(moment, asked.key)
            ghost = self._ghost(moment, asked.key)
            call = invariants.Call(task, ended, outcome, asked.fingerprint, ghost, before, record)
            for check in self._of_calls:
                complaint = check(call)
                if complaint is not None:
                    raise Violation(check.__name__, complaint)

    def _check_overtaken(self, before: Moment, after: Moment) -> None:
        tops = [ghost.top for ghost in self.ghosts.values[before.ghosts]]
        for top, ghost in zip(tops, self.ghosts.values[after.ghosts], strict=True):
            if ghost.top > top:
                overtaken: list[Running] = [
                    running
                    for actor in before.actors
                    for running in (actor.node.running if actor.node else ())
                    if running.key == ghost.key and self._holds(before, running)
                ]
                self._check("loser_knows_in_time", overtaken, before.local_now)

    def _holds(self, moment: Moment, running: Running) -> bool:
        record = self.record(moment, running.key)
        return record is not None and record.state is State.PENDING and record.fence == running.fence

    def _check_moment(self, moment: Moment) -> None:
        if "nothing_stuck" in self.checked:
            known = (moment.store, moment.store_now)
            if known not in self._settled:
                self._settled[known] = self._retry(moment)
            self._check("nothing_stuck", self._settled[known])
        if "nothing_orphaned" in self.checked and all(a.node and a.node.resting for a in moment.actors):
            left = dict(zip(self.fault_names, moment.left, strict=True))
            faults = self.scenario.faults
            if all(left[name] == faults[name] for name in ("crashes", "losses", "copies", "cancels")):
                for ghost in self.ghosts.values[moment.ghosts]:
                    self._check("nothing_orphaned", self.record(moment, ghost.key), ghost, moment.store_now)

    def _retry(self, moment: Moment) -> list[str]:
        """Ask for each key again when all leases are over; the refusals of keys for which nobody got an answer."""
        self.shelf.put(self.stores.values[moment.store])
        self.shelf.clock.now, self.shelf.clock.asker = moment.store_now + self.scenario.patience, 0
        refusals: dict[str, list[str]] = {
            asked.key: [] for task in self.scenario.retries for asked in task.asks
        }
        for number, task in enumerate(self.scenario.retries):
            process = Process(f"retry{number}", (task,), 0.0)
            process.feed(Input("start", 0, 0.0))
            while process.pending[0] is not None:
                request = process.pending[0]
                reply = self.shelf.carry_out(request)[0] if isinstance(request, Command) else "applied"
                process.feed(Input("reply", 0, 0.0, reply))
            ended = process.events[-1]
            assert isinstance(ended, Ended)
            refusals = {key: said for key, said in refusals.items() if not _answers(key, task, ended, said)}
        return [f"{key} {', '.join(said)}" for key, said in refusals.items()]


def _answers(key: str, task: Task, ended: Ended, said: list[str]) -> bool:
    """Whether a retry ended with a result, a remembered error or a doubt; what else it got is noted in ``said``."""
    if key not in [asked.key for asked in task.asks]:
        return False
    word = ended.result.status if ended.error is None else type(ended.error).__name__
    said.append(word)
    return word in ("executed", "replayed", "InDoubt", "AttemptsExhausted") or isinstance(
        ended.error, task.remember
    )
