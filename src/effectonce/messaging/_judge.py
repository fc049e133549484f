"""Verdicts, told to whoever listens: what ``_delivery`` decides, with the watchdog, the log and the events."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from .._messages import Outcome
from ._delivery import Ack, DeadLetter, Delivery, Pace, Verdict, Watchdog, decide, named

if TYPE_CHECKING:
    from .._receiver import Receiver
    from ..policy import Policy

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
        return self.heard(delivery, verdict) if isinstance(verdict, DeadLetter) else verdict

    def heard(self, delivery: Delivery, letter: DeadLetter) -> DeadLetter:
        """Tell of a dead letter; the letter with who gave it up."""
        log.warning("dead letter from %s: %s: %s", delivery.source, letter.reason, letter.detail)
        events = self._receiver.events
        events.note("dead_letter", self._receiver.flow.monotonic())
        events.tell("dead_letter", named(delivery), attempt=letter.attempts, detail=letter.reason)
        return letter._replace(consumer=self._consumer)
