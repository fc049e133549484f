"""Who takes part in the explorations: workers, what their handlers do, and how long things last."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from effectonce import Message, NotApplied, Policy, Receiver, current, keys
from effectonce.testing.simulation import Asked, Step, Task, effect, think

LEASE, KEEP = 30.0, 600.0

THIRD = Step("a third of the lease", LEASE / 3, LEASE / 3)
LEASE_OVER = Step("the lease is over", LEASE + 1, LEASE + 1)
KEEP_OVER = Step("everything expires", KEEP + LEASE + 70, KEEP + LEASE + 70)
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

Handler = Callable[[Message], Awaitable[str]]


def result(message: Message) -> str:
    """Different for every attempt, so that nobody's result passes for another's."""
    return f"done with fence {current().fence} for {message.payload}"


async def charges(message: Message) -> str:
    """Does one effect and says so."""
    await effect(current(), "charge")
    return result(message)


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
    name: str, handler: Handler = charges, *, policy: Policy = RETRY, payload: str = "5 EUR", id: str = "k"
) -> Task:
    """A worker that processes one message."""
    message = Message(id, payload)

    async def script(receiver: Receiver) -> Any:
        return await receiver.aprocess(message, handler, policy=policy)

    kind = (handler.__name__, policy, payload, id)
    return Task(name, kind, (asked(message),), script, policy.remember)


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


def asked(message: Message) -> Asked:
    """The key and fingerprint that a receiver gives a message."""
    return Asked(keys.prefix("", "message") + message.id, keys.fingerprint(message.payload))
