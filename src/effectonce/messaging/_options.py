"""What a consumer is told, checked at once: a slip is better heard at the start than in a queue of dead letters."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._receiver import Receiver
from ..batch import DEFAULT_CONCURRENCY, DEFAULT_SIZE, MAX_SIZE, check_number
from ..errors import UsageError
from ..policy import Policy


def check(receiver: Any, options: Mapping[str, Any], dead_letter: Any, **places: Any) -> None:
    """Raise if a consumer can't be made of this. Of ``places``, the first says what it consumes."""
    if not isinstance(receiver, Receiver):  # whose text may be a URL with a password
        raise UsageError(f"A {type(receiver).__name__} is not a Receiver. Write receiver=Receiver(url).")
    sources: list[str] = []
    for word, names in places.items():
        each = [names] if isinstance(names, str) else list(names) if isinstance(names, Sequence) else [names]
        if not each or not all(isinstance(name, str) and name.strip() for name in each):
            raise UsageError(f"{word}={names!r} must be a name, a text that is not empty.")
        sources = sources or each
    if not isinstance(dead_letter, str):
        raise UsageError(f"dead_letter={dead_letter!r} must be a name, a text.")
    for source in sources:
        _check_apart(source, dead_letter)
    check_number("batch", options.get("batch", DEFAULT_SIZE), MAX_SIZE)
    check_number("concurrency", options.get("concurrency", DEFAULT_CONCURRENCY))
    check_number("max_body", options.get("max_body", 1))
    policy, decode, wanted = options.get("policy"), options.get("decode", bytes), options.get("id")
    if not (policy is None or isinstance(policy, Policy)):
        raise UsageError(f"policy={policy!r} must be a Policy.")
    if not callable(decode):
        raise UsageError(f"decode={decode!r} must be a function of a message's body.")
    if not (wanted is None or callable(wanted) or (isinstance(wanted, str) and wanted)):
        raise UsageError(
            f"id={wanted!r} must be the name of a header, or a function of the client's message."
        )


def _check_apart(source: str, dead_letter: str) -> None:
    """Raise if a consumer of ``source``, which may be a pattern of Kafka's, would get what it has put aside."""
    if not source.startswith("^"):
        if source == dead_letter:
            raise comes_back(dead_letter)
    elif not dead_letter:
        raise UsageError(
            f"{source!r} may mean the topics of dead letters, too, which would then come back for ever. Say where they "
            "go: dead_letter= a topic that it does not mean."
        )
    elif re.match(source, dead_letter):
        raise comes_back(dead_letter)


def comes_back(dead_letter: str, instead: str = "a place apart") -> UsageError:
    """What to say of a place that the consumer itself consumes."""
    return UsageError(
        f"dead_letter={dead_letter!r} is consumed by this consumer, so that what was put aside would come back for "
        f"ever. Write dead_letter= {instead}."
    )


def takes(handler: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with so many arguments, as far as can be told."""
    try:
        inspect.signature(handler).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # something built in, that does not say
        return True
    return True


def check_handler(handler: Callable[..., Any]) -> None:
    """Raise unless a handler takes a message: else every one would fail, and be put aside."""
    if not takes(handler, 1):
        raise UsageError(f"{handler!r} has to take one argument here: def handler(message).")
