"""The barrier between an action and its compensation, for where both may be under way at once or out of order.

A worker that was paused may still run an action while its successor compensates it. Behind a barrier it does not
matter who comes first: a compensation that comes before its action is recorded and does nothing, the action that comes
after it is refused, and repeats of either do nothing. Two keys are enough: the action's, which the compensation closes
for good if it finds it open, and the compensation's own.

Over ``receiver.on(connection)`` this is exact, since closing the door and what is behind it commit together. Over the
receiver's own store a door that was left half-open (its worker died) may hide an effect: then the compensation runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from .. import keys
from .._answers import Call, call_of
from .._attempt import current
from .._blocking import run
from ..errors import AlreadyUndone, UsageError
from ._driver import HERE

if TYPE_CHECKING:
    from .._colours import Colour
    from .._messages import Outcome
    from .._receiver import Receiver

R = TypeVar("R")

ACTION, COMPENSATION = "barrier", "barrier:undo"


class Barrier:
    """``Barrier(receiver, id)``: between the action and the compensation that know it by the same id.

    receiver  where the doors are; ``receiver.on(connection)`` makes them part of your transaction
    id        names the action: the same in both places, such as "order 7: reserve"
    """

    def __init__(self, receiver: Receiver, id: str, *, scope: str | None = None) -> None:
        self._receiver, self._id = receiver, id
        self._scope = receiver.scope if scope is None else scope
        self._policy = receiver.policy.but(
            on_crash="retry",
            remember=(AlreadyUndone,),
            in_doubt=(),
            max_attempts=None,
            fallback="closed",
            store_result=True,
        )

    def act(self, action: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Run an action once. Raises ``AlreadyUndone`` if its compensation has come before it."""
        return cast("R", run(self._act(self._receiver.blocking, action, args, kwargs)))

    async def aact(self, action: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``act`` on an event loop."""
        return await self._act(self._receiver.asyncio, action, args, kwargs)

    def undo(self, compensation: Callable[..., R], *args: Any, **kwargs: Any) -> R | None:
        """Run a compensation once, if its action has happened; after this the action never does."""
        return cast("R | None", run(self._undo(self._receiver.blocking, compensation, args, kwargs)))

    async def aundo(self, compensation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``undo`` on an event loop."""
        return await self._undo(self._receiver.asyncio, compensation, args, kwargs)

    async def _act(self, colour: Colour, action: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        outcome = await self._receiver.flow.run(colour, self._call(ACTION), action, args, kwargs)
        return outcome.unwrap().value

    async def _undo(self, colour: Colour, compensation: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not await self._may_have_happened(colour):
            return None
        outcome = await self._receiver.flow.run(colour, self._call(COMPENSATION), compensation, args, kwargs)
        return outcome.unwrap().value

    async def _may_have_happened(self, colour: Colour) -> bool:
        """Close the door of the action, if it is open, and say whether the action came through before."""
        closed: Outcome[Any] = await self._receiver.flow.run(colour, self._call(ACTION), self._close, (), {})
        if isinstance(closed.error, AlreadyUndone):
            return closed.error.may_have_happened
        closed.unwrap()
        return True

    def _close(self) -> None:
        attempt = current()
        raise AlreadyUndone(
            "The compensation of this action has come before it, so it is refused for good.",
            key=attempt.key,
            may_have_happened=attempt.guarantee != "atomic" and attempt.number > 1,
        )

    def _call(self, operation: str) -> Call:
        key = keys.Key.of(self._id, operation, self._scope)
        return call_of(key.text, b"", self._policy)


def barrier(receiver: Receiver) -> Barrier:
    """The barrier of the step that is running here: use it in an action and in its compensation."""
    here = HERE.get(None)
    if here is None:
        raise UsageError("barrier(…) works inside a saga's steps. Elsewhere name it: Barrier(receiver, id).")
    return Barrier(receiver, keys.derived(here.key, here.step))
