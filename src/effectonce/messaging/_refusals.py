"""A broker that is away comes back; one that refuses what it is asked for, for good, is a mistake that people mend.

A wrong password, a queue that is not there, a permission that nobody gave: which errors are such refusals its adapter
knows (``Broker.refuses``), and where that is not certain they are none. Even then one may pass, because the server has
not read its users yet, or has lost sight of who knows them. So a refusal is believed when it is all that is heard for
a while, and only by a consumer that has never got as far. What has worked before is tried again for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Literal

from ..errors import UsageError

BELIEVED_SECONDS: Final = 30.0
"""For how long there has to be nothing but refusals."""

Stage = Literal["fetch", "settle"]
WANTED: Final[dict[Stage, str]] = {
    "fetch": "give any messages",
    "settle": "take an acknowledgement or a dead letter",
}

log = logging.getLogger("effectonce.messaging")


class Refusals:
    """Hears what a broker's client raises, and raises what is not going to pass."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self.stage: Stage = "fetch"
        """What is being tried."""
        self._done: set[Stage] = set()
        self._since: dict[Stage, float] = {}

    def passed(self) -> None:
        """What was tried was done."""
        self._done.add(self.stage)

    def hear(self, error: Exception, *, refused: bool) -> None:
        """Tell of an error. Raises ``UsageError`` if nothing but refusals came of this for a while, and never more."""
        told = f"{type(error).__name__}: {error}"
        if not refused:
            self._since.clear()
            log.warning("the broker can't be reached: %s", told)
            return
        log.warning("the broker refuses: %s", told)
        now = self._monotonic()
        if self.stage not in self._done and now - self._since.setdefault(self.stage, now) >= BELIEVED_SECONDS:
            raise UsageError(
                f"The broker does not {WANTED[self.stage]}, and that will not change by itself: {told}. Look at the "
                "user and the password, at what that user may do, and at the names of what is consumed and of where "
                "dead letters go. Nothing is lost: what was not acknowledged comes again."
            ) from error
