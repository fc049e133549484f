"""Opening and closing: who shares the records, and what is left when a handle is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from ..._records import Claim, Completion, Ending, Renewal, State, Verdict
from ...errors import StoreError
from ...stores.base import Store
from ._subject import ASKED, LONG, OTHER, A, B, Subject
from ._suite import Suite

T = TypeVar("T")

VERBS: dict[str, Callable[[Store], Coroutine[Any, Any, Any]]] = {
    "claim": lambda store: store.claim(Claim("k", A, ASKED, LONG, LONG)),
    "renew": lambda store: store.renew(Renewal("k", A, 1, LONG, LONG)),
    "complete": lambda store: store.complete(Completion("k", A, 1, State.COMPLETED, b"", LONG)),
    "release": lambda store: store.release("k", A, 1, LONG),
    "get": lambda store: store.get("k"),
    "purge": lambda store: store.purge(),
    "claim_many": lambda store: store.claim_many([Claim("k", A, ASKED, LONG, LONG)]),
    "renew_many": lambda store: store.renew_many([Renewal("k", A, 1, LONG, LONG)]),
    "complete_many": lambda store: store.complete_many([Completion("k", A, 1, State.COMPLETED, b"", LONG)]),
    "scan": lambda store: store.scan(),
    "stats": lambda store: store.stats(),
}


class Lifetime(Suite):
    """A store's handles."""

    def test_a_closed_store_is_a_store_error(self, subject: Subject) -> None:
        """After close() every verb says so, each time: it neither works on quietly nor waits for ever."""
        subject.hold()
        subject.store.close()
        for name, verb in VERBS.items():
            for _ in range(2):
                with pytest.raises(StoreError):
                    subject.driver.run(self.in_time(verb(subject.verbs)))
                    pytest.fail(f"{name} still works")

    async def in_time(self, verb: Coroutine[Any, Any, T]) -> T:
        """Await a verb, on an event loop only for so long."""
        return await (verb if self.colour == "blocking" else asyncio.wait_for(verb, 5.0))

    def test_closing_twice_is_closing(self, subject: Subject) -> None:
        """close() may be called again, also on a store that was never used."""
        subject.store.close()
        subject.store.close()

    def test_a_durable_store_remembers_across_handles(self, subject: Subject) -> None:
        """What was answered is there when the store is opened again: results, claims, fences of the forgotten."""
        if not subject.store.features.durable:
            pytest.skip("the store declares durable=False")
        forgotten = subject.hold("forgotten", lease=self.lease, keep=self.keep)
        subject.complete(forgotten, keep=self.keep)
        self.forget_expired(subject, self.keep)
        subject.complete(subject.hold("done"), b"\x00result\xff")
        subject.doubt(subject.hold("in doubt", once=True))
        subject.release(subject.hold("released"))
        held = subject.hold("held")
        before = subject.scan()
        subject.store.close()
        with self.reopen(subject.clock) as store:
            again = self.speak_to(store, subject.clock, subject.driver)
            assert again.scan() == before
            assert again.claim("held", B).verdict is Verdict.BUSY
            assert again.complete(held) is Ending.DONE
            assert again.claim("done", B).verdict is Verdict.REPLAY
            assert again.claim("done", B, OTHER).verdict is Verdict.MISMATCH
            assert again.claim("in doubt", B).verdict is Verdict.IN_DOUBT
            assert again.hold("released", B).attempts == 2
            assert again.hold("forgotten", B).fence > forgotten.fence

    def test_a_shared_store_is_one_store_in_every_handle(self, subject: Subject) -> None:
        """Two handles see one another's claims, endings and purges at once."""
        if not subject.store.features.shared:
            pytest.skip("the store declares shared=False")
        with self.reopen(subject.clock) as store:
            other = self.speak_to(store, subject.clock, subject.driver)
            held = subject.hold()
            assert other.claim(owner=B).verdict is Verdict.BUSY
            assert other.get() == held
            lapsed = subject.hold("lapsed", lease=self.lease)
            assert other.get("lapsed") == lapsed
            self.outlive(other, "lapsed")
            taken = other.hold("lapsed", B)
            assert taken.fence > lapsed.fence
            assert subject.complete(lapsed) is Ending.FENCED
            assert other.complete(taken, b"B's") is Ending.DONE
            decision = subject.claim("lapsed")
            assert decision.verdict is Verdict.REPLAY
            assert decision.record == other.get("lapsed")
            forgotten = self.finish(subject, "brief")
            self.forget_expired(other, self.keep)
            assert subject.get("brief") is None
            assert subject.hold("brief").fence > forgotten.fence
            assert other.claim("brief", B).verdict is Verdict.BUSY
