"""What every store in a SQL database has to show, beside the contract of all stores: connections, locks, faults.

``class TestMine(SqlStories)`` and ``class TestFaults(SqlFaultStories)`` run the stories. They need the fixtures
``place`` (a ``SqlPlace``), ``colour`` (whoever calls) and ``driver`` (what event loops may be served by).
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, ClassVar

import pytest
from tests.integration.sql_places import (
    LONG,
    Colour,
    Effects,
    SqlPlace,
    claim_of,
    claim_together,
    ending_of,
    granted,
)
from tests.integration.sqlite_helpers import CLOSED_IN_THE_MIDDLE, TOLD_OF_CLOSED_LOOPS, output_of
from tests.servers import Server
from tests.servers.proxy import FaultProxy

from effectonce import Message, Outcome, Policy, Receiver
from effectonce._blocking import run
from effectonce._records import Claim, Decision, Ending, Renewal, Verdict
from effectonce.errors import StoreMismatch, StoreUnavailable, UsageError
from effectonce.stores._steps import Kept
from effectonce.stores.base import PartlyAnswered
from effectonce.testing.clocks import wait_until

Place = SqlPlace[Any]
PATIENT = Policy(lease=2.0, keep="1h", wait=20.0)


class SqlStories:
    """What it says of mistakes, its round trips and its connections."""

    lanes: ClassVar[int]
    """Round trips of an event loop that may be on their way at once."""
    loop_connections: ClassVar[int]
    """How many connections its usual callers take."""
    unfit: ClassVar[Claim]
    """A claim that this server can't hold."""

    def leave_purges(self, store: Any) -> None:
        """Have no purge go beside the traffic of event loops, where one does."""

    def test_a_server_that_is_away(self, place: Place, colour: Colour) -> None:
        """Nobody listens: it can be tried again, and the message names the place."""
        with FaultProxy(place.admin_url) as proxy, place.store(proxy.url, colour.driver) as store:
            proxy.refuse()
            for _ in range(2):
                with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{proxy.port}") as caught:
                    colour.run(colour.of(store).claim(claim_of()))
            assert caught.value.retry_after > 0
            proxy.heal()
            assert colour.run(colour.of(store).claim(claim_of())).verdict is Verdict.CLAIMED

    def test_a_newer_schema(self, place: Place) -> None:
        """A table that a newer effectonce made is not touched by an older one."""
        with place.store() as store:
            run(store.migrate())
        place.describe("effectonce schema 2: something else")
        with place.store() as store, pytest.raises(StoreMismatch, match=r"schema 2.*newer"):
            run(store.claim(claim_of()))

    def test_a_dropped_table(self, place: Place) -> None:
        """Without its table the store knows nothing; it says so instead of beginning anew."""
        with place.store() as store, place.session() as session:
            run(store.claim(claim_of()))
            session(f"DROP TABLE {place.table}")
            for verb in (store.claim(claim_of()), store.get("k")):
                with pytest.raises(StoreMismatch, match="who dropped it"):
                    run(verb)

    def test_a_receiver_takes_two_round_trips_and_one(self, place: Place) -> None:
        """Nothing between a message and the store adds to them."""
        with FaultProxy(place.admin_url) as proxy, Receiver(place.url(proxy.url)) as receiver:
            for _ in range(2):
                receiver.process(Message("warm up"), lambda message: 1)
            before = proxy.bursts
            assert receiver.process(Message("m"), lambda message: 1).status == "executed"
            new, before = proxy.bursts - before, proxy.bursts
            assert receiver.process(Message("m"), lambda message: 1).status == "replayed"
            assert (new, proxy.bursts - before) == (2, 1)

    def test_callers_at_the_same_moment_share_round_trips(self, place: Place) -> None:
        """64 tasks that ask in one turn of the loop go in a few packets, over a few connections."""

        async def crowd() -> list[Any]:
            verbs = store.for_asyncio()
            return await asyncio.gather(*(verbs.claim(claim_of(f"key {number}")) for number in range(64)))

        with (
            FaultProxy(place.admin_url) as proxy,
            place.store(proxy.url) as store,
            asyncio.Runner() as runner,
        ):
            self.leave_purges(store)
            for _ in range(2):
                runner.run(crowd())
            before = proxy.bursts
            assert {decision.verdict for decision in runner.run(crowd())} == {Verdict.BUSY}
            assert proxy.bursts - before <= self.lanes
            assert proxy.connections <= self.loop_connections

    # Failures stay with those they belong to

    def test_a_failing_claim_fails_its_own_caller_only(self, place: Place, driver: str) -> None:
        """Of many who share a packet, the one that is refused is the only one to hear of it."""
        claims = [claim_of(f"key {number}") for number in range(20)]
        claims[7], claims[13] = self.unfit, claim_of("\ud800")
        with place.store(driver=driver) as store:
            for number, answer in enumerate(claim_together(store, claims)):
                if number in (7, 13):
                    assert isinstance(answer, UsageError)
                else:
                    assert answer.verdict is Verdict.CLAIMED
            assert run(store.stats()).keys == 18

    def test_one_key_in_all_the_steps_of_a_round_trip(self, place: Place) -> None:
        """Callers who know nothing of each other may want different things of one key at the same moment."""
        with place.store() as store:
            verbs = store.for_asyncio()

            async def crowd() -> list[Any]:
                held = granted(await verbs.claim(claim_of("k")))
                renewal = Renewal("k", held.owner, held.fence, LONG, LONG)
                ending = ending_of(await verbs.claim(claim_of("k", held.owner)))
                wishes = [
                    verbs.get("k"), verbs.renew(renewal), verbs.claim(claim_of("k")), verbs.complete(ending),
                    verbs.claim(claim_of("j")), verbs.claim(claim_of("j")), verbs.complete(ending), verbs.get("k"),
                ]  # fmt: skip
                return list(await asyncio.gather(*wishes))

            _, _, known, first, mine, yours, second, _ = asyncio.run(crowd())
            assert known.verdict in (Verdict.BUSY, Verdict.REPLAY)
            assert sorted((first.name, second.name)) == ["DONE", "REPEATED"]
            assert {mine.verdict, yours.verdict} == {Verdict.CLAIMED, Verdict.BUSY}

    # Connections

    def test_a_connection_that_the_server_ended_is_replaced(self, place: Place, colour: Colour) -> None:
        """What ends connections that nobody uses, an administrator, a time-out or a restart, is not noticed."""
        with place.store(driver=colour.driver) as store:
            verbs = colour.of(store)
            decision = colour.run(verbs.claim(claim_of()))
            place.end(place.connections())
            wait_until(lambda: not place.connections(), what="The end of the connections")
            assert colour.run(verbs.complete(ending_of(decision))) is Ending.DONE

    def test_loops_have_connections_of_their_own(self, place: Place, driver: str) -> None:
        """Loops in several threads at once, and one loop after another; what a loop held is closed when it ends."""
        with place.store(driver=driver) as store:
            verbs = store.for_asyncio()

            async def work(name: str) -> set[Ending]:
                async def one(number: int) -> Ending:
                    ending: Ending = await verbs.complete(
                        ending_of(await verbs.claim(claim_of(f"{name} {number}")))
                    )
                    return ending

                return set(await asyncio.gather(*map(one, range(16))))

            with ThreadPoolExecutor(4) as threads:
                answers = list(threads.map(lambda name: asyncio.run(work(name)), "abcd"))
            assert answers == [{Ending.DONE}] * 4
            wait_until(lambda: not place.connections(), what="The end of the connections")
            for name in "efg":
                assert asyncio.run(work(name)) == {Ending.DONE}
            wait_until(lambda: not place.connections(), what="The end of the connections")
            assert run(store.stats()).by_state == {"COMPLETED": 7 * 16}

    def test_a_loop_that_was_closed_in_the_middle_is_its_own_trouble(self, place: Place, driver: str) -> None:
        """Closed while a call is under way, and never shut down: nobody on another loop fails for it, nor a close."""
        assert output_of(CLOSED_IN_THE_MIDDLE, place.url(driver=driver)) == TOLD_OF_CLOSED_LOOPS

    def test_cancelled_callers_harm_nobody(self, place: Place, driver: str) -> None:
        """Alone or in a crowd, before or after the packet left: others are answered, and so is whoever comes next."""

        async def crowd() -> None:
            verbs = store.for_asyncio()
            for turn in range(30):
                tasks = [
                    asyncio.ensure_future(verbs.claim(claim_of(f"{turn} {number}"))) for number in range(8)
                ]
                for _ in range(turn % 10):
                    await asyncio.sleep(0)
                for task in tasks[::2]:
                    task.cancel()
                answers = await asyncio.gather(*tasks, return_exceptions=True)
                assert {answer.verdict for answer in answers[1::2]} == {Verdict.CLAIMED}
                alone = asyncio.ensure_future(verbs.claim(claim_of(f"{turn} alone")))
                for _ in range(turn % 10):
                    await asyncio.sleep(0)
                alone.cancel()
                await asyncio.wait([alone])
                assert (await verbs.claim(claim_of(f"{turn} next"))).verdict is Verdict.CLAIMED
            assert len(place.connections()) <= self.loop_connections + 1

        with place.store(driver=driver) as store:
            asyncio.run(crowd())
            wait_until(lambda: not place.connections(), what="The end of the connections")

    def test_closing_ends_all_connections(self, place: Place) -> None:
        """Those of threads and those of a loop that goes on, which hears of it on its own thread."""
        store = place.store()
        run(store.claim(claim_of()))

        async def close_from_elsewhere() -> None:
            verbs = store.for_asyncio()
            await verbs.claim(claim_of())
            await asyncio.to_thread(store.close)
            for verb in (verbs.claim(claim_of()), verbs.stats(), verbs.now()):
                with pytest.raises(StoreUnavailable, match="closed"):
                    await verb
            await asyncio.to_thread(wait_until, lambda: not place.connections())

        asyncio.run(close_from_elsewhere())
        with pytest.raises(StoreUnavailable, match="closed"):
            run(store.claim(claim_of()))

    # Exactness

    def test_times_come_back_exactly(self, place: Place) -> None:
        """The record in an answer is the one in the table to the last bit, whatever lease and keep are."""
        chance = random.Random(5)
        with place.store() as store:
            claims = [
                claim_of(f"key {number}")._replace(
                    lease=chance.choice(
                        (0.1, 1 / 3, 1e-6, 86400.0, chance.random(), chance.random() * 1e6, 7)
                    ),
                    keep=chance.choice((0.3, 2 / 3, 1e9, chance.random() * 1e7, 30)),
                )
                for number in range(500)
            ]
            decisions = run(store.claim_many(claims))
            for claim, decision in zip(claims, decisions, strict=True):
                assert run(store.get(claim.key)) == decision.record
            again = run(store.claim_many(claims))
            assert [decision.record for decision in again] == [run(store.get(claim.key)) for claim in claims]

    def test_whole_life_through_a_receiver(self, place: Place, colour: Colour) -> None:
        """The store as users have it: by URL, in both colours, with a policy."""
        effects = Effects()
        with Receiver(place.url(driver=colour.driver), policy=Policy(keep="1h")) as receiver:
            first, again = (colour.process(receiver, Message("m"), effects) for _ in range(2))
        assert (first.status, again.status, again.value) == ("executed", "replayed", "receipt of m")
        assert effects.runs == {"m": 1}


def show_a_batch_done_in_part(place: Place, colour: Colour) -> None:
    """Of a batch, each caller hears whether what was done was its own."""
    with place.store(driver=colour.driver) as store:
        ours = colour.of(store)
        decisions = colour.run(ours.claim_many([claim_of(f"key {number}") for number in range(6)]))
        held = [granted(decision) for decision in decisions]
        endings = [ending_of(decision, decision.record.key.encode()) for decision in decisions]
        colour.run(ours.complete(endings[1]))
        colour.run(ours.complete(endings[2]._replace(result=b"otherwise")))
        endings[3] = endings[3]._replace(fence=held[3].fence + 1)
        endings[4] = endings[4]._replace(key="unknown")
        renewals = [Renewal(ending.key, ending.owner, ending.fence, LONG, LONG) for ending in endings]
        assert colour.run(ours.renew_many(renewals)) == [True, False, False, False, False, True]
        done, repeated, fenced = Ending.DONE, Ending.REPEATED, Ending.FENCED
        assert colour.run(ours.complete_many(endings)) == [done, repeated, fenced, fenced, fenced, done]
        again = [repeated, repeated, fenced, fenced, fenced, repeated]
        assert colour.run(ours.complete_many(endings)) == again
        assert colour.run(ours.get("unknown")) is None


class SqlFaultStories:
    """A server that is killed, cut off, hung or locked: one effect and one answer for every key, nothing stuck."""

    server: ClassVar[str]
    """What to start."""
    commands: ClassVar[int]
    """At least so many packets are sent in a message's life, that of its repetition included."""

    def test_keys_that_an_open_transaction_has_are_in_nobodys_way(self, place: Place, colour: Colour) -> None:
        """However many duplicates wait for them, another key is claimed, renewed and ended meanwhile."""
        show_held_keys_in_nobodys_way(place, colour)

    def test_a_batch_of_which_an_open_transaction_has_many_keys(self, place: Place, colour: Colour) -> None:
        """These are busy, the others are claimed; also in the next moment, when nobody asks for a lock."""
        with place.store(driver=colour.driver) as store, place.session() as holder:
            verbs = colour.of(store)
            colour.run(verbs.claim(claim_of("other")))
            place.hold(holder, *HELD_KEYS)
            for turn in range(2):
                keys = [
                    key for number, held in enumerate(HELD_KEYS) for key in (held, f"new {turn} {number}")
                ]
                decisions = colour.run(verbs.claim_many([claim_of(key) for key in keys]))
                assert [decision.verdict for decision in decisions] == [Verdict.BUSY, Verdict.CLAIMED] * 40
            holder("COMMIT")
            decisions = colour.run(verbs.claim_many([claim_of(key) for key in HELD_KEYS]))
            assert all(decision.record is not None for decision in decisions)

    def test_a_released_key_that_an_open_transaction_has(
        self, place: Place, colour: Colour, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is there to be seen, and busy all the same; whoever asks when the transaction is undone gets it."""
        with place.store(driver=colour.driver) as store, place.session() as holder:
            verbs = colour.of(store)
            held = granted(colour.run(verbs.claim(claim_of("k"))))
            colour.run(verbs.release("k", held.owner, held.fence, LONG))
            place.lock(holder, "k")
            for _ in range(2):  # who comes later only looks
                assert colour.run(verbs.claim(claim_of("k"))).verdict is Verdict.BUSY
            decisions = colour.run(verbs.claim_many([claim_of(key) for key in ("a", "k", "z")]))
            assert [decision.verdict.name for decision in decisions] == ["CLAIMED", "BUSY", "CLAIMED"]
            holder("ROLLBACK")
            monkeypatch.setattr(Kept, "__contains__", lambda *_: False)  # a second later
            assert colour.run(verbs.claim(claim_of("k"))).verdict is Verdict.CLAIMED

    def test_a_lease_that_an_open_transaction_has_taken_over(self, place: Place, colour: Colour) -> None:
        """Its own renewal has no answer; the leases that were renewed with it are known to be."""
        with place.store(driver=colour.driver) as store, place.session() as holder:
            verbs = colour.of(store)
            held = [granted(colour.run(verbs.claim(claim_of(key)))) for key in ("a", "k", "z")]
            place.lock(holder, "k")
            renewals = [Renewal(each.key, each.owner, each.fence, LONG, LONG) for each in held]
            with pytest.raises(PartlyAnswered) as raised:
                colour.run(verbs.renew_many(renewals))
            assert raised.value.answers == [True, None, True]
            holder("ROLLBACK")
            assert colour.run(verbs.renew_many(renewals)) == [True] * 3

    def test_killed_and_restarted_in_the_middle_of_traffic(
        self, start_server: Callable[..., Server], colour: Colour
    ) -> None:
        """SIGKILL while 16 callers are at work: what was answered stays, and every key ends with one answer."""
        server = start_server(self.server)
        effects, answers = Effects(), dict[str, Any]()
        ids = [f"id {number}" for number in range(160)]

        def kill_twice() -> None:
            for share in (40, 100):
                wait_until(lambda share=share: len(answers) >= share, seconds=60)
                server.kill()
                server.restart()

        url = server.url.replace("://", f"{colour.driver}://", 1)
        with Receiver(url, policy=PATIENT, breaker=None) as receiver, ThreadPoolExecutor(1) as killer:
            killing = killer.submit(kill_twice)
            process_all(colour, receiver, ids, effects, answers)
            killing.result()
            assert answers == {id: f"receipt of {id}" for id in ids}
            for id in ids:
                replay = receiver.process(Message(id), effects.handle)
                assert (replay.status, replay.value) == ("replayed", answers[id])
        # A run whose ending could not be told in time is taken over; nobody runs twice for any other reason.
        assert sum(effects.runs.values()) <= len(ids) + 2 * 16

    @pytest.mark.parametrize("lose", ["request", "reply"])
    def test_cut_before_or_after_each_command(self, place: Place, lose: str, colour: Colour) -> None:
        """Whichever packet of a message's life is lost, on its way there or back: one run, one answer, one record."""
        effects = Effects()
        with FaultProxy(place.admin_url) as proxy:
            for nth in range(1, 40):
                with Receiver(place.url(proxy.url, colour.driver), policy=PATIENT, breaker=None) as receiver:
                    getattr(proxy, f"lose_{lose}")(nth)
                    fired = proxy.fired
                    message = Message(f"{lose} {nth}")
                    ask = partial(colour.process, receiver, message, effects)
                    assert until_answered(ask).value == f"receipt of {message.id}"
                    assert until_answered(ask).status == "replayed"
                    assert effects.runs[message.id] == 1
                    was_fired = proxy.fired > fired
                    proxy.heal()
                if not was_fired:
                    break
            assert nth > self.commands

    def test_a_lost_reply_to_a_step_is_repaired_at_once(self, place: Place) -> None:
        """Every verb sent again after its reply was lost says what it would have said; a held line hides that."""
        with FaultProxy(place.admin_url) as proxy, place.store(proxy.url) as store:
            claim = claim_of("k")
            run(store.now())
            proxy.lose_reply()
            first = granted(run(store.claim(claim)))
            assert run(store.get("k")) == first
            proxy.lose_reply()
            assert run(store.renew(Renewal("k", first.owner, first.fence, 60.0, 60.0))) is True
            proxy.lose_reply()
            ending = ending_of(run(store.claim(claim)))
            proxy.lose_reply()
            assert run(store.complete(ending)) in (Ending.DONE, Ending.REPEATED)
            assert proxy.fired == 4
            assert run(store.claim(claim_of("k"))).verdict is Verdict.REPLAY

    def test_a_hung_server_does_not_hold_up_the_loop(self, place: Place, driver: str) -> None:
        """Others on the loop go on while the store's callers wait, and each of those gets its error."""

        async def wait_and_count() -> int:
            verbs = store.for_asyncio()
            await verbs.claim(claim_of("before"))
            proxy.stall()
            claims = [asyncio.ensure_future(verbs.claim(claim_of(f"key {number}"))) for number in range(8)]
            turns = 0
            while not all(claim.done() for claim in claims):
                await asyncio.sleep(0.001)
                turns += 1
            assert all(isinstance(claim.exception(), StoreUnavailable) for claim in claims)
            return turns

        with FaultProxy(place.admin_url) as proxy, place.store(proxy.url, driver, timeout=1.5) as store:
            assert asyncio.run(wait_and_count()) > 20

    # Locks

    def test_a_record_that_stays_locked(self, place: Place) -> None:
        """Patience ends with the time-out; afterwards the same command is done."""
        with place.store(timeout=1.5) as store, place.session() as holder:
            decision = run(store.claim(claim_of("k")))
            place.lock(holder, "k")
            with pytest.raises(StoreUnavailable, match="lock"):
                run(store.complete(ending_of(decision)))
            assert run(store.claim(claim_of("other"))).verdict is Verdict.CLAIMED
            holder("ROLLBACK")
            assert run(store.complete(ending_of(decision))) is Ending.DONE

    # Everybody at once

    def test_64_workers_on_one_key(self, place: Place, colour: Colour) -> None:
        """Eight stores with eight callers each want one effect: one runs, all get its answer."""
        effects, url = Effects(), place.url(driver=colour.driver, **place.narrow)
        with ExitStack() as stack:
            receivers = [stack.enter_context(Receiver(url, policy=PATIENT, breaker=None)) for _ in range(8)]
            barrier = threading.Barrier(64)

            def work(number: int) -> Any:
                barrier.wait()
                return receivers[number % 8].process(Message("m"), effects.handle).value

            async def crowd() -> list[Any]:
                calls = [
                    receivers[number % 8].aprocess(Message("m"), effects.ahandle) for number in range(64)
                ]
                return [outcome.value for outcome in await asyncio.gather(*calls)]

            if colour.awaits:
                answers = colour.run(crowd())
            else:
                with ThreadPoolExecutor(64) as threads:
                    answers = list(threads.map(work, range(64)))
            assert answers == ["receipt of m"] * 64
        assert effects.runs == {"m": 1}


def until_answered(ask: Callable[[], Outcome[Any]], seconds: float = 60.0) -> Outcome[Any]:
    """Ask as a caller does whose store comes and goes: again with the same key."""
    answers: list[Outcome[Any]] = []

    def is_answered() -> bool:
        with suppress(StoreUnavailable):
            answers.append(ask())
        return bool(answers)

    wait_until(is_answered, seconds=seconds, what="An answer")
    return answers[0]


def process_all(
    colour: Colour,
    receiver: Receiver,
    ids: list[str],
    effects: Effects,
    answers: dict[str, Any],
    threads: int = 16,
) -> None:
    """Have messages processed by 16 callers, or fewer threads, whose store comes and goes."""
    left = list(ids)

    def process(id: str) -> None:
        answers[id] = until_answered(lambda: receiver.process(Message(id), effects.handle)).value

    async def caller() -> None:
        while left:
            id = left.pop()
            while id not in answers:
                try:
                    answers[id] = (await receiver.aprocess(Message(id), effects.ahandle)).value
                except StoreUnavailable:
                    await asyncio.sleep(0.01)

    async def callers() -> None:
        await asyncio.gather(*(caller() for _ in range(16)))

    if colour.awaits:
        colour.run(callers())
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(process, ids))


def show_a_locked_record_waited_for(place: Place, seconds: float = 0.0) -> None:
    """Another session's lock, held for so long at least, is waited out."""
    with (
        place.store() as store,
        place.session() as holder,
        place.session() as watcher,
        ThreadPoolExecutor(1) as pool,
    ):
        decision = run(store.claim(claim_of("k")))
        place.lock(holder, "k")
        began = time.monotonic()
        ending = pool.submit(lambda: run(store.complete(ending_of(decision))))
        wait_until(lambda: place.is_waiting(watcher) and time.monotonic() - began >= seconds)
        holder("ROLLBACK")
        assert ending.result() is Ending.DONE


HELD_KEYS = [f"held {number}" for number in range(40)]
"""More than there are connections."""


def show_held_keys_in_nobodys_way(place: Place, colour: Colour) -> None:
    """Duplicates wait for keys that an open transaction has, and everybody else is served meanwhile."""
    with place.store(driver=colour.driver) as store, place.session() as holder:
        verbs = colour.of(store)
        mine = granted(colour.run(verbs.claim(claim_of("mine"))))
        place.hold(holder, *HELD_KEYS)

        async def meanwhile() -> None:
            new = await verbs.claim(claim_of("new"))
            renewal = Renewal("mine", mine.owner, mine.fence, LONG, LONG)
            assert await verbs.renew(renewal)
            assert await verbs.renew_many([renewal]) == [True]
            assert await verbs.complete(ending_of(new)) is Ending.DONE
            holder("COMMIT")

        duplicates = _in_tasks if colour.awaits else _in_threads
        decisions = colour.run(duplicates(verbs, meanwhile))
        assert {decision.verdict for decision in decisions} == {Verdict.BUSY}
        assert all(decision.record is not None for decision in decisions)


async def _in_tasks(verbs: Any, meanwhile: Callable[[], Awaitable[None]]) -> list[Decision]:
    """Claim all held keys in tasks, and let something happen when each of them waits."""
    waiting: list[float] = []
    all_wait, over = asyncio.Event(), asyncio.Event()

    async def pause(seconds: float) -> None:
        waiting.append(seconds)
        if len(waiting) == len(HELD_KEYS):
            all_wait.set()
        await over.wait()

    verbs.pause = pause
    async with asyncio.timeout(60):
        claims = [asyncio.ensure_future(verbs.claim(claim_of(key))) for key in HELD_KEYS]
        await all_wait.wait()
        await meanwhile()
        assert not any(claim.done() for claim in claims)
        over.set()
        return await asyncio.gather(*claims)


async def _in_threads(verbs: Any, meanwhile: Callable[[], Awaitable[None]]) -> list[Decision]:
    """The same in threads."""
    waiting: list[float] = []
    over = threading.Event()

    async def pause(seconds: float) -> None:
        waiting.append(seconds)
        over.wait(60)

    verbs.pause = pause
    with ThreadPoolExecutor(len(HELD_KEYS)) as threads:
        claims = [threads.submit(lambda key=key: run(verbs.claim(claim_of(key)))) for key in HELD_KEYS]
        try:
            wait_until(lambda: len(waiting) == len(HELD_KEYS))
            await meanwhile()
            assert not any(claim.done() for claim in claims)
        finally:
            over.set()
        return [claim.result() for claim in claims]


def take_in_opposite_orders(place: Place) -> None:
    """Six stores claim and end the same keys, half of them in the opposite order."""
    with ExitStack() as stack:
        stores = [stack.enter_context(place.store()) for _ in range(6)]
        run(stores[0].migrate())
        keys = [f"key {number}" for number in range(30)]

        def work(number: int) -> None:
            order = keys if number % 2 else keys[::-1]
            for turn in range(8):
                decisions = run(stores[number].claim_many([claim_of(f"{key} {turn}") for key in order]))
                won = [decision for decision in decisions if decision.verdict is Verdict.CLAIMED]
                assert set(run(stores[number].complete_many([ending_of(d) for d in won]))) <= {Ending.DONE}

        with ThreadPoolExecutor(6) as threads:
            list(threads.map(work, range(6)))
        assert run(stores[0].stats()).by_state == {"COMPLETED": 30 * 8}
