"""Stores whose callers on an event loop are many: the usual command needs no coroutine for each of them.

It is one step: send it, wait, decide by the answer. As coroutines, with the circuit's watch around them, these are
three, one in the other, and each costs a crowd about as much as taking in its answers does. So such a store offers the
parts, and whoever asks makes one generator of them.
"""

from __future__ import annotations

from typing import Any

from .._records import Claim, Completion, Decision, Ending
from ._waiters import Waiter
from .base import Store


class CrowdStore(Store):
    """A store for event loops that offers its usual commands in parts."""

    def claim_soon(self, claim: Claim) -> Waiter[Any] | None:
        """Have a claim sent together with others: here is its answer, one day. None: ask for it by ``claim``."""
        raise NotImplementedError

    def decided(self, claim: Claim, answer: Any) -> Decision | None:
        """What the answer has decided; None if there is more to do."""
        raise NotImplementedError

    async def claim_on(self, claim: Claim, answer: Any) -> Decision:
        """Do what more there is."""
        raise NotImplementedError

    def end_soon(self, completion: Completion) -> Waiter[Any] | None:
        """Have a completion sent together with others, likewise."""
        raise NotImplementedError

    def ended(self, completion: Completion, answer: Any) -> Ending | None:
        """What the answer has decided; None if there is more to do."""
        raise NotImplementedError

    async def end_on(self, completion: Completion, answer: Any) -> Ending:
        """Do what more there is."""
        raise NotImplementedError
