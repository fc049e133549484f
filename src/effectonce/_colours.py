"""A colour: all that differs between callers who block (``_blocking``) and callers on an event loop (``_asyncio``).

And what both need because of it: whoever may be cancelled at any await still has to know what became of a command, so
``insist`` sends it until it is answered.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Protocol, TypeVar

from ._blocking import Gathered, Job
from .errors import StoreError, StoreUnavailable, UsageError

if TYPE_CHECKING:
    from ._attempt import Attempt
    from .stores.base import Store

T = TypeVar("T")

SENDS = 4
"""How often a command is sent. What then is still to be recorded, or given back, is left to the keeper."""


class Colour(Protocol):
    """What differs between blocking callers and callers on an event loop."""

    awaits: bool
    cancelled: tuple[type[BaseException], ...]
    """What a cancelled caller meets at any await."""
    trouble: tuple[type[BaseException], ...]
    """What any command may meet: the same, a StoreError, and the UsageError of what a store can't take."""

    @property
    def store(self) -> Store:
        """Where its commands go."""
        ...

    async def pause(self, seconds: float) -> None: ...
    async def wait(self, attempt: Attempt, seconds: float) -> None: ...
    async def attend(self, attempt: Attempt, handler: Awaitable[T]) -> T: ...
    async def apart(self, work: Awaitable[T]) -> T: ...
    async def gather(self, jobs: Sequence[Job[T]], limit: int) -> Gathered[T]: ...


async def insist(
    colour: Colour, send: Callable[[], Awaitable[T]], cancelled: BaseException | None = None
) -> tuple[T | StoreError | UsageError, BaseException | None]:
    """Send a command until it is answered, also when this task is cancelled: every verb may be sent twice.

    Gives the answer, or the error of the last try; and the cancellation that has to be heard afterwards. Whoever was
    cancelled once may be cancelled at every turn, as anyio does: from then on commands are sent where nobody does.
    """
    pause = 0.01
    for sent in count(1):
        try:
            answer = await (send() if cancelled is None else colour.apart(send()))
            return answer, cancelled
        except colour.cancelled as error:
            cancelled = error
        except (StoreError, UsageError) as error:
            if sent >= SENDS or not isinstance(error, StoreUnavailable):
                return error, cancelled
            try:
                await colour.pause(pause)
            except colour.cancelled as again:
                cancelled = again
            pause *= 4
    raise AssertionError("unreachable")
