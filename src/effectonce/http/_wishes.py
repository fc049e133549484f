"""What a handler says of its own answer while it runs: for how long it is remembered, or that nothing happened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from .._durations import Duration, seconds
from ..errors import NotApplied, UsageError


class Wish:
    """What a handler has said about its own answer. Most say nothing, which costs nothing."""

    store = True
    nothing_happened = False
    keep: float | None = None
    raised: Exception | None = None


WISH: ContextVar[Wish] = ContextVar("effectonce_wish")


def remember(*, store: bool | None = None, keep: Duration | None = None) -> None:
    """Say inside a handler how its answer is remembered: for how long, or without what it says (``store=False``)."""
    wish = _wish()
    if store is not None:
        wish.store = store
    if keep is not None:
        wish.keep = seconds(keep, "keep")


def no_store() -> None:
    """Say inside a handler that only it is to know its answer: a repeat is told that it was done, and no more."""
    remember(store=False)


def nothing_happened() -> None:
    """Say inside a handler that it had no effect, whatever it answers: a retry may run."""
    _wish().nothing_happened = True


def raised(error: BaseException | None) -> None:
    """Tell that the handler raised, where a framework makes an answer of it: the policy may know its type."""
    wish = WISH.get(None)
    if wish is not None and isinstance(error, Exception):
        wish.raised = error
        wish.nothing_happened |= isinstance(error, NotApplied)


@contextmanager
def unheard() -> Iterator[None]:
    """Where a request passes that need not have a key: what its handler says of its answer is no mistake."""
    token = WISH.set(Wish())
    try:
        yield
    finally:
        WISH.reset(token)


def _wish() -> Wish:
    try:
        return WISH.get()
    except LookupError:
        raise UsageError("This works only inside a handler behind effectonce's HTTP boundary.") from None
