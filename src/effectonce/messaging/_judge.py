"""Verdicts, told to whoever listens: what ``_delivery`` decides, with the watchdog, the log and the events."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from .._messages import Outcome
from ._delivery import Ack, DeadLetter, Delivery, Nack, Pace, Verdict, Watchdog, decide, named

if TYPE_CHECKING:
    from .._receiver import Receiver
    from ..policy import Policy

MOST_SEEN: Final = 10_000
"""Messages that are to come again, of which it is remembered when they were first seen."""

log = logging.getLogger("effectonce.messaging")


class Judge:
    """Decides what to tell a broker, under one policy. ``consumer`` names who consumes, if the receiver does not."""

    def __init__(
        self,
        receiver: Receiver,
        policy: Policy,
        pace: Pace,
        watchdog: Watchdog | None = None,
        consumer: str = "",
    ) -> None:
        self._receiver, self._policy, self._pace = receiver, policy, pace
        self._consumer = receiver.consumer or consumer
        self._watchdog = watchdog or Watchdog()
        self._seen: dict[str, float] = {}

    def verdict(self, delivery: Delivery, outcome: Outcome[Any] | DeadLetter) -> Verdict:
        """What to tell the broker of a delivery that had this outcome, or was not even admitted."""
        if isinstance(outcome, DeadLetter):
            return self.heard(delivery, outcome)
        verdict = decide(outcome, self._policy, self._pace, delivery.times)
        if type(verdict) is Ack and delivery.times <= 1:  # nearly every message: it tells nothing of ids
            return verdict
        warning = self._watchdog.hear(delivery, outcome, verdict, self._receiver.flow.monotonic())
        if warning:
            log.error("%s", warning)
            self._receiver.flow.tell("unstable_id", "", detail=warning)
        if isinstance(verdict, DeadLetter):
            return self.heard(delivery, verdict)
        if delivery.timestamp is None:
            self._note(delivery, comes_again=isinstance(verdict, Nack))
        return verdict

    def heard(self, delivery: Delivery, letter: DeadLetter) -> DeadLetter:
        """Tell of a dead letter; the letter with who gave it up."""
        log.warning("dead letter from %s: %s: %s", delivery.source, letter.reason, letter.detail)
        events = self._receiver.events
        events.note("dead_letter", self._receiver.flow.monotonic())
        events.tell("dead_letter", named(delivery), attempt=letter.attempts, detail=letter.reason)
        first_seen = self._seen.pop(named(delivery), self._receiver._clock())
        return letter._replace(consumer=self._consumer, first_seen=first_seen)

    def _note(self, delivery: Delivery, *, comes_again: bool) -> None:
        """Remember when a message was first seen whose sender does not tell when it was sent."""
        name = named(delivery)
        if not comes_again:
            self._seen.pop(name, None)
        elif name not in self._seen:
            if len(self._seen) >= MOST_SEEN:
                del self._seen[next(iter(self._seen))]
            self._seen[name] = self._receiver._clock()
