"""The keeper: one thread that renews all leases of a receiver together, whatever its handlers are doing.

It runs beside handlers and event loops, so a blocked one can't stop it. A *denied* renewal means the attempt is
lost at once. A renewal that *errs* is tried again until the lease is about to end on the local monotonic clock.
It also carries home the endings that could not be written when their handlers finished, and gives back what the store
may have granted to callers who never heard of it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from math import inf
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from ._attempt import Attempt
from ._blocking import run
from ._records import Completion, Ending, Renewal, State
from .errors import StoreUnavailable
from .stores.base import PartlyAnswered

if TYPE_CHECKING:
    from ._records import Claim
    from .hooks import EventKind
    from .stores.base import Store

ENDED: dict[State, EventKind] = {
    State.COMPLETED: "completed", State.FAILED: "failed", State.IN_DOUBT: "in_doubt", State.ABSENT: "released",
}  # fmt: skip
"""The event that tells of an ending, by the state it leaves."""
RETRY_SHARE = 12.0
"""After an error a renewal is tried again at a twelfth of the lease."""
SOON_SECONDS = 1.0
"""How long the store is left alone, at most, before it is asked about claims whose answers were lost, or is given an
ending again that it did not take."""
MOST_UNHEARD = 1024
"""So many of these are remembered, and the others are left to their leases."""
AT_ONCE = 64
"""So many of them are given back before the leases of attempts are looked after again."""
LINGER_SECONDS = 5.0
"""How long the thread stays after its last attempt has ended."""
AGAIN_SECONDS = 0.05
"""How long it pauses after something tried to end it."""


class Keeper:
    """Knows every live attempt of one receiver, and keeps it alive.

    Whoever begins an attempt puts it into ``live`` by its owner, and calls ``rouse`` if its renewal is due before
    ``wake_at``: most are not, because the thread looks after a third of a lease anyway.
    """

    def __init__(
        self, store: Store, monotonic: Callable[[], float], tell: Callable[[EventKind, Attempt, str], None]
    ) -> None:
        self.live: dict[bytes, Attempt] = {}  # by owner
        self._unprotected: dict[str, Attempt] = {}  # by key: those that run without a claim
        self._unheard: dict[bytes, _Unheard] = {}  # by owner too
        self._store = store
        self._monotonic = monotonic
        self._tell = tell
        self.wake_at = inf
        self._wake: SimpleQueue[None] = SimpleQueue()  # whose lock an interrupted caller can't leave behind
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.closing: Callable[[], bool] | None = None
        """Since its receiver is being closed: whether a call is served all the same."""

    def forget(self, attempt: Attempt) -> None:
        """Stop renewing: the attempt has ended, or has to be left to its lease."""
        self.live.pop(attempt.claim.owner, None)

    def abandon(self, claim: Claim) -> None:
        """Whoever ran this has gone without a word: its lease ends it, unless its ending only waits to be written."""
        attempt = self.live.get(claim.owner) or self._unprotected.get(claim.key)
        if attempt is not None and attempt.claim.owner == claim.owner and attempt.unrecorded is None:
            self.forget(attempt)
            attempt.end(None)

    def enter(self, attempt: Attempt) -> bool:
        """Whether an attempt may run without a claim: not while another of this process is at its key."""
        if self.holds(attempt.key):
            return False
        return self._unprotected.setdefault(attempt.key, attempt) is attempt

    def leave(self, attempt: Attempt) -> None:
        """What ran without a claim has ended."""
        if self._unprotected.get(attempt.key) is attempt:
            del self._unprotected[attempt.key]

    def withdraw(self, claim: Claim) -> None:
        """Nobody begins with this claim, which the store may have granted all the same: then it is to be given back."""
        if len(self._unheard) < MOST_UNHEARD:
            now = self._monotonic()
            self._unheard[claim.owner] = unheard = _Unheard(claim, now)
            self.rouse(unheard.ask_at)

    def turns_away(self, attempt: Attempt) -> bool:
        """Whether an attempt that is live by now may not run, since nobody would record its end: then it is given back.

        Whoever closes looks for live attempts after it has said so, and waits for this one.
        """
        if self.closing is None or self.closing():
            return False
        key, owner, keep = attempt.claim.key, attempt.claim.owner, attempt.claim.keep
        unused = Completion(key, owner, attempt.fence, State.ABSENT, None, keep, began=False)
        self.carry(attempt, unused, pause=0.0)
        if self._closed:
            self.forget(attempt)
        return True

    def carry(self, attempt: Attempt, ending: Completion, pause: float | None = None) -> None:
        """Go on writing an ending: a process that dies before it is written leaves an effect without its record."""
        now = self._monotonic()
        attempt.unrecorded, attempt.carried_since = ending, now
        attempt.postpone(now + (_soon(attempt.claim) if pause is None else pause))
        attempt.end(None)
        self.live[attempt.claim.owner] = attempt  # also one whose lease was given up while the store was away
        self.rouse(attempt.renew_at)

    def running(self, key: str) -> Attempt | None:
        """The attempt of this process that is running for a key."""
        return next((a for a in list(self.live.values()) if a.claim.key == key and not a.ended), None)

    def holds(self, key: str) -> bool:
        """Whether an attempt of this process is at a key, or has ended it and has yet to get that written."""
        mine = [a.unrecorded for a in list(self.live.values()) if a.claim.key == key]
        return any(ending is None or ending.state is not State.ABSENT for ending in mine)

    async def tick(self, store: Store, now: float) -> float:
        """Renew what is due at ``now`` and say when to come back."""
        attempts = list(self.live.values())
        for attempt in attempts:
            if attempt.unrecorded is not None and now >= attempt.renew_at:
                await self._record(store, attempt, now)
        due = [a for a in attempts if a.unrecorded is None and now >= a.renew_at]
        for attempt in due:
            if attempt.is_stranded:
                self._strand(attempt)
        due = [a for a in due if not a.ended]
        if due:
            await self._renew(store, due, now)
        unheard = [each for each in list(self._unheard.values()) if now >= each.ask_at]
        await self._give_back(store, unheard[:AT_ONCE], now)
        moments = [attempt.renew_at for attempt in list(self.live.values())]
        moments += [each.ask_at for each in list(self._unheard.values())]
        return min(moments, default=inf)

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            self._closed = True
            self._wake.put(None)

    def before_fork(self) -> None:
        """Nothing to bring to rest: the thread simply is not there in the child."""

    def after_fork(self, *, in_child: bool) -> None:
        """The parent's attempts and thread are not the child's."""
        if in_child:
            self.live, self._unprotected, self._unheard = {}, {}, {}
            self.wake_at, self._thread = inf, None
            self._wake, self._lock = SimpleQueue(), threading.Lock()

    async def _renew(self, store: Store, due: list[Attempt], now: float) -> None:
        held: Sequence[bool | None]
        why = ""
        try:
            held = await store.renew_many(
                [Renewal(a.key, a.claim.owner, a.fence, a.claim.lease, a.claim.keep) for a in due]
            )
        except Exception as error:  # whatever a driver throws, the thread has to live on
            if len(due) > 1 and not isinstance(error, StoreUnavailable):
                for attempt in due:  # what one of them met must not cost the others their leases
                    await self._renew(store, [attempt], now)
                return
            held = error.answers if isinstance(error, PartlyAnswered) else [None] * len(due)
            why = f"the store did not answer: {error}"
        for attempt, still in zip(due, held, strict=True):
            if still is None:
                self._postpone(attempt, now, why)
            elif still:
                attempt.hold(now)
            elif attempt.ending:
                # Perhaps denied because its own ending was first; that one's answer will tell.
                self.forget(attempt)
            else:
                self.lose(attempt, "another attempt took over")

    async def _record(self, store: Store, attempt: Attempt, now: float) -> None:
        assert attempt.unrecorded is not None
        try:
            ending = await store.complete(attempt.unrecorded)
        except Exception as error:
            self._postpone(attempt, now, f"its ending could not be written: {error}")
            return
        if ending is Ending.FENCED:
            self.lose(attempt, "its ending came too late")
        else:
            self.forget(attempt)
            self._tell(ENDED[attempt.unrecorded.state], attempt, "recorded late")

    async def _give_back(self, store: Store, due: list[_Unheard], now: float) -> None:
        """Give back what was granted. A store that is away is asked once for all of them, until their leases end."""
        is_away = False
        for unheard in due:
            claim = unheard.claim
            try:
                if not is_away:
                    record = await store.get(claim.key)
                    if record is not None and record.state is State.PENDING and record.owner == claim.owner:
                        await store.release(claim.key, claim.owner, record.fence, claim.keep, began=False)
            except Exception as error:  # whatever a driver throws, the thread has to live on
                is_away = isinstance(error, StoreUnavailable)
            if not (is_away and unheard.is_asked_again(now)):
                self._unheard.pop(claim.owner, None)

    def _postpone(self, attempt: Attempt, now: float, why: str) -> None:
        claim = attempt.claim
        pause = claim.lease / RETRY_SHARE
        if attempt.unrecorded is not None:  # as long again as it has been carried: most outages are short
            pause = min(pause, max(_soon(claim), now - attempt.carried_since))
        patience = claim.keep if attempt.ending else 0.0  # an ending stays true after the lease
        if now + pause >= attempt.deadline + patience:
            self.lose(attempt, why)
        else:
            attempt.postpone(now + pause)

    def _strand(self, attempt: Attempt) -> None:
        """Nobody brings this to its end any more: its lease does, and whoever waits for it asks the store."""
        try:
            self.lose(attempt, "its event loop was closed")
        finally:
            attempt.end(None)

    def lose(self, attempt: Attempt, why: str) -> None:
        """The claim is no longer held: tell everybody."""
        self.forget(attempt)
        try:
            if not attempt.was_told:
                self._tell("lease_lost", attempt, why)  # before the handler hears it, and may end the process
        finally:
            attempt.lose()

    def rouse(self, at: float) -> None:
        """See to it that the thread looks in time for what it did not expect."""
        if at >= self.wake_at:
            return
        with self._lock:
            self.wake_at = min(self.wake_at, at)
            self._wake.put(None)
            if self._thread is None and not self._closed and not sys.is_finalizing():
                self._start()

    def _start(self) -> None:
        """Begin the thread. Where none is to be had, leases just last their time, and the next attempt tries again."""
        thread = threading.Thread(target=self._run, name="effectonce-keeper", daemon=True)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError as error:
            self.wake_at = inf
            _log().warning("leases can't be renewed for now: %s", error)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                while not self._wake.empty():
                    self._wake.get()
                left = self.wake_at - self._monotonic()
            if left > 0:
                try:
                    self._wake.get(timeout=min(left, LINGER_SECONDS))
                except Empty:
                    if self._may_leave():
                        return
                continue
            with self._lock:
                self.wake_at = inf  # an attempt that comes during the tick sets it again
            try:
                due = run(self.tick(self._store, self._monotonic()))
            except BaseException:  # a hook's sys.exit would end this thread alone, and every lease with it
                _log().exception("nothing ends the thread that renews leases")
                due = self._monotonic() + AGAIN_SECONDS
            with self._lock:
                self.wake_at = min(self.wake_at, due)

    def _may_leave(self) -> bool:
        with self._lock:
            if not self._wake.empty() or self.wake_at < inf or self.live or self._unheard:
                return False
            self._thread = None
            return True


def _log() -> Any:
    import logging  # only who has something to say pays for importing it

    return logging.getLogger("effectonce")


def _soon(claim: Claim) -> float:
    return min(SOON_SECONDS, claim.lease / RETRY_SHARE)


class _Unheard:
    """A claim whose answer nobody has heard, and when to ask for it."""

    def __init__(self, claim: Claim, now: float) -> None:
        self.claim = claim
        self._pause = _soon(claim)
        self._until = now + claim.lease
        self.ask_at = now + self._pause

    def is_asked_again(self, now: float) -> bool:
        """Whether there is time for another look before its lease is over anyway; then it will be."""
        self.ask_at = now + self._pause
        return self.ask_at < self._until
