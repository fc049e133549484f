"""Who takes part in the explorations: workers, what their handlers do, and how long things last."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from effectonce import Message, NotApplied, Policy, Receiver, current, keys
from effectonce.policy import Resolution
from effectonce.testing.simulation import Asked, Scenario, Step, Task, effect, think

LEASE, KEEP = 30.0, 600.0

THIRD = Step("a third of the lease", LEASE / 3, LEASE / 3)
REST = Step("the rest of the lease", LEASE * 2 / 3 + 1, LEASE * 2 / 3 + 1)
LEASE_OVER = Step("the lease is over", LEASE + 1, LEASE + 1)
KEEP_OVER = Step("everything expires", KEEP + LEASE + 70, KEEP + LEASE + 70)
ALMOST_KEEP, REST_OF_KEEP = Step("almost all of keep", KEEP - 5, KEEP - 5), Step("the rest of keep", 6.0, 6.0)
CLOCK_LEAPS = Step("the store's clock leaps", LEASE + 1, 0.0)
"""A step of the store's clock alone, as after a failover to a machine whose clock is ahead."""


class Declined(Exception):
    """An error that is a result."""


class TimedOut(Exception):
    """An error after which nobody knows."""


RETRY = Policy(keep=KEEP, lease=LEASE, busy="reject", remember=(Declined,), in_doubt=(TimedOut,))
ONCE = RETRY.but(on_crash="in_doubt")
WAIT = RETRY.but(busy="wait")
JOIN = RETRY.but(busy="join")
CACHE = RETRY.but(local_cache=8)
TWICE = RETRY.but(max_attempts=2)
PROBED = ONCE.but(prober=lambda record: Resolution.completed("found out"))

RAISED = (OSError, TimedOut)
Handler = Callable[[Message], Awaitable[str]]


def result(message: Message) -> str:
    """Different for every attempt, so that nobody's result passes for another's."""
    return f"done with fence {current().fence} for {message.payload}"


async def charges(message: Message) -> str:
    """Does one effect and says so."""
    await effect(current(), "charge")
    return result(message)


async def steps(message: Message) -> str:
    """Does two effects, each in a step."""
    for name in ("one", "two"):
        await current().astep(name, effect, current(), "charge")
    return result(message)


async def stumbles(message: Message) -> str:
    """Finishes one step, then fails."""
    await current().astep("one", effect, current(), "charge")
    raise OSError("no route to the bank")


async def fails(message: Message) -> str:
    """Fails without an effect; the default policy forgets that."""
    await think()
    raise OSError("no route to the bank")


async def declines(message: Message) -> str:
    """Ends with an error that is a result, different for every attempt."""
    await think()
    raise Declined(f"declined with fence {current().fence}")


async def doubts(message: Message) -> str:
    """Does its effect, and does not know it."""
    await effect(current(), "charge")
    raise TimedOut


async def not_applied(message: Message) -> str:
    """Says itself that nothing happened."""
    raise NotApplied


def ask(
    name: str,
    handler: Handler = charges,
    *,
    policy: Policy = RETRY,
    payload: str = "5 EUR",
    id: str = "k",
    timestamp: float | None = None,
) -> Task:
    """A worker that processes one message."""
    message = Message(id, payload, timestamp)

    async def script(receiver: Receiver) -> Any:
        return await receiver.aprocess(message, handler, policy=policy)

    return Task(name, (handler.__name__, policy, message), (asked(message),), script, policy.remember, RAISED)


def ask_for_all(name: str, ids: str, handler: Handler = charges, *, policy: Policy = RETRY) -> Task:
    """A worker that processes a batch of messages."""
    messages = [Message(id, "5 EUR") for id in ids]

    async def script(receiver: Receiver) -> Any:
        return await receiver.aprocess_batch(messages, handler, policy=policy)

    return Task(name, ("batch", ids, handler.__name__), tuple(map(asked, messages)), script, policy.remember)


def sweeps(name: str, *, policy: Policy = RETRY) -> Task:
    """A worker that looks for abandoned attempts."""

    async def script(receiver: Receiver) -> Any:
        return await receiver.asweep(policy=policy)

    return Task(name, "sweep", (), script)


def settles(name: str, kind: Any) -> Task:
    """A person who settles what is in doubt."""

    async def script(receiver: Receiver) -> Any:
        return await receiver.aresolve(asked(Message("k")).key, kind, "settled by hand")

    return Task(name, ("settle", kind), (), script)


def asked(message: Message) -> Asked:
    """The key and fingerprint that a receiver gives a message."""
    return Asked(keys.prefix("", "message") + message.id, keys.fingerprint(message.payload))


def scenario(
    name: str, *processes: Task | tuple[Task, ...], retries: tuple[Task, ...] = (), **bounds: Any
) -> Scenario:
    """A scenario in which each worker is a process of its own, unless several are given as a tuple."""
    each = tuple(process if isinstance(process[0], Task) else (process,) for process in processes)
    return Scenario(name, each, retries or (ask("eve"),), **bounds)  # type: ignore[arg-type]


def by_steps(name: str, *processes: Task, retries: tuple[Task, ...] = (), **bounds: Any) -> Scenario:
    """A scenario whose handlers have steps."""
    return scenario(name, *processes, retries=retries or BY_STEPS, without=STEPWISE, **bounds)


def once(name: str, handler: Handler = charges) -> Task:
    """A worker in at-most-once mode."""
    return ask(name, handler, policy=ONCE)


OTHER = "7 EUR"
EITHER = (ask("eve"), ask("fay", payload=OTHER))
BOTH = (ask("eve", id="a"), ask("fay", id="b"))
ONCE_AGAIN = (once("eve"),)
TWO_LEASES = LEASE_OVER._replace(times=2)
BY_STEPS = (ask("eve", steps),)
STEPWISE = frozenset({"recorded_effect_stands"})
"""What can't be asked for when a later attempt does not repeat an earlier one's effects."""
UNKNOWABLE = frozenset({"loser_knows_in_time"})
"""What can't be asked for when the store's clock leaps and the local ones don't."""

QUICK = [
    scenario("crashes", ask("ada"), ask("bob"), ask("cyd"), crashes=2, steps=(LEASE_OVER,)),
    scenario("crash after crash", ask("ada"), ask("bob"), crashes=2, steps=(TWO_LEASES,)),
    scenario("losses", ask("ada"), ask("bob"), ask("cyd"), losses=1, steps=(LEASE_OVER,)),
    scenario("copies", ask("ada"), ask("bob"), ask("cyd"), copies=1, steps=(LEASE_OVER,)),
    scenario("losses and copies", ask("ada"), ask("bob"), losses=1, copies=1, steps=(LEASE_OVER,)),
    scenario(
        "another payload",
        *(ask("ada"), ask("bob"), ask("cyd", payload=OTHER)),
        retries=EITHER,
        losses=1,
        steps=(LEASE_OVER,),
    ),
    scenario(
        "at most once",
        *(once("ada"), once("bob"), once("cyd")),
        retries=ONCE_AGAIN,
        crashes=1,
        losses=1,
        steps=(LEASE_OVER,),
    ),
    scenario(
        "at most once, copies", once("ada"), once("bob"), retries=ONCE_AGAIN, copies=2, steps=(LEASE_OVER,)
    ),
    scenario(
        "at most once, failing",
        *(once("ada", fails), once("bob"), once("cyd")),
        retries=ONCE_AGAIN,
        losses=1,
        steps=(LEASE_OVER,),
    ),
    scenario(
        "at most once, settled",
        *(once("ada"), once("bob"), settles("cyd", "not_applied")),
        retries=ONCE_AGAIN,
        losses=1,
        steps=(LEASE_OVER,),
    ),
    scenario(
        "at most once, probed",
        *(ask("ada", policy=PROBED), ask("bob", policy=PROBED), settles("cyd", "completed")),
        retries=ONCE_AGAIN,
        losses=1,
        steps=(LEASE_OVER,),
    ),
    scenario(
        "attempts used up",
        *(ask("ada", fails, policy=TWICE), ask("bob", policy=TWICE), ask("cyd", policy=TWICE)),
        retries=(ask("eve", policy=TWICE),),
        steps=(LEASE_OVER,),
    ),
    scenario("late", ask("ada", timestamp=0.0), ask("bob"), losses=1, copies=1, steps=(KEEP_OVER,)),
    scenario("failing, losses", ask("ada", fails), ask("bob"), losses=1, copies=1, steps=(LEASE_OVER,)),
    scenario(
        "failing, copies", ask("ada", fails), ask("bob", fails), ask("cyd"), copies=1, steps=(LEASE_OVER,)
    ),
    scenario("declining", ask("ada", declines), ask("bob"), losses=1, copies=1, steps=(LEASE_OVER,)),
    scenario("doubting", ask("ada", doubts), ask("bob"), losses=1, copies=1, steps=(LEASE_OVER,)),
    scenario("not applied", ask("ada", not_applied), ask("bob"), losses=1, copies=1, steps=(LEASE_OVER,)),
    scenario("cancelled", ask("ada"), ask("bob"), ask("cyd"), cancels=1, losses=1),
    scenario("cancelled twice", ask("ada"), ask("bob"), cancels=2, steps=(LEASE_OVER,)),
    scenario("kept", ask("ada"), ask("bob"), ticks=2, steps=(THIRD, LEASE_OVER)),
    scenario("kept, losses", ask("ada"), ask("bob"), ticks=1, losses=1, steps=(LEASE_OVER,)),
    scenario(
        "waiting", *(ask(name, policy=WAIT) for name in ("ada", "bob", "cyd")), crashes=1, steps=(LEASE_OVER,)
    ),
    scenario(
        "waiting in a process",
        (ask("ada", policy=WAIT), ask("bob", policy=WAIT)),
        crashes=1,
        steps=(LEASE_OVER,),
    ),
    scenario("joining", (ask("ada", policy=JOIN), ask("bob", policy=JOIN)), ask("cyd"), steps=(LEASE_OVER,)),
    scenario("joining a failure", (ask("ada", fails, policy=JOIN), ask("bob", policy=JOIN)), cancels=1),
    scenario("expiring", ask("ada"), ask("bob"), ask("cyd"), purges=1, steps=(KEEP_OVER,)),
    scenario("expiring, copies", ask("ada"), ask("bob"), copies=1, purges=1, steps=(KEEP_OVER,)),
    scenario(
        "at most once, expiring",
        *(once("ada"), once("bob")),
        retries=ONCE_AGAIN,
        copies=1,
        purges=1,
        steps=(LEASE_OVER, KEEP_OVER),
    ),
    scenario(
        "leaping clock",
        *(ask("ada"), ask("bob"), ask("cyd")),
        losses=1,
        steps=(CLOCK_LEAPS,),
        without=UNKNOWABLE,
    ),
    scenario(
        "batch", ask_for_all("ada", "ab"), ask("bob", id="a"), ask("cyd", id="b"), retries=BOTH, losses=1
    ),
    scenario(
        "batch cancelled", ask_for_all("ada", "ab"), ask("bob", id="a"), retries=BOTH, cancels=1, losses=1
    ),
    scenario(
        "batch overtaken",
        ask_for_all("ada", "ab"),
        ask("bob", id="a"),
        retries=BOTH,
        losses=1,
        steps=(LEASE_OVER,),
    ),
    scenario(
        "sweep",
        once("ada", fails),
        sweeps("bob", policy=ONCE),
        retries=ONCE_AGAIN,
        losses=1,
        steps=(LEASE_OVER,),
    ),
    by_steps("steps, crashes", ask("ada", steps), ask("bob", steps), crashes=1, steps=(LEASE_OVER,)),
    by_steps("steps, losses", ask("ada", steps), ask("bob", steps), losses=1, steps=(LEASE_OVER,)),
    by_steps("steps, copies", ask("ada", steps), ask("bob", steps), copies=1, steps=(LEASE_OVER,)),
    by_steps("steps, stumbling", ask("ada", stumbles), ask("bob", steps), losses=1, steps=(LEASE_OVER,)),
    by_steps("steps, cancelled", ask("ada", steps), ask("bob", steps), cancels=1),
    by_steps("steps, kept", ask("ada", steps), ask("bob", steps), ticks=1, steps=(LEASE_OVER,)),
    by_steps(
        "steps, at most once",
        *(once("ada", steps), once("bob", steps), settles("cyd", "not_applied")),
        retries=(once("eve", steps),),
        steps=(LEASE_OVER,),
    ),
    scenario("cache", (ask("ada", policy=CACHE), ask("bob", policy=CACHE)), ask("cyd"), steps=(KEEP_OVER,)),
]

WIDE = [
    scenario(
        "losses and copies, wide", ask("ada"), ask("bob"), ask("cyd"), losses=2, copies=1, steps=(LEASE_OVER,)
    ),
    scenario("crashes, wide", ask("ada"), ask("bob"), ask("cyd"), crashes=2, losses=1, steps=(TWO_LEASES,)),
    scenario(
        "at most once, wide",
        *(once("ada"), once("bob", fails), once("cyd")),
        retries=ONCE_AGAIN,
        crashes=1,
        losses=1,
        copies=1,
        steps=(LEASE_OVER,),
    ),
    scenario("kept, wide", ask("ada"), ask("bob"), ticks=3, losses=1, steps=(THIRD, LEASE_OVER)),
    scenario(
        "expiring, wide",
        ask("ada"),
        ask("bob"),
        ask("cyd"),
        copies=1,
        purges=1,
        steps=(LEASE_OVER, KEEP_OVER),
    ),
    scenario("cancelled, wide", ask("ada"), ask("bob"), ask("cyd"), cancels=2, losses=1, steps=(LEASE_OVER,)),
    by_steps("steps, crashes, wide", ask("ada", steps), ask("bob", steps), crashes=2, steps=(TWO_LEASES,)),
    by_steps("steps, losses, wide", ask("ada", steps), ask("bob", steps), losses=2, steps=(LEASE_OVER,)),
    by_steps(
        "steps, copies, wide",
        ask("ada", steps),
        ask("bob", stumbles),
        copies=1,
        losses=1,
        steps=(LEASE_OVER,),
    ),
    by_steps(
        "steps, cancelled, wide",
        ask("ada", steps),
        ask("bob", steps),
        cancels=1,
        losses=1,
        steps=(LEASE_OVER,),
    ),
    by_steps(
        "steps, kept, wide", ask("ada", steps), ask("bob", steps), ticks=1, losses=1, steps=(LEASE_OVER,)
    ),
    by_steps(
        "steps, expiring, wide",
        ask("ada", stumbles),
        ask("bob", steps),
        copies=1,
        purges=1,
        steps=(KEEP_OVER,),
    ),
    scenario(
        "cache, wide",
        (ask("ada", policy=CACHE), ask("bob", policy=CACHE)),
        ask("cyd"),
        steps=(ALMOST_KEEP, REST_OF_KEEP),
    ),
]
"""The same with more going wrong at a time, for ``./test --soak``."""
