"""What is particular to the DynamoDB store: its requests, its clocks, its batches, and what can be wrong with it."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from tests.integration.dynamodb_helpers import (
    LONG,
    REGION,
    Gateway,
    claim,
    claim_of,
    client,
    complete,
    ending_of,
    hold,
    items,
    make_table,
    new_table,
    opened,
    renew,
)
from tests.servers import Server
from tests.servers.proxy import FaultProxy

from effectonce import Message, Policy, Receiver
from effectonce._blocking import run
from effectonce._records import Ending, Renewal, State, Verdict
from effectonce.errors import MissingExtra, StoreError, StoreMismatch, StoreUnavailable, UsageError
from effectonce.stores import dynamodb as module
from effectonce.stores import open_store
from effectonce.stores.dynamodb import DynamoDBStore
from effectonce.testing.clocks import START_SECONDS, ManualClock, wait_until

FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
HOUR = 3600.0


@pytest.fixture
def store(endpoint: str) -> Iterator[DynamoDBStore]:
    with opened(endpoint) as store:
        yield store


@pytest.fixture
def gateway(endpoint: str) -> Iterator[Gateway]:
    with Gateway(endpoint) as gateway:
        yield gateway


@pytest.fixture
def watched(gateway: Gateway) -> Iterator[DynamoDBStore]:
    """A store behind the gateway, its table made and its first request done."""
    with opened(gateway.endpoint) as store:
        hold(store, "first")
        gateway.counted()
        yield store


class TestRequests:
    """How many requests each verb takes."""

    def test_a_new_key_is_two_requests_and_a_duplicate_one(
        self, gateway: Gateway, watched: DynamoDBStore
    ) -> None:
        """Claim and completion are a write each; a duplicate comes back with the write that failed."""
        held = hold(watched, "k")
        assert gateway.counted() == {"PutItem": 1}
        assert complete(watched, held) is Ending.DONE
        assert gateway.counted() == {"UpdateItem": 1}
        assert claim(watched, "k").verdict is Verdict.REPLAY
        assert gateway.counted() == {"PutItem": 1}
        assert claim(watched, "first").verdict is Verdict.BUSY
        assert gateway.counted() == {"PutItem": 1}

    @pytest.mark.parametrize("colour", ["blocking", "asyncio"])
    def test_who_waits_only_looks(self, gateway: Gateway, watched: DynamoDBStore, colour: str) -> None:
        """A claim that is waited for is looked at by reads of the cheap sort; asking for it would be a write."""
        held = hold(watched, "k")
        gateway.counted()
        reads: list[bool] = []

        def note(operation: str, request: dict[str, Any]) -> None:
            reads.append(request["ConsistentRead"])

        gateway.judge = note
        with ThreadPoolExecutor(1) as waiter:
            if colour == "blocking":
                waiting = waiter.submit(lambda: run(watched.watch(held, LONG)))
            else:
                waiting = waiter.submit(lambda: asyncio.run(watched.for_asyncio().watch(held, LONG)))
            wait_until(lambda: len(reads) >= 5)
            assert not waiting.done()
            gateway.allow()
            assert set(gateway.counted()) == {"GetItem"}
            assert set(reads) == {False}
            with opened(gateway.endpoint, watched._table.name) as other:
                assert complete(other, held) is Ending.DONE
            assert waiting.result(20) is True

    def test_looks_grow_rare(self, watched: DynamoDBStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each pause is an eighth of the wait so far: who has waited long is told a little later, for far less."""
        now, pauses = [0.0], list[float]()

        async def rest(seconds: float) -> None:
            pauses.append(seconds)
            now[0] += seconds

        held = hold(watched, "k")
        monkeypatch.setattr(watched, "rest", rest)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
        assert run(watched.watch(held, 30.0)) is True
        assert sum(pauses) == pytest.approx(30.0)
        assert pauses[:-1] == sorted(pauses[:-1])
        assert (pauses[0], max(pauses)) == (0.005, 0.5)
        assert len(pauses) < 120

    def test_a_hundred_who_wait_share_their_looks(self, gateway: Gateway, watched: DynamoDBStore) -> None:
        """On an event loop those who wait for several claims look together; those who wait for one share its look."""
        held = run(watched.claim_many([claim_of(f"key {number}") for number in range(20)]))
        gateway.counted()

        async def wait() -> None:
            store = watched.for_asyncio()
            records = [decision.record for decision in held if decision.record is not None]
            watches = [asyncio.ensure_future(store.watch(record, LONG)) for record in records * 5]
            await asyncio.to_thread(wait_until, lambda: "BatchGetItem" in gateway.seen)
            await store.complete_many([ending_of(record) for record in records])
            assert await asyncio.gather(*watches) == [True] * 100

        asyncio.run(wait())
        counted = gateway.counted()
        assert counted["BatchGetItem"] > 0
        assert "PutItem" not in counted

    def test_other_verbs_are_one_request(self, gateway: Gateway, watched: DynamoDBStore) -> None:
        """Renewing and completing again find out in one request; releasing and reading are one too."""
        held = hold(watched, "k")
        gateway.counted()
        assert renew(watched, held) is True
        assert run(watched.renew(Renewal(held.key, held.owner, held.fence, LONG, LONG, b"journal"))) is True
        assert complete(watched, held) is Ending.DONE
        assert complete(watched, held) is Ending.REPEATED
        assert renew(watched, held) is False
        assert run(watched.get("k")) is not None
        assert gateway.counted() == {"UpdateItem": 5, "GetItem": 1}

    def test_a_batch_of_a_hundred_is_four_requests(self, gateway: Gateway, watched: DynamoDBStore) -> None:
        """25 conditional writes share a request, which is all that DynamoDB takes; the four go out together."""
        claims = [claim_of(f"key {number}") for number in range(100)]
        decisions = run(watched.claim_many(claims))
        assert gateway.counted() == {"BatchExecuteStatement": 4}
        held = [decision.record for decision in decisions if decision.record]
        renewals = [Renewal(r.key, r.owner, r.fence, LONG, LONG) for r in held]
        assert run(watched.renew_many(renewals)) == [True] * 100
        assert gateway.counted() == {"BatchExecuteStatement": 4}
        assert run(watched.complete_many([ending_of(record) for record in held])) == [Ending.DONE] * 100
        assert gateway.counted() == {"BatchExecuteStatement": 4}

    def test_a_batch_of_duplicates_is_read_in_one_request_more(
        self, gateway: Gateway, watched: DynamoDBStore
    ) -> None:
        """An INSERT does not say what it met: what 25 of them met is read together."""
        claims = [claim_of(f"key {number}") for number in range(100)]
        run(watched.claim_many(claims))
        gateway.counted()
        decisions = run(watched.claim_many([claim_of(c.key) for c in claims]))
        assert {decision.verdict for decision in decisions} == {Verdict.BUSY}
        assert gateway.counted() == {"BatchExecuteStatement": 4, "BatchGetItem": 4}

    def test_a_batch_of_takeovers_shares_requests_too(self, endpoint: str) -> None:
        """Swaps are statements like any other."""
        clock = ManualClock()
        with Gateway(endpoint) as gateway:
            table = new_table()
            make_table(endpoint, table)
            with opened(gateway.endpoint, table, clock=clock, monotonic=clock, skew=0.0) as store:
                claims = [claim_of(f"key {number}", lease=8.0, once=number < 5) for number in range(20)]
                run(store.claim_many(claims))
                clock.advance(8.0)
                gateway.counted()
                decisions = run(store.claim_many([claim_of(c.key) for c in claims]))
                assert [d.verdict for d in decisions] == [Verdict.IN_DOUBT] * 5 + [Verdict.TAKEN_OVER] * 15
                assert gateway.counted() == {"BatchExecuteStatement": 2, "BatchGetItem": 1}
                assert [run(store.get(c.key)) for c in claims] == [d.record for d in decisions]

    def test_callers_on_a_loop_share_requests(self, gateway: Gateway, watched: DynamoDBStore) -> None:
        """What 64 tasks ask in one turn goes out in a few requests; one alone is one plain write."""

        async def crowd() -> None:
            verbs = watched.for_asyncio()
            await verbs.claim(claim_of("alone"))
            assert gateway.counted() == {"PutItem": 1}
            await asyncio.gather(*(verbs.claim(claim_of(f"key {number}")) for number in range(64)))

        asyncio.run(crowd())
        assert gateway.counted().total() <= 8

    def test_a_crowd_at_one_key_shares_what_it_meets(self, gateway: Gateway, watched: DynamoDBStore) -> None:
        """Of 64 tasks that claim one key at once, one is granted it; the others don't ask one by one."""

        async def crowd() -> Counter[Verdict]:
            verbs = watched.for_asyncio()
            decisions = await asyncio.gather(*(verbs.claim(claim_of("k")) for _ in range(64)))
            return Counter(decision.verdict for decision in decisions)

        assert asyncio.run(crowd()) == {Verdict.CLAIMED: 1, Verdict.BUSY: 63}
        assert gateway.counted().total() <= 12

    def test_an_item_is_small(self, endpoint: str, store: DynamoDBStore) -> None:
        """What is usual takes no room: an item is its key, its result and some 80 bytes."""
        key, result = "scope|payments.charge|1|0123456789abcdef", b"x" * 100
        complete(store, hold(store, key), result)
        item = items(endpoint, store)[key]
        assert set(item) == set("ksfptr")
        assert run(store.stats()).bytes < len(key) + len(result) + 80


class TestClocks:
    """Nobody is taken over, and nothing forgotten, because a clock is wrong."""

    @pytest.fixture
    def true_time(self) -> ManualClock:
        return ManualClock(1_800_000_000.0)

    @pytest.fixture
    def worker(self, quick: str, true_time: ManualClock) -> Iterator[Callable[[float], DynamoDBStore]]:
        """Workers on one table whose wall clocks are off by so many seconds; monotonic clocks only ever go on."""
        table, stores = new_table(), []
        make_table(quick, table)

        def make(off: float) -> DynamoDBStore:
            store = DynamoDBStore(
                table,
                region=REGION,
                endpoint=quick,
                timeout=60.0,
                clock=lambda: true_time() + off,
                monotonic=lambda: true_time() - START_SECONDS,
            )
            stores.append(store)
            return store

        yield make
        for store in stores:
            store.close()

    @pytest.mark.parametrize("off", [-HOUR, HOUR, 365 * 24 * HOUR])
    def test_a_skewed_worker_does_not_take_over_a_live_claim(
        self, worker: Callable[[float], DynamoDBStore], true_time: ManualClock, off: float
    ) -> None:
        """While the holder renews, it holds, whoever asks and whatever their clock says; a year ahead, too."""
        right, wrong = worker(0.0), worker(off)
        held = hold(right, "k", lease=60.0)
        for _ in range(20):
            decision = claim(wrong, "k")
            assert decision.verdict is Verdict.BUSY
            assert 0 < decision.retry_after <= 60.0
            true_time.advance(20.0)
            assert renew(right, held, lease=60.0) is True
            assert run(wrong.purge()) == 0
        assert complete(right, held) is Ending.DONE

    @pytest.mark.parametrize("off", [-HOUR, HOUR])
    def test_a_skewed_holder_is_not_taken_over_while_it_renews(
        self, worker: Callable[[float], DynamoDBStore], true_time: ManualClock, off: float
    ) -> None:
        """The holder's own clock is not believed either."""
        right, wrong = worker(0.0), worker(off)
        held = hold(wrong, "k", lease=60.0)
        for _ in range(20):
            assert claim(right, "k").verdict is Verdict.BUSY
            true_time.advance(20.0)
            assert renew(wrong, held, lease=60.0) is True
        assert complete(wrong, held) is Ending.DONE

    @pytest.mark.parametrize("off", [-HOUR, 0.0, HOUR])
    def test_a_crashed_claim_is_taken_over_after_a_lease_of_watching(
        self, worker: Callable[[float], DynamoDBStore], true_time: ManualClock, off: float
    ) -> None:
        """However long ago the holder crashed, who has just seen its record waits for one lease, and no longer."""
        held = hold(worker(0.0), "k", lease=60.0)
        true_time.advance(600.0)
        other = worker(off)
        decision = claim(other, "k")
        assert (decision.verdict, decision.retry_after) == (Verdict.BUSY, 60.0)
        true_time.advance(59.0)
        assert claim(other, "k").verdict is Verdict.BUSY
        true_time.advance(1.0)
        taken = claim(other, "k")
        assert taken.verdict is Verdict.TAKEN_OVER
        assert taken.record is not None
        assert taken.record.fence > held.fence
        assert complete(worker(0.0), held) is Ending.FENCED

    def test_a_renewal_begins_the_watch_again(
        self, worker: Callable[[float], DynamoDBStore], true_time: ManualClock
    ) -> None:
        """A renewal that comes late is a sign of life: what was watched before counts for nothing."""
        right, other = worker(0.0), worker(HOUR)
        held = hold(right, "k", lease=60.0)
        assert claim(other, "k").verdict is Verdict.BUSY
        true_time.advance(59.0)
        assert renew(right, held, lease=60.0) is True
        true_time.advance(59.0)
        assert claim(other, "k").verdict is Verdict.BUSY
        true_time.advance(59.0)
        assert claim(other, "k").verdict is Verdict.BUSY
        true_time.advance(1.0)
        assert claim(other, "k").verdict is Verdict.TAKEN_OVER

    @pytest.mark.parametrize("jump", [-365 * 24 * HOUR, -HOUR, HOUR, 365 * 24 * HOUR])
    def test_a_clock_that_jumps_changes_no_lease(
        self, worker: Callable[[float], DynamoDBStore], true_time: ManualClock, jump: float
    ) -> None:
        """A watcher whose clock is corrected amid its watch, either way, takes over when it would have anyway."""
        held = hold(worker(0.0), "k", lease=60.0)
        other = worker(0.0)
        assert claim(other, "k").verdict is Verdict.BUSY
        other.clock = lambda: true_time() + jump
        true_time.advance(59.0)
        decision = claim(other, "k")
        assert (decision.verdict, decision.retry_after) == (Verdict.BUSY, 1.0)
        true_time.advance(1.0)
        assert hold(other, "k").fence > held.fence

    def test_a_takeover_fails_when_the_holder_renews_meanwhile(
        self,
        worker: Callable[[float], DynamoDBStore],
        true_time: ManualClock,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Between finding a lease over and taking over, a renewal of the same moment still counts."""
        right, other = worker(0.0), worker(0.0)
        held = hold(right, "k", lease=60.0)
        claim(other, "k")
        true_time.advance(60.0)
        write = other._table.write
        renewed: list[bool] = []

        def interrupted(change: Any) -> Any:
            if type(change).__name__ == "Change" and not renewed:
                renewed.append(renew(right, held, lease=60.0))
            return write(change)

        monkeypatch.setattr(other._table, "write", interrupted)
        assert claim(other, "k").verdict is Verdict.BUSY
        assert renewed == [True]
        assert complete(right, held) is Ending.DONE

    def test_a_reply_that_was_overtaken_is_not_believed(
        self,
        worker: Callable[[float], DynamoDBStore],
        true_time: ManualClock,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A thread that hears of the crashed claim after another thread took over hears of the new one instead."""
        store = worker(0.0)
        hold(store, "k", lease=60.0)
        true_time.advance(60.0)
        write = store._table.write
        taken: list[Any] = []

        def overtaken(change: Any) -> Any:
            reply = write(change)
            if not taken:
                monkeypatch.setattr(store._table, "write", write)
                taken.append(hold(store, "k"))
            return reply

        monkeypatch.setattr(store._table, "write", overtaken)
        decision = claim(store, "k")
        assert decision.verdict is Verdict.BUSY
        assert decision.record is not None
        assert (decision.record.owner, decision.record.fence) == (taken[0].owner, taken[0].fence)

    @pytest.mark.parametrize("of_writer", [-HOUR, 0.0, HOUR])
    @pytest.mark.parametrize("of_reader", [-HOUR, 0.0, HOUR])
    def test_a_result_is_replayed_for_all_of_its_keep(
        self,
        worker: Callable[[float], DynamoDBStore],
        true_time: ManualClock,
        of_writer: float,
        of_reader: float,
    ) -> None:
        """With clocks an hour off, both ways, a repeat within the keep never runs again, nor does purge forget it."""
        writer, reader = worker(of_writer), worker(of_reader)
        complete(writer, hold(writer, "k"), keep=60.0)
        true_time.advance(59.0)
        assert run(reader.purge()) == 0
        assert claim(reader, "k").verdict is Verdict.REPLAY
        true_time.advance(8 * HOUR)
        assert claim(reader, "k").verdict is Verdict.CLAIMED

    @pytest.mark.parametrize("keep", [60.0, 24 * HOUR])
    @pytest.mark.parametrize("of_next", [-HOUR, 0.0, HOUR])
    @pytest.mark.parametrize("of_purger", [-HOUR, HOUR])
    def test_fences_grow_across_deletion(
        self,
        quick: str,
        worker: Callable[[float], DynamoDBStore],
        true_time: ManualClock,
        of_purger: float,
        of_next: float,
        keep: float,
    ) -> None:
        """Whoever ends the key's first life, deletes it and begins the next: its fence is higher."""
        first = hold(worker(HOUR), "k")
        complete(worker(-HOUR), first, keep=keep)
        purger = worker(of_purger)
        expires_at = int(items(quick, purger)["k"]["t"]["N"])
        true_time.advance(expires_at - purger.clock() - 1)
        assert run(purger.purge()) == 0
        true_time.advance(1.0)
        assert run(purger.purge()) == 1
        assert hold(worker(of_next), "k").fence > first.fence

    def test_a_claim_is_deleted_by_dynamodb_far_later_than_it_may_live(
        self, quick: str, worker: Callable[[float], DynamoDBStore], true_time: ManualClock
    ) -> None:
        """DynamoDB's clock is right, the holder's is an hour behind: a held record's time is a day away nonetheless."""
        store = worker(-HOUR)
        held = hold(store, "k", lease=60.0, keep=1.0)
        assert int(items(quick, store)["k"]["t"]["N"]) > true_time() + 23 * HOUR
        true_time.advance(20.0)
        renew(store, held, lease=60.0, keep=1.0)
        assert int(items(quick, store)["k"]["t"]["N"]) > true_time() + 23 * HOUR
        complete(store, held, keep=1.0)
        assert int(items(quick, store)["k"]["t"]["N"]) >= true_time() + HOUR

    def test_what_may_not_be_forgotten_has_no_time_to_live(
        self, quick: str, worker: Callable[[float], DynamoDBStore], true_time: ManualClock
    ) -> None:
        """Neither a claim at most once, renewed or not, nor a doubt: both are there after a year."""
        store = worker(0.0)
        held = {key: hold(store, key, once=True, lease=60.0) for key in ("claimed", "renewed", "told")}
        assert renew(store, held["renewed"], lease=60.0) is True
        assert run(store.complete(ending_of(held["told"], None, state=State.IN_DOUBT))) is Ending.DONE
        assert all("t" not in item for item in items(quick, store).values())
        true_time.advance(365 * 24 * HOUR)
        assert run(store.purge()) == 0
        assert {claim(worker(0.0), key).verdict for key in held} == {Verdict.BUSY, Verdict.IN_DOUBT}
        assert {claim(store, key).verdict for key in held} == {Verdict.IN_DOUBT}

    def test_many_watches_take_bounded_room(
        self, worker: Callable[[float], DynamoDBStore], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Who sees very many claims forgets the oldest sightings, and claims that ended are forgotten at once."""
        monkeypatch.setattr(module.items, "MOST_WATCHED", 8)
        store = worker(0.0)
        held = [hold(store, f"key {number}") for number in range(20)]
        assert len(store._watches._watched) == 8
        for record in held:
            complete(store, record)
        assert len(store._watches._watched) == 0
        assert claim(store, "key 0").verdict is Verdict.REPLAY


class TestBadInput:
    """What can be wrong, and what is said then. Nothing is overwritten."""

    @pytest.mark.parametrize(
        ("url", "word"),
        [
            ("dynamodb://", "names? a table"),
            ("dynamodb:///effects", "name a table"),
            ("dynamodb://effects/other", "name a table"),
            ("dynamodb://KEY:SECRET@effects?region=x", "no place in a URL"),
            ("dynamodb://ef", "3 to 255"),
            ("dynamodb://effe%20cts?region=x", "3 to 255"),
            ("dynamodb://effects?regoin=x", "unknown"),
            ("dynamodb://effects?region=x&timeout=soon", "unknown or makes no sense"),
            ("dynamodb://effects?region=x&timeout=0", "above 0"),
            ("dynamodb://effects?region=x&timeout=nan", "above 0"),
            ("dynamodb://effects?region=x&skew=-1", "0 or more"),
            ("dynamodb://effects?region=x&create=maybe", "unknown or makes no sense"),
            ("dynamodb://effects?region=x&endpoint=localhost:8000", "http://localhost"),
            ("dynamodb://effects?region=x&endpoint=http://KEY:SECRET@localhost:8000", "no credentials in it"),
            (
                "dynamodb://effects?region=x&endpoint=http://KEY:SECRET%23@localhost:8000",
                "no credentials in it",
            ),
            ("dynamodb://effects?region=x&endpoint=http://localhost:80000", "http://localhost:8000"),
            ("dynamodb://KEY:SECRET#x@effects?region=x", "no place in a URL"),
        ],
    )
    def test_a_wrong_url_says_what_is_wrong(self, url: str, word: str) -> None:
        """A typo is a UsageError that names the right form, and repeats no secret."""
        with pytest.raises(UsageError, match=word) as caught:
            open_store(url)
        assert "SECRET" not in str(caught.value)

    def test_a_url_has_all_options(self, quick: str) -> None:
        """Everything that a store can be told, it can be told in its URL."""
        url = f"dynamodb://{new_table()}?region=eu-west-1&endpoint={quick}&timeout=20.5&create=yes&skew=60"
        with open_store(url) as store:
            assert isinstance(store, DynamoDBStore)
            assert claim(store, "k").verdict is Verdict.CLAIMED

    def test_without_a_region(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        """Neither the URL nor the environment names one: the error says how to."""
        for name in ("AWS_DEFAULT_REGION", "AWS_REGION", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        with pytest.raises(UsageError, match=r"region=eu-west-1"):
            DynamoDBStore("effects")

    def test_without_boto3(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The error names the extra."""
        monkeypatch.setitem(sys.modules, "boto3", None)
        with pytest.raises(MissingExtra, match=r"effectonce\[dynamodb\]"):
            DynamoDBStore("effects", region=REGION)

    def test_without_credentials(self, quick: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        """A local server needs some as well, whichever."""
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with (
            opened(quick) as store,
            pytest.raises(StoreUnavailable, match=r"AWS_ACCESS_KEY_ID.*local server takes any"),
        ):
            claim(store, "k")

    @pytest.mark.parametrize(
        "code", ["UnrecognizedClientException", "InvalidSignatureException", "ExpiredTokenException"]
    )
    def test_with_wrong_credentials(self, quick: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The server's refusal is told, and not what was refused."""
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
        with Gateway(quick) as gateway, opened(gateway.endpoint) as store:
            gateway.refuse(code)
            with pytest.raises(
                StoreUnavailable, match="refuses these AWS credentials, or this clock"
            ) as caught:
                claim(store, "k")
            assert "hunter2" not in f"{caught.value} {caught.value.__cause__}"
            gateway.allow()
            assert claim(store, "k").verdict is Verdict.CLAIMED

    def test_a_server_that_is_away(self) -> None:
        """Nobody listens there: the error says where."""
        with (
            opened("http://127.0.0.1:1") as store,
            pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1") as caught,
        ):
            claim(store, "k")
        assert caught.value.retry_after > 0

    def test_a_server_that_is_away_is_not_healthy(self) -> None:
        """The store's clock is this machine's, and goes on; readiness is another matter."""
        with opened("http://127.0.0.1:1") as store:
            assert "127.0.0.1:1" in store.health().detail

    def test_a_reply_that_breaks_off_within_its_headers(self, quick: str) -> None:
        """Python takes the rest for empty. It is no answer: asked again it is given, and until then nothing runs."""
        with Gateway(quick) as gateway, opened(gateway.endpoint) as store:
            hold(store, "first")
            for broken_off in (1, 2):
                gateway.broken_off = broken_off
                with pytest.raises(StoreUnavailable, match="broke off"):
                    claim(store, "k")
                gateway.broken_off = 0
                hold(store, "k" * broken_off)

    def test_a_server_that_says_nothing(self, quick: str) -> None:
        """A request is given up in time, on an event loop too, and the store works on when the server does."""
        with FaultProxy(quick) as proxy, opened(proxy.url, timeout=1.5) as store:
            hold(store, "first")
            proxy.stall()
            with pytest.raises(StoreUnavailable, match="can't be reached"):
                claim(store, "k")
            with pytest.raises(StoreUnavailable, match="can't be reached"):
                asyncio.run(store.for_asyncio().claim(claim_of("k")))
            with pytest.raises(StoreUnavailable, match="can't be reached"):
                run(store.claim_many([claim_of(f"key {number}") for number in range(200)]))
            proxy.cut()
            proxy.heal()
            assert claim(store, "another").verdict is Verdict.CLAIMED

    def test_a_table_that_is_missing(self, endpoint: str) -> None:
        """With create=no the store makes none, and says how it is made."""
        with opened(endpoint, create=False) as store:
            with pytest.raises(StoreUnavailable, match=r"There is no table .*create=yes"):
                claim(store, "k")
            assert store._table.name not in client(endpoint).list_tables()["TableNames"]
            store.migrate()
            assert claim(store, "k").verdict is Verdict.CLAIMED

    def test_a_table_that_may_not_be_made(self, quick: str) -> None:
        """Without the permission to make it, the error says so, and what it has to look like."""
        with Gateway(quick) as gateway, opened(gateway.endpoint) as store:
            gateway.refuse("AccessDeniedException", "CreateTable")
            with pytest.raises(StoreUnavailable, match=r"partition key.*may not create it"):
                claim(store, "k")

    def test_a_table_that_may_be_used_but_not_looked_at(self, quick: str) -> None:
        """Reading and writing items is all that a store needs."""
        with opened(quick) as store:
            hold(store, "first")
            with Gateway(quick) as gateway, opened(gateway.endpoint, store._table.name) as other:
                gateway.refuse("AccessDeniedException", "DescribeTable", "BatchExecuteStatement")
                assert claim(other, "first").verdict is Verdict.BUSY
                decisions = run(other.claim_many([claim_of(f"key {number}") for number in range(60)]))
                assert [d.verdict for d in decisions] == [Verdict.CLAIMED] * 60
                assert gateway.counted()["BatchExecuteStatement"] <= 4
                run(other.claim_many([claim_of(f"more {number}") for number in range(60)]))
                assert gateway.counted() == {"PutItem": 60}

    def test_a_table_of_another_program(self, endpoint: str) -> None:
        """Its key is not ours: nothing of it is read or written, also when the store may not look at it."""
        table = new_table()
        make_table(endpoint, table, key="pk")
        client(endpoint).put_item(TableName=table, Item={"pk": {"S": "k"}})
        with opened(endpoint, table) as store, pytest.raises(StoreMismatch, match="another program's"):
            claim(store, "k")
        with Gateway(endpoint) as gateway, opened(gateway.endpoint, table) as store:
            gateway.refuse("AccessDeniedException", "DescribeTable")
            with pytest.raises(StoreMismatch, match="does not fit"):
                claim(store, "k")
        assert client(endpoint).scan(TableName=table)["Items"] == [{"pk": {"S": "k"}}]

    @pytest.mark.parametrize(
        "foreign",
        [
            {"colour": {"S": "green"}},
            {"s": {"N": "2"}},
            {"s": {"S": "1"}, "f": {"S": "x"}},
            {"s": {"N": "9"}, "f": {"N": "1"}, "t": {"N": "1"}},
            {"s": {"N": "1"}, "f": {"N": "1"}, "t": {"N": "1"}, "o": {"B": b"o"}},
            {"s": {"N": "2"}, "f": {"N": "1"}, "t": {"N": "1"}, "K": {"S": "another"}},
        ],
    )
    def test_an_item_of_another_program(
        self, endpoint: str, store: DynamoDBStore, foreign: dict[str, Any]
    ) -> None:
        """At our key, but no record of ours or of a newer version: every verb refuses it, and it stays as it was."""
        hold(store, "first")
        item = {"k": {"S": "k"}, **foreign}
        client(endpoint).put_item(TableName=store._table.name, Item=item)
        with pytest.raises(StoreMismatch, match="no record") as caught:
            claim(store, "k")
        assert caught.value.key == "k"
        for verb in (store.get("k"), store.complete(ending_of(hold(store, "held")._replace(key="k")))):
            with pytest.raises(StoreMismatch):
                run(verb)
        assert items(endpoint, store)["k"] == item

    def test_a_foreign_item_fails_only_its_own_caller(self, endpoint: str, store: DynamoDBStore) -> None:
        """In a crowd that shares requests, everyone else gets their answer."""
        hold(store, "first")
        client(endpoint).put_item(TableName=store._table.name, Item={"k": {"S": "key 7"}})

        async def crowd() -> list[Any]:
            verbs = store.for_asyncio()
            claims = [verbs.claim(claim_of(f"key {number}")) for number in range(40)]
            return await asyncio.gather(*claims, return_exceptions=True)

        answers = asyncio.run(crowd())
        assert isinstance(answers.pop(7), StoreMismatch)
        assert {answer.verdict for answer in answers} == {Verdict.CLAIMED}


class TestTable:
    """How the table is made."""

    def test_the_store_makes_its_table(self, endpoint: str, store: DynamoDBStore) -> None:
        """Paid per request, and DynamoDB deletes what has expired."""
        hold(store, "k")
        table = store._table.name
        described = client(endpoint).describe_table(TableName=table)["Table"]
        assert described["BillingModeSummary"]["BillingMode"] == "PAY_PER_REQUEST"
        expiry = client(endpoint).describe_time_to_live(TableName=table)["TimeToLiveDescription"]
        assert expiry == {"TimeToLiveStatus": "ENABLED", "AttributeName": "t"}

    def test_migrating_twice_is_migrating(self, endpoint: str) -> None:
        """Also a table that somebody made without a time to live gets one."""
        table = new_table()
        make_table(endpoint, table)
        with opened(endpoint, table, create=False) as store:
            hold(store, "k")
            for _ in range(2):
                store.migrate()
            expiry = client(endpoint).describe_time_to_live(TableName=table)["TimeToLiveDescription"]
            assert expiry["TimeToLiveStatus"] == "ENABLED"
            assert claim(store, "k").verdict is Verdict.BUSY

    def test_many_may_make_it_at_once(self, endpoint: str) -> None:
        """Workers that start together meet in one table."""
        table = new_table()
        stores = [DynamoDBStore(table, region=REGION, endpoint=endpoint, timeout=60.0) for _ in range(4)]
        with ThreadPoolExecutor(4) as threads:
            decisions = list(threads.map(lambda store: claim(store, "k"), stores))
        assert Counter(d.verdict for d in decisions) == {Verdict.CLAIMED: 1, Verdict.BUSY: 3}
        for store in stores:
            store.close()

    def test_a_sample_is_scaled_up(self, quick: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of a table that is too large to count, the first pages stand for the rest."""
        with opened(quick) as store:
            for number in range(12):
                complete(store, hold(store, f"key {number}"), b"x" * 300_000)
            exactly = run(store.stats())
            assert exactly.keys == exactly.by_state["COMPLETED"] == 12
            monkeypatch.setattr(module, "STATS_PAGES", 1)
            about = run(store.stats())
            assert about.keys == about.by_state["COMPLETED"] == 12
            assert abs(about.bytes - exactly.bytes) < exactly.bytes / 100


class TestLargeResults:
    """An item holds 400 KiB; a result may be larger."""

    def test_a_large_result_is_kept_in_parts(self, endpoint: str, store: DynamoDBStore) -> None:
        """It is replayed whole, told twice it is the same, and its parts outlive the record."""
        held, result = hold(store, "k"), os.urandom(1_000_000)
        assert complete(store, held, result) is Ending.DONE
        assert complete(store, held, result) is Ending.REPEATED
        assert complete(store, held, result[:-1]) is Ending.FENCED
        decision = claim(store, "k")
        assert decision.record is not None
        assert decision.record.result == result
        found = items(endpoint, store)
        record = found.pop("k")
        assert set(record) == set("ksfptdn")
        assert all(int(part["t"]["N"]) > int(record["t"]["N"]) for part in found.values())
        assert run(store.scan()) == [decision.record]
        stats = run(store.stats())
        assert (stats.keys, stats.bytes > 1_000_000) == (1, True)

    def test_expired_parts_are_purged(self, quick: str) -> None:
        """Nothing stays behind, and only records are counted."""
        clock, table = ManualClock(), new_table()
        make_table(quick, table)
        with opened(quick, table, clock=clock, monotonic=clock, skew=0.0) as store:
            complete(store, hold(store, "k"), os.urandom(1_000_000), keep=64.0)
            clock.advance(64.0)
            assert run(store.purge()) == 1
            clock.advance(24 * HOUR)
            assert run(store.purge()) == 0
            assert items(quick, store) == {}

    def test_a_missing_part_is_told(self, endpoint: str, store: DynamoDBStore) -> None:
        """Half a result is no result: the effect happened, so it does not happen again either."""
        complete(store, hold(store, "k"), os.urandom(1_000_000))
        part = next(key for key in items(endpoint, store) if key != "k")
        client(endpoint).delete_item(TableName=store._table.name, Key={"k": {"S": part}})
        with pytest.raises(StoreMismatch, match=r"Parts .* are missing"):
            claim(store, "k")

    def test_a_large_settlement_is_kept_too(self, store: DynamoDBStore) -> None:
        """Whoever settles a doubt may have much to say."""
        held, result = hold(store, "k"), os.urandom(500_000)
        run(store.complete(ending_of(held, None, state=State.IN_DOUBT)))
        assert run(store.complete(ending_of(held._replace(owner=b""), result))) is Ending.DONE
        decision = claim(store, "k")
        assert decision.record is not None
        assert (decision.verdict, decision.record.result) == (Verdict.REPLAY, result)


class TestFaults:
    """Whatever happens on the way, an effect happens once, and nothing is stuck."""

    @pytest.mark.parametrize(
        ("code", "status"),
        [
            ("ProvisionedThroughputExceededException", 400),
            ("ThrottlingException", 400),
            ("RequestLimitExceeded", 503),
            ("InternalServerError", 500),
            ("ServiceUnavailable", 503),
        ],
    )
    def test_a_server_that_is_overloaded(
        self, gateway: Gateway, watched: DynamoDBStore, code: str, status: int
    ) -> None:
        """Once is not noticed; for longer it is StoreUnavailable with a hint; then everything goes on."""
        gateway.refuse(code, status=status, times=1)
        held = hold(watched, "k")
        gateway.refuse(code, status=status)
        verbs = [
            watched.claim(claim_of("new")),
            watched.complete(ending_of(held)),
            watched.get("k"),
            watched.stats(),
        ]
        verbs += [watched.claim_many([claim_of(f"key {number}") for number in range(3)])]
        for verb in verbs:
            with pytest.raises(StoreUnavailable, match=code) as caught:
                run(verb)
            assert caught.value.retry_after > 0
        gateway.allow()
        assert complete(watched, held) is Ending.DONE

    @pytest.mark.parametrize("lose", ["request", "reply"])
    def test_a_connection_cut_at_any_moment(self, quick: str, lose: str) -> None:
        """Before or after the server did what it was asked: one effect, one answer, and the same for everyone."""
        with FaultProxy(quick) as proxy, opened(proxy.url) as store:
            hold(store, "first")
            receiver = Receiver(store, policy=Policy(lease=60))
            effects: Counter[str] = Counter()

            def handler(message: Message) -> str:
                effects[message.id] += 1
                return message.id

            for nth in range(1, 20):
                message, fired = Message(id=f"m-{nth}", payload=None, source="orders"), proxy.fired
                (proxy.lose_request if lose == "request" else proxy.lose_reply)(nth)
                outcomes = [receiver.process(message, handler) for _ in range(3)]
                assert [(o.value, o.replayed) for o in outcomes] == [
                    (message.id, False), (message.id, True), (message.id, True),
                ]  # fmt: skip
                if proxy.fired == fired:
                    break
            proxy.heal()
            assert nth > 4
            assert set(effects.values()) == {1}
            receiver.close()

    @pytest.mark.parametrize("lose", ["request", "reply"])
    def test_a_connection_cut_during_a_batch(self, quick: str, lose: str) -> None:
        """Some of a batch may have been done: sent again, each of them is done once."""
        with FaultProxy(quick) as proxy, opened(proxy.url) as store:
            hold(store, "first")
            for nth in range(1, 10):
                fired = proxy.fired
                claims = [claim_of(f"{lose} {nth} {number}") for number in range(60)]
                (proxy.lose_request if lose == "request" else proxy.lose_reply)(nth)
                decisions = run(store.claim_many(claims))
                assert [d.verdict for d in decisions] == [Verdict.CLAIMED] * 60
                held = [d.record for d in decisions if d.record]
                assert [r.owner for r in held] == [c.owner for c in claims]
                endings = run(store.complete_many([ending_of(record) for record in held]))
                assert set(endings) <= {Ending.DONE, Ending.REPEATED}
                if proxy.fired == fired:
                    break
            proxy.heal()
            assert nth > 4

    def test_a_server_that_restarts(self, start_server: Callable[..., Server]) -> None:
        """Killed amid traffic: StoreUnavailable while it is away, and on with what it kept, without reopening."""
        server = start_server("dynamodb-local")
        with opened(server.url.partition("endpoint=")[2], timeout=5.0) as store:
            held = hold(store, "k")
            server.kill()
            with pytest.raises(StoreUnavailable):
                complete(store, held)
            with pytest.raises(StoreUnavailable):
                asyncio.run(store.for_asyncio().claim(claim_of("k")))
            server.restart()
            wait_until(partial(_answers, store), what="The server")
            assert complete(store, held) in (Ending.DONE, Ending.REPEATED)
            assert claim(store, "k").verdict is Verdict.REPLAY

    def test_a_statement_that_fails_alone_is_sent_alone(
        self, watched: DynamoDBStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One throttled statement of a batch is one more request, and nobody's trouble but its own."""
        batch = watched._table._batch
        spoiled = {"Error": {"Code": "ThrottlingError", "Message": "slow down"}}
        monkeypatch.setattr(watched._table, "_batch", lambda writes: [*batch(writes[:-1]), spoiled])
        decisions = run(watched.claim_many([claim_of(f"key {number}") for number in range(5)]))
        assert [d.verdict for d in decisions] == [Verdict.CLAIMED] * 5
        assert len(run(watched.scan())) == 6

    @pytest.mark.parametrize("colour", ["blocking", "asyncio"])
    def test_a_request_that_is_throttled_costs_only_its_own(
        self, gateway: Gateway, watched: DynamoDBStore, colour: str
    ) -> None:
        """What other requests of a batch were granted is run, not left to its lease, or in doubt for good."""
        gateway.judge = lambda _, request: (400, "ThrottlingException") if "m-7" in str(request) else None
        receiver = Receiver(watched, policy=Policy(on_crash="in_doubt"))
        messages = [Message(id=f"m-{number}") for number in range(60)]

        async def handler(message: Message) -> str:
            return message.id

        def process() -> Counter[str]:
            if colour == "blocking":
                outcomes = receiver.process_batch(messages, lambda message: message.id)
            else:
                outcomes = asyncio.run(receiver.aprocess_batch(messages, handler))
            return Counter(outcome.status for outcome in outcomes)

        first = process()
        assert first.keys() == {"executed", "store_error"}
        assert first["executed"] >= 35  # one request has 25, some of which may meet again when asked alone
        gateway.allow()
        assert process() == {"replayed": first["executed"], "executed": first["store_error"]}

    def test_64_workers_on_one_key(self, quick: str) -> None:
        """Eight processes' worth of handles, eight threads each, at the same moment: one effect, one answer."""
        table = new_table()
        effects: list[str] = []
        barrier = threading.Barrier(64)
        stores = [DynamoDBStore(table, region=REGION, endpoint=quick, timeout=60.0) for _ in range(8)]
        receivers = [Receiver(store, policy=Policy(busy="wait", wait=60)) for store in stores]

        def work(number: int) -> str:
            barrier.wait()
            message = Message(id="m-1", payload=None, source="orders")
            value: str = receivers[number % 8].process(message, lambda _: effects.append("x") or "done").value
            return value

        hold(stores[0], "first")
        with ThreadPoolExecutor(64) as threads:
            assert list(threads.map(work, range(64))) == ["done"] * 64
        assert effects == ["x"]
        for receiver in receivers:
            receiver.close()


class TestSharing:
    """Threads, event loops and forks."""

    def test_threads_share_requests_when_they_are_many(
        self, gateway: Gateway, watched: DynamoDBStore
    ) -> None:
        """A few go alone; the others, who come meanwhile, go together."""
        barrier = threading.Barrier(32)

        def work(number: int) -> Verdict:
            barrier.wait()
            return claim(watched, f"key {number}").verdict

        with ThreadPoolExecutor(32) as threads:
            assert set(threads.map(work, range(32))) == {Verdict.CLAIMED}
        assert gateway.counted().total() < 32

    def test_two_loops_and_a_closed_one(self, store: DynamoDBStore) -> None:
        """Loops in several threads, one after another and closed in between, use one store."""

        async def use(name: str) -> None:
            verbs = store.for_asyncio()
            claims = [verbs.claim(claim_of(f"{name} {number}")) for number in range(10)]
            assert {d.verdict for d in await asyncio.gather(*claims)} == {Verdict.CLAIMED}

        asyncio.run(use("before"))
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda number: asyncio.run(use(f"loop {number}")), range(4)))
        loop = asyncio.new_event_loop()
        pending = loop.create_task(use("left behind"))
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        asyncio.run(use("after"))
        pending._log_destroy_pending = False  # type: ignore[attr-defined]
        del pending

    def test_cancelled_callers_harm_nobody(self, quick: str) -> None:
        """Half of a crowd gives up while the server is slow: the others get their answers, and the store works on."""
        with FaultProxy(quick) as proxy, opened(proxy.url, timeout=60.0) as store:
            hold(store, "first")
            verbs = store.for_asyncio()

            async def crowd() -> None:
                proxy.stall()
                tasks = [asyncio.create_task(verbs.claim(claim_of(f"key {number}"))) for number in range(40)]
                await asyncio.sleep(0)
                for task in tasks[::2]:
                    task.cancel()
                await asyncio.sleep(0)
                proxy.heal()
                answers = await asyncio.gather(*tasks, return_exceptions=True)
                assert all(isinstance(answer, asyncio.CancelledError) for answer in answers[::2])
                assert {
                    answer.verdict for answer in answers[1::2] if not isinstance(answer, BaseException)
                } == {Verdict.CLAIMED}
                assert (await verbs.claim(claim_of("after"))).verdict is Verdict.CLAIMED

            asyncio.run(crowd())

    def test_a_closed_store_has_no_threads(self, store: DynamoDBStore) -> None:
        """Closing ends what the store began."""
        asyncio.run(store.for_asyncio().claim(claim_of("k")))
        asyncio.run(store.for_asyncio().purge())
        store.close()
        assert not [t for t in threading.enumerate() if t.name.startswith("effectonce-store")]
        with pytest.raises(StoreError):
            asyncio.run(store.for_asyncio().claim(claim_of("k")))
        assert not [t for t in threading.enumerate() if t.name.startswith("effectonce-store")]

    @FORKS
    def test_a_forked_child_has_connections_of_its_own(self, quick: str) -> None:
        """Parent and child go on with the same store, and neither reads the other's answers."""
        with FaultProxy(quick) as proxy, opened(proxy.url) as store:
            hold(store, "parent's")
            asyncio.run(store.for_asyncio().claim(claim_of("parent's, too")))
            before = proxy.connections
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    busy = claim(store, "parent's").verdict is Verdict.BUSY
                    done = (
                        asyncio.run(store.for_asyncio().claim(claim_of("child's"))).verdict is Verdict.CLAIMED
                    )
                    code = 0 if busy and done else 2
                finally:
                    os._exit(code)
            assert claim(store, "parent's").verdict is Verdict.BUSY
            assert os.waitpid(child, 0)[1] == 0
            assert proxy.connections > before
            assert claim(store, "child's").verdict is Verdict.BUSY


def _answers(store: DynamoDBStore) -> bool:
    try:
        run(store.get("k"))
    except StoreUnavailable:
        return False
    return True
