"""What a simulated task waits for, what happens to it, and what it is seen to do."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Hashable
from types import coroutine
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..._attempt import STEP

if TYPE_CHECKING:
    from collections.abc import Generator

    from ..._attempt import Attempt
    from ..._receiver import Receiver


class Cancelled(BaseException):
    """What the simulated event loop throws into a cancelled task."""


class Asked(NamedTuple):
    """One key that a task asks for, and the fingerprint of what it asks."""

    key: str
    fingerprint: bytes


class Task(NamedTuple):
    """What one worker does: a coroutine function of the receiver, over its awaitable API.

    It returns an Outcome for each key in ``asks``: one, or a list in the same order. Tasks of the same ``kind`` do the
    same, so that exploring who of them comes first would only repeat itself.
    """

    name: str
    kind: Hashable
    asks: tuple[Asked, ...]
    script: Callable[[Receiver], Coroutine[Any, Any, Any]]
    remember: tuple[type[BaseException], ...] = ()
    """Errors that count as answers, because the policy records them."""
    raises: tuple[type[BaseException], ...] = ()
    """What else its handler may raise."""


# What a task can wait for.


class Command(NamedTuple):
    """A verb of the store and what it is asked."""

    verb: str
    argument: Any


class Effect(NamedTuple):
    """A write to the sink: the world outside, which knows nothing of records."""

    key: str
    name: str
    fence: int
    step: str = ""
    """The step of the handler that it is the effect of, if it has steps."""


class Pause(NamedTuple):
    """Time has to pass. A pause after a failure is short; one after "busy" is over when the store has changed."""

    until: float
    short: bool


class Wait(NamedTuple):
    """An attempt of the same process has to end, or time has to pass."""

    until: float
    over: bool


class Start(NamedTuple):
    """The task waits to be started."""

    kind: Hashable


Request = Command | Effect | Pause | Wait | Start


@coroutine
def ask(request: Any) -> Generator[Any, Any, Any]:
    """Stand still until the explorer sends the reply."""
    return (yield request)


async def effect(attempt: Attempt, name: str) -> str:
    """Write to the sink under a key derived from the attempt; "applied", "duplicate" or "stale" comes back."""
    step = STEP.get(None)
    reply: str = await ask(
        Effect(attempt.key, attempt.key_for(name), attempt.fence, "" if step is None else step.name)
    )
    return reply


async def think() -> None:
    """A moment in a handler at which anything may happen elsewhere."""
    await ask(Effect("", "", 0))


# What happens to a process, and what it is seen to do.


class Input(NamedTuple):
    """One thing that happens to a process, at a time on its local clock."""

    kind: Literal["start", "reply", "unavailable", "cancel", "interrupt", "tick"]
    slot: int
    now: float
    reply: Any = None


class Began(NamedTuple):
    """A handler was started."""

    key: str
    owner: bytes
    fence: int
    once: bool


class Reported(NamedTuple):
    """A handler returned or raised: its own word about its effect."""

    key: str
    owner: bytes


class Ended(NamedTuple):
    """A task is over."""

    slot: int
    result: Any
    error: BaseException | None
    cancelled: bool
    """Whether it was told to end early."""
    owners: tuple[tuple[str, bytes], ...]
    """The keys it asked for, and the names it used."""
    began: bool


Event = Began | Reported | Ended


class Running(NamedTuple):
    """A handler that has begun and not ended."""

    slot: int
    key: str
    owner: bytes
    fence: int
    lost_at: float
    """When it knows by its local clock that its lease is over."""
    told: bool
    interrupted: bool
    """Whether it has heard so; once is enough."""
    denied: bool
    """Whether the keeper has been denied a renewal of its lease."""
