"""A schedule as a numbered story that a person can follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..._records import Decision, Record
from ._moments import Action, Moment, Violation
from ._requests import Began, Command, Effect, Ended, Pause, Wait
from ._world import World


def tell(world: World, choices: Sequence[Action]) -> tuple[str, Violation | None]:
    """The story of a schedule, and the violation that it ends with, if it does."""
    moment = world.begin()
    lines: list[str] = []
    for number, action in enumerate(choices, 1):
        try:
            after = world.step(moment, action)
        except Violation as violation:
            lines += [f"{number:>3}. {_deed(world, moment, action)}", f"     !! {violation}"]
            return "\n".join(lines), violation
        lines.append(f"{number:>3}. {_deed(world, moment, action)}{_result(world, moment, after, action)}")
        moment = after
    return "\n".join(lines), None


def _deed(world: World, moment: Moment, action: Action) -> str:
    kind, index, slot = action
    name = _name(world, index, slot)
    asked = _asked(world, moment, action)
    deeds = {
        "start": f"{name} starts",
        "apply": f"{asked} is carried out",
        "copy": f"{asked} is carried out, and a copy of it stays in the network",
        "hold": f"{name} is slow: it goes on only after the next step of the clock",
        "deliver": f"{name} gets the reply",
        "lose": f"the reply to {asked} is lost; {name} gets StoreUnavailable",
        "delay": f"{asked} hangs in the network; {name} gets StoreUnavailable",
        "arrive": f"late, {asked} arrives and is carried out",
        "wake": f"{name} wakes up",
        "cancel": f"{name} is cancelled",
        "interrupt": f"{name}'s handler is interrupted, because its lease is lost",
        "tick": f"{name} looks after its leases",
        "crash": f"{name} crashes",
        "purge": "the store is purged",
    }
    if kind in deeds:
        return deeds[kind]
    step = next(step for step in world.scenario.steps if step.name == kind)
    if step.store == step.local:
        return f"{step.store:g} s pass ({kind})"
    return f"the store's clock moves by {step.store:g} s, the others by {step.local:g} s ({kind})"


def _name(world: World, index: int, slot: int) -> str:
    if index < 0:
        return ""
    tasks = world.scenario.processes[index]
    if slot == len(tasks):
        return f"{world.names[index]}'s keeper"
    return tasks[max(slot, 0)].name


def _asked(world: World, moment: Moment, action: Action) -> str:
    kind, index, slot = action
    if kind == "arrive":
        return _command("a", world.commands.values[moment.network[slot]])
    node = moment.actors[index].node if index >= 0 and slot >= 0 else None
    request = node.pending[slot] if node is not None else None
    owner = f"{_name(world, index, slot)}'s"
    if isinstance(request, Command):
        return _command(owner, request)
    if isinstance(request, Effect):
        return f"{owner} effect with fence {request.fence}" if request.key else f"{owner} thinking"
    return ""


def _command(whose: str, command: Command) -> str:
    items = command.argument if command.verb.endswith("_many") else [command.argument]
    return f"{whose} {command.verb}({'; '.join(map(_item, items))})"


def _item(item: Any) -> str:
    words = [
        f"{name}={value!r}" if name != "state" else value.name
        for name in ("key", "owner", "fence", "state", "result")
        if (value := getattr(item, name, None)) is not None
    ]
    return ", ".join(words) or repr(item)


def _result(world: World, before: Moment, after: Moment, action: Action) -> str:
    kind, index, slot = action
    said: list[str] = []
    if kind in ("apply", "copy"):
        number = after.actors[index].replies[slot]
        assert number is not None
        said.append(f"the reply will be {_reply(world.replies.values[number])}")
    said += [
        f"the record is now {_record(record)}"
        for record in world.stores.values[after.store].records
        if record != world.record(before, record.key)
    ]
    said += [
        f"the record of {record.key!r} is gone"
        for record in world.stores.values[before.store].records
        if world.record(after, record.key) is None
    ]
    if kind in ("start", "deliver", "lose", "delay", "wake", "cancel", "interrupt"):
        said += _seen(world, before, after, action)
    return "".join(f"; {words}" for words in said)


def _seen(world: World, before: Moment, after: Moment, action: Action) -> list[str]:
    """What a process was seen to do; found by letting the same happen to it again."""
    kind, index, slot = action
    input_kind = {"deliver": "reply", "wake": "reply", "lose": "unavailable", "delay": "unavailable"}.get(
        kind, kind
    )
    node, events = world.standing(before, index, slot, input_kind)
    said: list[str] = []
    for event in events:
        if isinstance(event, Began):
            said.append(f"its handler begins with fence {event.fence}")
        elif isinstance(event, Ended):
            said.append(f"it ends with {_ending(event)}")
    request = node.pending[slot]
    if isinstance(request, Command | Effect):
        said.append(
            f"it sends {_asked(world, after, action).removeprefix(_name(world, index, slot) + chr(39) + 's ')}"
        )
    elif isinstance(request, Pause | Wait):
        said.append("it waits")
    return said


def _ending(ended: Ended) -> str:
    if ended.error is not None:
        return repr(ended.error)
    outcomes = ended.result if isinstance(ended.result, list) else [ended.result]
    return ", ".join(
        f"{o.status} {o.value!r} (fence {o.fence})" if hasattr(o, "status") else repr(o) for o in outcomes
    )


def _reply(reply: Any) -> str:
    if isinstance(reply, Decision):
        return reply.verdict.name + (f" with fence {reply.record.fence}" if reply.record else "")
    return reply.name if hasattr(reply, "name") else repr(reply)


def _record(record: Record) -> str:
    result = "" if record.result is None else f" {record.result!r}"
    return f"{record.state.name}{result} with fence {record.fence}" + (
        f", held by {record.owner!r} until {record.lease_until:g}" if record.owner else ""
    )
