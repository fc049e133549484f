"""A PostgreSQL store that rotates: nobody gets a key twice while slots turn, and nothing that lives is emptied."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import Any
from uuid import UUID

import psycopg
import pytest
from tests.integration import postgres_helpers
from tests.integration.postgres_helpers import Place, Ring, Session, drop, turning
from tests.integration.sql_places import ASKED, LONG, Colour, Effects, claim_of, ending_of, granted
from tests.servers import Server

from effectonce import Message, Policy, Receiver
from effectonce._blocking import run
from effectonce._records import Completion, Decision, Ending, Renewal, State, Verdict
from effectonce.errors import StoreMismatch
from effectonce.ops.cli import main
from effectonce.stores import open_store
from effectonce.stores._postgres_steps import CLAIMED, id_of
from effectonce.stores._steps import Read
from effectonce.stores.postgres import PostgresStore
from effectonce.testing.clocks import wait_until
from effectonce.transactions import adapt, is_retryable
from effectonce.transactions._postgres_store import InPostgres

place, colour, driver = postgres_helpers.FIXTURES


def claim_one_by_one(store: PostgresStore, keys: list[str], granted: Counter[str]) -> None:
    for key in keys:
        granted[key] += run(store.claim(claim_of(key))).verdict is Verdict.CLAIMED


def claim_in_batches(store: PostgresStore, keys: list[str], granted: Counter[str]) -> None:
    for start in range(0, len(keys), 20):
        decisions = run(store.claim_many([claim_of(key) for key in keys[start : start + 20]]))
        for key, decision in zip(keys[start : start + 20], decisions, strict=True):
            granted[key] += decision.verdict is Verdict.CLAIMED


def claim_on_a_loop(store: PostgresStore, keys: list[str], granted: Counter[str]) -> None:
    async def claim() -> None:
        verbs = store.for_asyncio()
        for start in range(0, len(keys), 4):
            claims = [verbs.claim(claim_of(key)) for key in keys[start : start + 4]]
            for key, decision in zip(keys[start:], await asyncio.gather(*claims), strict=False):
                granted[key] += decision.verdict is Verdict.CLAIMED

    asyncio.run(claim())


CLAIMERS: list[Callable[[PostgresStore, list[str], Counter[str]], None]] = [
    claim_one_by_one, claim_in_batches, claim_on_a_loop,
]  # fmt: skip


@pytest.mark.parametrize(
    ("prepare", "level"),
    [("yes", "read committed"), ("no", "read committed"), ("no", "repeatable read"), ("no", "serializable")],
)
def test_every_key_is_granted_once_while_the_ring_turns(place: Place, prepare: str, level: str) -> None:
    """Nine claimers of the same keys, in each form that a claim has, across a hundred turns and more; also behind a
    pooler, where a role's own isolation holds.
    """
    keys = [f"key {number}" for number in range(600 if level == "read committed" else 100)]
    with place.session() as session:
        session(f"ALTER ROLE {place.user} SET default_transaction_isolation = '{level}'")
    with place.store(rotate="1h", prepare=prepare) as store, ThreadPoolExecutor(9) as threads:
        run(store.migrate())
        with turning(place.admin_url, place.table, least=100):
            counts = [Counter[str]() for _ in range(9)]
            for done in [
                threads.submit(CLAIMERS[number % 3], store, keys, counts[number]) for number in range(9)
            ]:
                done.result()
        assert sum(counts, Counter()) == Counter(keys)
        assert run(store.stats()).keys == len(keys)


def claims_alone(store: PostgresStore, url: str) -> Verdict:
    return run(store.claim(claim_of("k"))).verdict


def claims_in_a_batch(store: PostgresStore, url: str) -> Verdict:
    return run(store.claim_many([claim_of("k"), claim_of("other")]))[0].verdict


def claims_on_a_loop(store: PostgresStore, url: str) -> Verdict:
    return asyncio.run(store.for_asyncio().claim(claim_of("k"))).verdict


def claims_in_a_transaction(store: PostgresStore, url: str) -> Verdict:
    with psycopg.connect(url) as connection:
        return run(InPostgres(adapt(connection), store).open(claim_of("k"), "here")).verdict


@pytest.mark.parametrize(
    "claim", [claims_alone, claims_in_a_batch, claims_on_a_loop, claims_in_a_transaction]
)
def test_a_claim_that_looked_before_the_ring_turned(place: Place, claim: Callable[..., Verdict]) -> None:
    """It found nothing; then somebody claimed the key, and the ring turned; then it goes on. It sees both."""
    with place.store(rotate="1h") as store, place.session() as other, ThreadPoolExecutor(1) as thread:
        run(store.claim(claim_of("before")))
        with place.session() as watcher, other.connection.transaction():
            other(f"LOCK TABLE {place.table} IN SHARE MODE")
            late = thread.submit(claim, store, place.admin_url)
            wait_until(lambda: waits(watcher))
            put(other, place, "k")
            other(f"UPDATE {place.table}_ring SET slot = 1")
        assert late.result() is Verdict.BUSY
        assert other(f"SELECT slot FROM {place.table} WHERE key = 'k'") == [(0,)]


def waits(session: Session) -> bool:
    return bool(session("SELECT 1 FROM pg_locks WHERE NOT granted AND relation IS NOT NULL"))


def put(session: Session, place: Place, key: str) -> None:
    """Claim a key as any session may."""
    record = (UUID(bytes=id_of(key)), key, ASKED, CLAIMED, 60.0, 60.0, b"somebody")
    session(f"SELECT {place.table}_put(%s, %s, %s, %s, %s, %s, %s)", *record)


# Transactions whose snapshot is older than a turn

OLDER = ["REPEATABLE READ", "SERIALIZABLE"]


class Desk:
    """A user's connection, and a receiver whose store rotates."""

    def __init__(self, place: Place, connection: psycopg.Connection[Any], store: PostgresStore) -> None:
        self.connection, self.effects = connection, Effects()
        self.receiver = Receiver(store)

    def begin(self, level: str) -> None:
        """Begin, and look at something, so that what is seen from now on is what was there."""
        self.connection.execute(f"BEGIN ISOLATION LEVEL {level}".encode())
        self.connection.execute("SELECT count(*) FROM pg_class")

    def process(self, id: str, **policy: Any) -> str:
        on = self.receiver.on(self.connection)
        return on.process(
            Message(id), self.effects.handle, policy=Policy(**policy) if policy else None
        ).status


@pytest.fixture
def ring(place: Place) -> Iterator[Ring]:
    with place.session() as session:
        yield Ring(session, place.table)


@pytest.fixture
def store(place: Place) -> Iterator[PostgresStore]:
    with place.store(rotate="1h") as store:
        run(store.migrate())
        yield store


@pytest.fixture
def desk(place: Place, store: PostgresStore) -> Iterator[Desk]:
    with psycopg.connect(place.admin_url, autocommit=True) as connection:
        yield Desk(place, connection, store)


@pytest.mark.parametrize("level", OLDER)
def test_an_older_snapshot_is_refused_after_a_turn(ring: Ring, desk: Desk, level: str) -> None:
    """Its transaction can't see who claimed the key since: it is told to run again, and then gets the answer."""
    desk.begin(level)
    ring.turn()
    assert desk.receiver.process(Message("m"), desk.effects.handle).status == "executed"
    with pytest.raises(psycopg.errors.SerializationFailure) as refused:
        desk.process("m")
    assert is_retryable(refused.value)
    desk.connection.rollback()
    desk.begin(level)
    assert desk.process("m") == "replayed"
    desk.connection.commit()
    assert desk.effects.runs == {"m": 1}


@pytest.mark.parametrize("level", OLDER)
def test_an_older_snapshot_is_refused_after_a_record_has_moved(ring: Ring, desk: Desk, level: str) -> None:
    """A record that it saw where now nothing is, and does not see where it moved to, is not taken for a new key."""
    assert desk.receiver.process(Message("m"), desk.effects.handle).status == "executed"
    ring.turn()
    ring.turn()
    desk.begin(level)
    ring.step()
    ring.step()
    assert ring.rows() == [0, 0, 1]
    with pytest.raises(psycopg.errors.SerializationFailure):
        desk.process("m")
    desk.connection.rollback()
    assert desk.effects.runs == {"m": 1}


@pytest.mark.parametrize("level", ["READ COMMITTED", *OLDER])
def test_an_open_transaction_delays_the_ring_and_nobody_else(
    place: Place, ring: Ring, desk: Desk, store: PostgresStore, level: str
) -> None:
    """While a user's transaction has claimed a key, no slot turns; every other key is claimed and ended as ever."""
    desk.begin(level)
    assert desk.process("m") == "executed"
    before = ring.slot
    began = time.monotonic()
    assert ring.step(pause=LONG) is False
    assert time.monotonic() - began < 5
    decisions = run(store.claim_many([claim_of("a"), claim_of("b")]))
    decisions.append(run(store.claim(claim_of("c"))))
    assert [run(store.complete(ending_of(decision))) for decision in decisions] == [Ending.DONE] * 3
    assert ring.slot == before
    desk.connection.commit()
    assert ring.step() is False, "whoever else comes by leaves it alone for a while"
    assert ring.slot == before
    ring.rest()
    ring.turn()
    assert desk.receiver.process(Message("m"), desk.effects.handle).status == "replayed"


def test_whatever_keeps_a_slot_from_being_emptied_is_left_alone_for_a_while(
    place: Place, ring: Ring, store: PostgresStore
) -> None:
    """The slot itself is not all that has to be had: its lock is let go, and nobody tries again at once."""
    expired(store)
    for _ in range(2):
        ring.turn()
    assert ring.step() is True
    with place.session() as session:
        session("BEGIN")
        session(f"SELECT slot FROM {place.table}_ring FOR SHARE")
        assert ring.step(pause=LONG) is False
        session("ROLLBACK")
    assert ring.step() is False
    assert ring.rows() == [1, 0, 0]
    ring.rest()
    ring.turn()
    assert ring.rows() == [0, 0, 0]


def test_claims_wait_for_a_turn_and_no_longer(place: Place, ring: Ring, store: PostgresStore) -> None:
    """A claim that meets a turn goes on as soon as that is over: it does not take it for a key that somebody has."""
    run(store.claim(claim_of("before")))
    with place.session() as other, ThreadPoolExecutor(1) as thread, place.session() as watcher:
        with other.connection.transaction():
            other(f"LOCK TABLE {place.table} IN SHARE MODE")
            late = thread.submit(lambda: run(store.claim(claim_of("k"))))
            wait_until(lambda: waits(watcher))
            held = time.monotonic()
            wait_until(lambda: time.monotonic() > held + 0.02)  # ten times as long as it waits for a key
        released = time.monotonic()
        assert late.result().verdict is Verdict.CLAIMED
        assert time.monotonic() - released < 0.2


# What lives outlives


def test_what_lives_outlives_its_slot(ring: Ring, store: PostgresStore) -> None:
    """A doubt, an attempt that may be made only once, one that goes on and what is kept for long; as they were."""
    for key in ("in doubt", "running", "kept"):
        run(store.claim(claim_of(key)))
    run(store.claim(claim_of("once", once=True)._replace(lease=0.001, keep=0.001)))
    run(store.claim(claim_of("gone")._replace(lease=0.001, keep=0.001)))
    held = run(store.get("in doubt"))
    assert held is not None
    doubt = Completion("in doubt", held.owner, held.fence, State.IN_DOUBT, None, 0.001)
    assert run(store.complete(doubt)) is Ending.DONE
    kept = run(store.get("kept"))
    assert kept is not None
    run(store.complete(Completion("kept", kept.owner, kept.fence, State.COMPLETED, b"result", LONG)))
    now = run(store.now())
    wait_until(lambda: run(store.now()) > now + 0.01)
    before = run(store.scan())
    assert [record.key for record in before] == ["in doubt", "kept", "once", "running"]
    for _ in range(7):
        ring.turn()
        assert run(store.scan()) == before
    assert sum(ring.rows()) == 4
    running = run(store.get("running"))
    assert running is not None
    ending = Completion("running", running.owner, running.fence, State.COMPLETED, b"", LONG)
    assert run(store.complete(ending)) is Ending.DONE


def test_many_that_live_are_waited_for(ring: Ring, store: PostgresStore) -> None:
    """A slot in which more than a few live is not emptied, and its turn has to wait."""
    run(store.claim_many([claim_of(f"key {number}") for number in range(100)]))
    for _ in range(2):
        ring.turn()
    for _ in range(3):
        assert ring.step(few=64) is False
    assert (ring.slot, ring.rows()) == (2, [100, 0, 0])
    ring.turn(few=100)
    assert (ring.slot, ring.rows()) == (0, [0, 0, 100])


def test_how_far_another_server_was_says_nothing(place: Place, ring: Ring, store: PostgresStore) -> None:
    """Where the row that says so was restored or replicated, a file of the same number is gone through anew."""
    run(store.claim_many([claim_of(f"key {number}") for number in range(100)]))
    for _ in range(2):
        ring.turn()
    with place.session() as session:
        sweep = f"{place.table}_sweep"
        session(f"CREATE TEMP TABLE copied AS TABLE {sweep}")
        session(f"UPDATE copied SET file = pg_relation_filenode('{place.table}_0'), page = 1000")
        session(f"TRUNCATE {sweep}")
        session(f"INSERT INTO {sweep} SELECT * FROM copied")
    for _ in range(3):
        assert ring.step(few=64) is False
    assert ring.rows() == [100, 0, 0]


@pytest.mark.parametrize("pages", [1, 2])
def test_a_slot_is_gone_through_in_steps(ring: Ring, store: PostgresStore, pages: int) -> None:
    """Each goes on where the last one was."""
    for number in range(5):
        claims = [claim_of(f"{number} {each}")._replace(lease=0.001, keep=0.001) for each in range(100)]
        run(store.claim_many(claims))
    now = run(store.now())
    wait_until(lambda: run(store.now()) > now + 0.01)
    for _ in range(2):
        ring.turn()
    steps = 0
    while sum(ring.rows()):
        assert ring.step(pages=pages, period=LONG) is True
        steps += 1
        assert steps < 100
    assert steps > 3


@pytest.mark.parametrize("verb", ["complete", "renew", "save", "release", "take over"])
def test_whatever_changes_a_record_takes_it_along(ring: Ring, store: PostgresStore, verb: str) -> None:
    """Closed slots only lose: a record that is changed is in the current slot then, and safe when its old one goes."""
    claim = claim_of("k")._replace(lease=0.001) if verb == "take over" else claim_of("k")
    decision = run(store.claim(claim))
    record = granted(decision)
    ring.turn()
    if verb == "complete":
        assert run(store.complete(ending_of(decision))) is Ending.DONE
    elif verb == "release":
        assert run(store.release("k", record.owner, record.fence, LONG)) is Ending.DONE
    elif verb == "take over":
        wait_until(lambda: run(store.claim(claim_of("k"))).verdict is Verdict.TAKEN_OVER)
    else:
        progress = b"journal" if verb == "save" else None
        assert run(store.renew(Renewal("k", record.owner, record.fence, LONG, LONG, progress))) is True
    assert ring.rows() == [0, 1, 0]
    changed = run(store.get("k"))
    ring.turn()
    ring.turn()
    assert run(store.get("k")) == changed


def test_an_ending_on_its_way_is_not_lost_with_its_slot(
    place: Place, ring: Ring, store: PostgresStore
) -> None:
    """A record that is ended in time, by a transaction that commits only when its time is over, is there afterwards."""
    decision = run(store.claim(claim_of("k")._replace(lease=0.1, keep=0.1)))
    ring.turn()
    ring.turn()
    with place.session() as session:
        session("BEGIN")
        slow = InPostgres(adapt(session.connection), store)
        assert run(slow.complete(ending_of(decision))) is Ending.DONE
        late = granted(decision).expires_at
        wait_until(lambda: run(store.now()) > late)
        ring.step()  # sees one that has expired, and goes by
        assert ring.step() is False
        session("COMMIT")
    ring.turn()
    assert run(store.claim(claim_of("k"))).verdict is Verdict.REPLAY


# What has expired is gone


def expired(store: PostgresStore, key: str = "k") -> Decision:
    """A claim whose lease and keep are over."""
    decision = run(store.claim(claim_of(key)._replace(lease=0.001, keep=0.001)))
    until = granted(decision).expires_at
    wait_until(lambda: run(store.now()) > until)
    return decision


@pytest.mark.parametrize("turns", range(4))
def test_a_late_ending_is_fenced_and_never_lost(ring: Ring, store: PostgresStore, turns: int) -> None:
    """Who comes when the keep is over is told so, in whichever slot the record is, and changes nothing."""
    late = expired(store)
    record = granted(late)
    for _ in range(turns):
        ring.turn()
    assert run(store.get("k")) is None
    assert run(store.complete(ending_of(late))) is Ending.FENCED
    assert run(store.renew(Renewal("k", record.owner, record.fence, LONG, LONG))) is False
    assert run(store.release("k", record.owner, record.fence, LONG)) is Ending.FENCED
    again = granted(run(store.claim(claim_of("k"))))
    assert again.fence > record.fence
    assert run(store.complete(ending_of(late))) is Ending.FENCED
    assert run(store.get("k")) == again


@pytest.mark.parametrize("turns", range(4))
def test_what_has_expired_is_no_shadow_of_what_came_after(
    ring: Ring, store: PostgresStore, turns: int
) -> None:
    """Whoever reads, lists or counts sees one record for a key; alone, in a batch and among others."""
    for key in ("a", "b", "c"):
        expired(store, key)
    for _ in range(turns):
        ring.turn()
    assert run(store.stats()).expired == (3 if turns < 3 else 0)
    first = granted(run(store.claim(claim_of("a"))))
    second, third = (granted(each) for each in run(store.claim_many([claim_of("b"), claim_of("d")])))
    assert run(store.scan()) == [first, second, third]
    assert run(store.scan(State.PENDING)) == [first, second, third]
    stats = run(store.stats())
    assert (stats.keys - stats.expired, stats.by_state) == (3, {"PENDING": stats.keys})
    assert stats.expired == (1 if turns < 3 else 0)
    while run(store.stats()).expired:
        run(store.purge())
    assert run(store.scan()) == [first, second, third]


def test_of_two_rows_of_a_key_the_higher_fence_counts(place: Place, ring: Ring, store: PostgresStore) -> None:
    """When the server's clock is set back, what had expired is there again, behind what was claimed since."""
    expired(store)
    ring.turn()
    decision = run(store.claim(claim_of("k")))
    run(store.complete(ending_of(decision)))
    with place.session() as session:
        session(f"UPDATE {place.table}_0 SET expires_at = expires_at + 3600")
        assert session(f"SELECT count(*) FROM {place.table}") == [(2,)]
    for claimed in (
        run(store.claim(claim_of("k"))),
        run(store.claim_many([claim_of("k"), claim_of("l")]))[0],
    ):
        assert claimed.verdict is Verdict.REPLAY
    with psycopg.connect(place.admin_url) as connection:
        verbs = InPostgres(adapt(connection), store)
        for _ in range(2):
            assert run(verbs.open(claim_of("k"), "here")).verdict is Verdict.REPLAY


@pytest.mark.parametrize("older", [0, 2])
def test_of_two_rows_of_a_key_the_higher_fence_counts_beside_a_key_that_is_absent(
    place: Place, ring: Ring, store: PostgresStore, older: int
) -> None:
    """Both are read at once, as on a loop: the newer row of the one, whatever slot it is in, and none of the other."""
    expired(store)
    ring.turn()
    run(store.complete(ending_of(run(store.claim(claim_of("k"))))))
    with place.session() as session:
        session(f"UPDATE {place.table} SET expires_at = expires_at + 3600, slot = {older} WHERE slot = 0")
    found, nothing = run(store.send([Read("k"), Read("absent")]))
    assert (found.record.state, nothing.record) == (State.COMPLETED, None)


# By itself


PERIOD = 0.1


def test_traffic_turns_the_ring_and_leaves_nothing_dead(
    place: Place, colour: Colour, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that come and go are forgotten without a row that is deleted, and take no room afterwards."""
    monkeypatch.setattr(
        "effectonce.stores._postgres_rotation.LATE", inf
    )  # on a slow machine the hand would help
    with place.store(driver=colour.driver, rotate=f"{PERIOD}s") as store, place.session() as session:
        verbs: Any = colour.of(store)
        numbers = itertools.count()
        began = time.monotonic()

        def is_emptied() -> bool:
            for _ in range(64):
                decision = colour.run(verbs.claim(claim_of(f"key {next(numbers)}")))
                assert colour.run(verbs.complete(ending_of(decision, keep=0.001))) is Ending.DONE
            return bool(session(f"SELECT emptied FROM {place.table}_ring") >= [(2,)])

        colour.run(verbs.now())
        wait_until(is_emptied, seconds=60)
        most_turns = (time.monotonic() - began) / PERIOD + 1
    made = next(numbers)
    with place.session() as session:
        ring = Ring(session, place.table)
        wait_until(lambda: ring.counted("n_tup_ins") >= made)
        assert ring.counted("n_tup_del") <= most_turns, "the one that was on its way when the ring turned"
        for _ in range(3):
            ring.turn()
        size = f"SELECT sum(pg_relation_size(relid)) FROM pg_partition_tree('{place.table}')"
        assert session(size) == [(0,)]


def test_when_slots_can_not_be_emptied_the_hand_goes_on(place: Place) -> None:
    """Many that are kept for long hold a slot up; what expires beside them is deleted then, as without slots."""
    with place.store(rotate="20ms") as store, place.session() as session:
        run(store.claim_many([claim_of(f"kept {number}") for number in range(200)]))
        ring, numbers = Ring(session, place.table), itertools.count()

        def is_deleted() -> bool:
            for _ in range(64):
                decision = run(store.claim(claim_of(f"key {next(numbers)}")))
                run(store.complete(ending_of(decision, keep=0.001)))
            return sum(ring.rows()) < 200 + next(numbers) / 2

        wait_until(is_deleted, seconds=60)
        stats = run(store.stats())
        assert stats.keys - stats.expired >= 200


def test_purge_turns_the_ring_too(ring: Ring, place: Place) -> None:
    """Where there is no traffic, whoever calls purge() does both: turn, and delete what has expired."""
    with place.store(rotate="1ms") as store:
        expired(store)
        assert run(store.purge()) + run(store.purge()) + run(store.purge()) == 1
        slots = {ring.slot for _ in range(20) if run(store.purge()) == 0}
        assert slots == {0, 1, 2}


def test_a_clock_that_was_set_back_does_not_stop_the_ring(place: Place, ring: Ring) -> None:
    """What was written while the clock was far ahead is not waited for: neither by the ring, nor by the hand."""
    with place.store(rotate="1ms") as store, place.session() as session:
        run(store.migrate())
        session(f"UPDATE {place.table}_ring SET began = began + 1e9")
        session(f"UPDATE {place.table}_sweep SET rests_until = {run(store.now())} + 1e9")
        run(store.purge())
        assert ring.slot == 1
        run(store.claim_many([claim_of(f"kept {number}") for number in range(100)]))
        session(f"UPDATE {place.table} SET slot = 0")
        session(f"UPDATE {place.table}_ring SET slot = 2, began = began + 1e9")
    with place.store(rotate="20ms") as store:
        numbers = itertools.count()

        def is_deleted() -> bool:
            for _ in range(64):
                decision = run(store.claim(claim_of(f"key {next(numbers)}")))
                run(store.complete(ending_of(decision, keep=0.001)))
            return sum(ring.rows()) < 100 + next(numbers) / 2

        wait_until(is_deleted)


# What can be wrong


def test_a_table_that_was_made_otherwise(place: Place, colour: Colour) -> None:
    """Neither kind of store takes the other's table for its own; it says what to do, and changes nothing."""
    other = f"{place.table}_plain"
    with place.store(rotate="1h") as store, place.store(table=other) as plain:
        run(store.claim(claim_of()))
        run(plain.claim(claim_of()))
    for table, options, advice in (
        (place.table, {}, "rotate=6h"),
        (other, {"rotate": "1h"}, "Leave rotate="),
    ):
        with place.store(driver=colour.driver, table=table, **options) as store:
            verbs: Any = colour.of(store)
            for verb in (verbs.claim, lambda _, verbs=verbs: verbs.migrate()):
                with pytest.raises(StoreMismatch, match=advice):
                    colour.run(verb(claim_of()))
    with place.session() as session:
        drop(session, other)


def test_a_table_that_was_made_otherwise_in_a_transaction(place: Place) -> None:
    """Nor when a user's connection is the first to see it."""
    other = f"{place.table}_plain"
    with place.store(rotate="1h") as store, place.store(table=other) as plain:
        run(store.migrate())
        run(plain.migrate())
    for table, options, advice in (
        (place.table, {}, "rotate=6h"),
        (other, {"rotate": "1h"}, "Leave rotate="),
    ):
        receiver = Receiver(place.url(table=table, **options))
        with psycopg.connect(place.admin_url) as connection:
            for _ in range(2):
                with pytest.raises(StoreMismatch, match=advice):
                    receiver.on(connection).process(Message("m"), lambda message: 1)
        receiver.close()
    with place.session() as session:
        drop(session, other)


def test_another_period_is_no_other_table(place: Place) -> None:
    """How often a table turns may be changed at any time."""
    for rotate in ("1h", "6h"):
        with place.store(rotate=rotate) as store:
            assert run(store.claim(claim_of(rotate))).verdict is Verdict.CLAIMED


def test_a_role_that_lacks_a_right(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a table was made for a role, it is told at once which rights it lacks; with them all goes well."""
    admin = f"{place.admin_url}?table={place.table}&rotate=1h"
    assert main(["migrate", admin]) == 0
    table = place.table
    with place.session() as session, place.store(rotate="1ms", create="no") as store:
        assert main(["migrate", admin, "--print"]) == 0
        assert store.ddl() in capsys.readouterr().out
        for rights, names in (
            ("SELECT, INSERT, UPDATE, DELETE", [table]),
            ("SELECT, UPDATE", [f"{table}_ring", f"{table}_sweep"]),
            ("TRUNCATE", [f"{table}_0", f"{table}_1", f"{table}_2"]),
        ):
            for name in names:
                for _ in range(2):
                    with pytest.raises(StoreMismatch, match=f'GRANT {rights} ON "{name}" TO'):
                        run(store.claim(claim_of()))
                session(f"GRANT {rights} ON {name} TO {place.user}")
        assert run(store.claim(claim_of())).verdict is Verdict.CLAIMED
        ring = Ring(session, table)
        wait_until(lambda: run(store.purge()) == 0 and session(f"SELECT emptied FROM {table}_ring") > [(1,)])
        assert sum(ring.rows()) == 1
        assert run(store.stats()).keys == 1


@pytest.fixture
def home(place: Place) -> Iterator[str]:
    """The name of a role, and of its schema: its tables are made there."""
    name = f"{place.user}_home"
    with place.session() as session:
        session(f"CREATE ROLE {name} LOGIN PASSWORD 'secret'")
        session(f"CREATE SCHEMA {name} AUTHORIZATION {name}")
        yield name
        session(f"DROP OWNED BY {name} CASCADE")
        session(f"DROP ROLE {name}")


def test_a_table_in_the_schema_of_the_role_that_made_it(place: Place, home: str) -> None:
    """Another role, which comes there by its search path, writes to that table, not to one of its name elsewhere."""
    table = place.table
    with PostgresStore(place.admin_url, table=table, rotate="1h") as elsewhere, place.session() as session:
        run(elsewhere.migrate())
        session(f"SET SESSION AUTHORIZATION {home}")
        session(elsewhere.ddl())
        session("RESET SESSION AUTHORIZATION")
        path = f"-csearch_path%3D{home},public"
        with place.store(rotate="1ms", options=path) as store:
            session(f"GRANT USAGE ON SCHEMA {home} TO {place.user}")
            for schema, name in itertools.product(
                (home, "public"), ("", "_0", "_1", "_2", "_ring", "_sweep")
            ):
                session(f"GRANT ALL ON {schema}.{table}{name} TO {place.user}")
            decision = run(store.claim(claim_of("k")))
            assert run(store.complete(ending_of(decision))) is Ending.DONE
            assert run(store.purge()) == 0
        assert session(f"SELECT key FROM {home}.{table}") == [("k",)]
        assert session(f"SELECT slot FROM {home}.{table}_ring") == [(1,)]
        assert run(elsewhere.scan()) == []


def test_a_temporary_table_of_the_same_name(place: Place, store: PostgresStore, desk: Desk) -> None:
    """A user's session may have tables of such names for itself: they are not meant."""
    desk.receiver.process(Message("known"), desk.effects.handle)
    for name in (place.table, f"{place.table}_ring"):
        desk.connection.execute(f"CREATE TEMP TABLE {name} AS SELECT * FROM {name}".encode())
    with desk.connection.transaction():
        assert [desk.process(id) for id in ("known", "new", "new")] == ["replayed", "executed", "replayed"]
    assert desk.effects.runs == {"known": 1, "new": 1}
    assert len(run(store.scan())) == 2


def test_a_database_that_is_replicated(start_server: Callable[..., Server]) -> None:
    """Where all tables are published, the ring turns all the same: whatever is changed has a replica identity."""
    server = start_server("postgres")
    with Session(server.url) as session, open_store(f"{server.url}?rotate=1h") as store:
        run(store.migrate())
        session("CREATE PUBLICATION everything FOR ALL TABLES")
        decision = run(store.claim(claim_of()))
        ring = Ring(session, "effectonce")
        for _ in range(4):
            ring.turn()
        assert run(store.complete(ending_of(decision))) is Ending.DONE
        assert run(store.purge()) == 0


def test_something_that_is_left_of_another_table(place: Place) -> None:
    """What is in the way is named."""
    with place.store(rotate="1h") as store, place.session() as session:
        session(f"CREATE TABLE {place.table}_ring (slot smallint)")
        with pytest.raises(StoreMismatch, match=f'"{place.table}_ring" already exists'):
            run(store.claim(claim_of()))


@pytest.mark.parametrize("rows", [0, 2])
def test_what_says_where_the_ring_is_was_emptied_or_restored_twice(
    place: Place, ring: Ring, store: PostgresStore, rows: int
) -> None:
    """It is said what to do, by a store that was open and by one that is opened then, and nothing is forgotten."""
    known = run(store.claim(claim_of("known")))
    ring.turn()
    with place.session() as session:
        for table in (f"{place.table}_ring", f"{place.table}_sweep"):
            session(f"INSERT INTO {table} TABLE {table}" if rows else f"TRUNCATE {table}")
        with place.store(rotate="1h") as another:
            for verb in (
                lambda: store.claim(claim_of("new")),
                lambda: store.claim_many([claim_of("new"), claim_of("newer")]),
                lambda: store.purge(),
                lambda: another.claim(claim_of("new")),
            ):
                with pytest.raises(StoreMismatch, match="must hold one row each") as refused:
                    run(verb())
            _, _, statements = str(refused.value).partition("owner run: ")
            session(statements.rstrip("."))
            for each in (store, another):
                assert run(each.claim(claim_of("known"))).verdict is Verdict.BUSY
        assert run(store.complete(ending_of(known))) is Ending.DONE
        for _ in range(4):
            ring.turn()
        assert run(store.claim(claim_of("known"))).verdict is Verdict.REPLAY
