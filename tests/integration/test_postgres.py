"""What is particular to the PostgreSQL store: what can be wrong with it, round trips, connections, purge, waiting."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from tests.integration import postgres_helpers
from tests.integration.postgres_helpers import Place, Session
from tests.integration.sql_places import (
    ASKED,
    LONG,
    Colour,
    claim_of,
    claim_together,
    ending_of,
    granted,
)
from tests.integration.sql_stories import SqlStories, show_a_batch_done_in_part
from tests.servers import Server
from tests.servers.proxy import FaultProxy
from tests.unit.receiving import must_not_run

from effectonce import Message, Receiver
from effectonce._blocking import run
from effectonce._records import Completion, Ending, Renewal, State, Verdict
from effectonce.errors import StoreError, StoreMismatch, StoreUnavailable, UsageError
from effectonce.ops.cli import main
from effectonce.stores import _postgres_sql, open_store
from effectonce.stores._postgres_steps import CLAIMED, id_of
from effectonce.stores.postgres import LANES, PostgresStore
from effectonce.testing.clocks import wait_until

FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


place, colour, driver = postgres_helpers.FIXTURES


class TestPostgreSQL(SqlStories):
    """The stories of every SQL store."""

    lanes, loop_connections = LANES, LANES + 1
    unfit = claim_of("zero \x00")

    def leave_purges(self, store: Any) -> None:
        store.for_asyncio().count = lambda new_claims: None


# What can be wrong

URLS = {
    "postgresql://user:hush@host/db?tabel=x": '"tabel"',
    "postgresql+asyncpg://user:hush@host/db?tabel=x": '"tabel"',
    "postgresql://user:hu%sh@host/db": "libpq",
    "postgresql://user:hush@host/db?timeout=soon": "timeout=SECONDS",
    "postgresql://user:hush@host/db?pool=some": "pool=NUMBER",
    "postgresql://user:hush@host/db?create=maybe": "create=yes|no",
    "postgresql://user:hush@host/db?prepare=": "prepare=yes|no",
    "postgresql://user:hush@host/db?table=Ünfit": "table=",
    'postgresql://user:hush@host/db?table=a"b': "table=",
    "postgresql://user:hush@host/db?schema=a.b": "schema=",
    f"postgresql://user:hush@host/db?table={'t' * 59}": "table=",
    "postgresql://user:hush@host/db?timeout=0": "timeout=",
    "postgresql://user:hush@host/db?timeout=nan": "timeout=",
    "postgresql://user:hush@host/db?pool=0": "pool=",
    "postgresql://user:hush@host/db?durability=some": "durability=",
}


@pytest.mark.parametrize("url", URLS)
def test_a_wrong_url_says_what_is_wrong(url: str) -> None:
    """Every mistake in a URL is named, and the password is not."""
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert URLS[url] in str(caught.value)
    assert "hush" not in str(caught.value)
    assert "hu%sh" not in str(caught.value)


def test_drivers_are_imported_when_a_store_is_opened() -> None:
    """`import effectonce` knows of no driver, and nobody needs asyncpg who does not ask for it."""
    code = (
        "import sys, effectonce, effectonce.stores as s\n"
        "assert not {'psycopg', 'asyncpg'} & set(sys.modules)\n"
        "s.open_store('postgresql://host/db')\n"
        "assert 'psycopg' in sys.modules and 'asyncpg' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("driver", "extra"), [("psycopg", "postgres"), ("asyncpg", "asyncpg")])
def test_a_missing_driver_is_named_with_its_extra(driver: str, extra: str) -> None:
    """Without the driver the error says what to install."""
    code = (
        f"import sys; sys.modules[{driver!r}] = None\n"
        "from effectonce.stores import open_store\n"
        "from effectonce.errors import MissingExtra\n"
        "try: open_store('postgresql+asyncpg://host/db')\n"
        f"except MissingExtra as error: assert {driver!r} in str(error) and 'effectonce[{extra}]' in str(error)\n"
        "else: sys.exit(1)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_wrong_password(place: Place, colour: Colour) -> None:
    """The server turns us away: it says so, and not what was tried."""
    place.password, right = "hush", place.password
    with place.store(driver=colour.driver) as store, pytest.raises(StoreUnavailable) as caught:
        colour.run(colour.of(store).claim(claim_of()))
    assert f'password authentication failed for user "{place.user}"' in str(caught.value)
    assert "hush" not in str(caught.value)
    place.password = right


def test_a_wrong_database(place: Place, colour: Colour) -> None:
    """A database that does not exist is not made."""
    place.database = "nowhere"
    with (
        place.store(driver=colour.driver) as store,
        pytest.raises(StoreUnavailable, match='"nowhere" does not'),
    ):
        colour.run(colour.of(store).claim(claim_of()))


def test_a_closed_store_says_so(place: Place, driver: str) -> None:
    """Nobody is sent to look after the server's address."""
    store = place.store(driver=driver)
    run(store.now())
    store.close()
    assert not store.health().ok
    assert store.health().detail.endswith("is closed.")


def test_a_server_that_hangs(place: Place, colour: Colour) -> None:
    """What is not answered in time is StoreUnavailable; when the server goes on, so does the store."""
    with FaultProxy(place.admin_url) as proxy, place.store(proxy.url, colour.driver, timeout=1.5) as store:
        verbs = colour.of(store)
        held = granted(colour.run(verbs.claim(claim_of())))
        assert colour.run(verbs.scan()) == [held], "which may take long, and then what follows may not"
        proxy.stall()
        started = time.monotonic()
        for verb in (verbs.claim(claim_of()), verbs.get("k"), verbs.now()):
            with pytest.raises(StoreUnavailable):
                colour.run(verb)
        assert time.monotonic() - started < 10
        proxy.heal()
        assert colour.run(verbs.get("k")) == held


def test_a_missing_table_is_made_only_when_allowed(place: Place) -> None:
    """create=no leaves the database as it is, and says how to make the table."""
    with place.store(create="no") as store:
        with pytest.raises(StoreMismatch, match="effectonce migrate"):
            run(store.claim(claim_of()))
        with place.session() as session:
            assert session("SELECT to_regclass(%s)", place.table) == [(None,)]
            session(store.ddl())
            session(f"GRANT ALL ON {place.table} TO {place.user}")
        assert run(store.claim(claim_of())).verdict is Verdict.CLAIMED


def test_a_role_that_may_not_create(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the right to create, somebody who has it runs `effectonce migrate`; then the usual rights do."""
    with place.session() as session:
        session(f"REVOKE CREATE ON SCHEMA public FROM {place.user}")
    with place.store() as store:
        with pytest.raises(StoreMismatch, match=r"permission denied for schema public.*effectonce migrate"):
            run(store.claim(claim_of()))
        admin = f"{place.admin_url}?table={place.table}"
        assert main(["migrate", admin, "--print"]) == 0
        assert capsys.readouterr().out == store.ddl()
        assert main(["migrate", admin]) == 0
        assert "has just been made" in capsys.readouterr().out
        assert main(["migrate", admin]) == 0
        assert "is ready" in capsys.readouterr().out
        with place.session() as session:
            session(f"GRANT SELECT ON {place.table} TO {place.user}")
        with pytest.raises(StoreMismatch, match=r"permission denied.*Grant this role"):
            run(store.claim(claim_of()))
        with place.session() as session:
            session(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {place.table} TO {place.user}")
        decision = run(store.claim(claim_of()))
        assert run(store.complete(ending_of(decision))) is Ending.DONE
        assert run(store.purge()) == 0
        assert run(store.stats()).keys == 1


def test_a_table_in_a_schema(place: Place) -> None:
    """The schema is used when it is there, and not made when it isn't."""
    schema = f"s{place.table}"
    with place.store(schema=schema) as store, pytest.raises(StoreMismatch, match="does not exist"):
        run(store.claim(claim_of()))
    with place.session() as session:
        session(f"CREATE SCHEMA {schema} AUTHORIZATION {place.user}")
        with place.store(schema=schema) as store:
            assert run(store.claim(claim_of())).verdict is Verdict.CLAIMED
        with place.store() as other:
            assert run(other.claim(claim_of())).verdict is Verdict.CLAIMED
        assert session(f"SELECT key FROM {schema}.{place.table}") == [("k",)]
        session(f"DROP SCHEMA {schema} CASCADE")


@pytest.mark.parametrize("rotate", [None, "1h"])
@pytest.mark.parametrize("by", ["url", "path"])
def test_a_schema_that_was_renamed(place: Place, rotate: str | None, by: str) -> None:
    """New keys go to the table that is meant, also if another one has the old name now; who may not mend it is told."""
    old, new = f"a{place.table}", f"b{place.table}"
    rotating: dict[str, object] = {"rotate": rotate} if rotate else {}

    def store(schema: str, **options: object) -> PostgresStore:
        if by == "url":
            return place.store(schema=schema, **rotating, **options)
        session(f"ALTER ROLE {place.user} SET search_path = {schema}")
        return place.store(**rotating, **options)

    def keys(schema: str) -> list[str]:
        return [key for (key,) in session(f"SELECT key FROM {schema}.{place.table} ORDER BY key")]

    with place.session() as session:
        session(f"CREATE SCHEMA {old} AUTHORIZATION {place.user}")
        with store(old) as before:
            run(before.claim(claim_of("first")))
        session(f"ALTER SCHEMA {old} RENAME TO {new}")
        session(f"CREATE SCHEMA {old} AUTHORIZATION {place.user}")
        with store(old) as another:
            run(another.claim(claim_of("another's")))
        with store(new, create="no") as unable, pytest.raises(StoreMismatch, match=r"renamed.*migrate"):
            run(unable.claim(claim_of("refused")))
        for _ in range(2):
            with store(new) as after:
                assert run(after.claim(claim_of("first"))).verdict is Verdict.BUSY
                run(after.claim(claim_of("second")))
                run(after.purge())
        with store(new, create="no") as mended:
            run(mended.claim(claim_of("third")))
        assert keys(new) == ["first", "second", "third"]
        assert keys(old) == ["another's"]
        session(f"DROP SCHEMA {old}, {new} CASCADE")


@pytest.mark.parametrize("rotate", [None, "1h"])
def test_sessions_that_quote_every_name(place: Place, rotate: str | None) -> None:
    """Whoever made the table, nothing was renamed."""
    rotating: dict[str, object] = {"rotate": rotate} if rotate else {}
    with place.session() as session:
        for key, quotes in enumerate(("on", "off", "on")):
            session(f"ALTER ROLE {place.user} SET quote_all_identifiers = {quotes}")
            with place.store(create="no" if key else "yes", **rotating) as store:
                assert run(store.claim(claim_of(f"{key}"))).verdict is Verdict.CLAIMED


def test_rows_that_may_be_hidden(place: Place, colour: Colour) -> None:
    """Under row level security a key that is done may look new, or can't be ended: such a table is refused."""
    with place.session() as session:
        with place.store() as store:
            run(store.purge())
        session(f"ALTER TABLE {place.table} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY")
        with place.store(driver=colour.driver) as store:
            with pytest.raises(StoreMismatch, match=r"Row level security.*BYPASSRLS"):
                colour.run(colour.of(store).claim(claim_of()))
            session(f"ALTER ROLE {place.user} BYPASSRLS")
            assert colour.run(colour.of(store).claim(claim_of())).verdict is Verdict.CLAIMED


@pytest.mark.parametrize("granted", ["SELECT, INSERT", "SELECT, INSERT, UPDATE (fence)", "SELECT"])
def test_a_role_that_may_not_do_everything(place: Place, colour: Colour, granted: str) -> None:
    """One that could begin and not end is told before anything runs. Who only looks may do so."""
    with place.session() as session:
        with place.store() as store:
            run(store.claim(claim_of("known")))
        session(f"REVOKE ALL ON {place.table} FROM {place.user}")
        session(f"GRANT {granted} ON {place.table} TO {place.user}")
        with place.store(driver=colour.driver) as store:
            verbs: Any = colour.of(store)
            with pytest.raises(StoreMismatch, match="Grant this role SELECT, INSERT, UPDATE and DELETE"):
                colour.run(verbs.claim(claim_of("new")))
            if granted == "SELECT":
                assert colour.run(verbs.get("known")) is not None
        if "INSERT" in granted:
            with (
                Receiver(place.url()) as receiver,
                psycopg.connect(place.url().partition("?")[0]) as own,
                pytest.raises(StoreMismatch, match="what it began it could not end"),
            ):
                receiver.on(own).process(Message("new"), must_not_run)
        session(f"GRANT ALL ON {place.table} TO {place.user}")
        with place.store(driver=colour.driver) as store:
            assert colour.run(colour.of(store).get("new")) is None


def test_another_programs_table(place: Place, colour: Colour) -> None:
    """A table that is not ours is left alone."""
    with place.session() as session:
        session(f"CREATE TABLE {place.table} (key text PRIMARY KEY, state integer)")
        session(f"INSERT INTO {place.table} VALUES ('k', 7)")
        with place.store(driver=colour.driver) as store:
            verbs: Any = colour.of(store)
            for _ in range(2):
                with pytest.raises(StoreMismatch, match="another program"):
                    colour.run(verbs.claim(claim_of()))
            with pytest.raises(StoreMismatch, match="another program"):
                colour.run(verbs.migrate())
        assert session(f"SELECT * FROM {place.table}") == [("k", 7)]


def test_a_server_that_is_too_old(place: Place, colour: Colour, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named with the oldest that will do."""
    monkeypatch.setattr(_postgres_sql, "OLDEST_SERVER", 99)
    with (
        place.store(driver=colour.driver) as store,
        pytest.raises(StoreMismatch, match=r"PostgreSQL \d+.*99"),
    ):
        colour.run(colour.of(store).claim(claim_of()))


def test_a_database_that_can_not_hold_every_key(place: Place) -> None:
    """In LATIN1 a key might be bent; it is refused before it is."""
    name = f"latin_{place.table}"
    with place.session() as session:
        session(f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
        try:
            with (
                open_store(place.admin_url.rpartition("/")[0] + f"/{name}") as store,
                pytest.raises(StoreMismatch, match="LATIN1"),
            ):
                run(store.claim(claim_of()))
        finally:
            session(f"DROP DATABASE {name} WITH (FORCE)")


def test_a_corrupt_record(place: Place) -> None:
    """A state that nobody knows is neither guessed at nor overwritten, and harms no other key."""
    with place.store() as store, place.session() as session:
        run(store.claim(claim_of()))
        session(f"UPDATE {place.table} SET state = 39")
        before = session(f"SELECT * FROM {place.table}")
        for verb in (store.claim(claim_of()), store.get("k"), store.scan()):
            with pytest.raises(StoreMismatch, match="does not know"):
                run(verb)
        assert session(f"SELECT * FROM {place.table}") == before
        answers = claim_together(store, [claim_of("k"), claim_of("other"), claim_of("k")])
        assert isinstance(answers[0], StoreMismatch)
        assert isinstance(answers[2], StoreMismatch)
        assert answers[1].verdict is Verdict.CLAIMED


def test_a_table_made_anew_under_a_running_store(place: Place) -> None:
    """Statements that were prepared for a table that is gone are prepared again for the one that is there."""
    with place.store() as store, place.session() as session:
        run(store.claim(claim_of()))
        session(f"ALTER TABLE {place.table} RENAME TO {place.table}_old")
        with place.store() as another:
            run(another.migrate())
        assert run(store.claim(claim_of())).verdict is Verdict.CLAIMED
        session(f"DROP TABLE {place.table}_old")


def test_a_server_that_may_forget(start_server: Callable[..., Server]) -> None:
    """One that acknowledges before it has written is refused, however often, unless that is said to be meant."""
    server = start_server("postgres", fsync="off")
    with open_store(f"{server.url}?durability=server") as store:
        held = run(store.claim(claim_of()))
        assert held.verdict is Verdict.CLAIMED
    with open_store(server.url) as store:
        for verb in (lambda: store.claim(claim_of()), lambda: store.complete(ending_of(held))) * 2:
            with pytest.raises(StoreMismatch, match=r"fsync.*durability=server"):
                run(verb())


def test_a_role_that_does_not_wait_for_the_disk(place: Place) -> None:
    """synchronous_commit may be off for a role only; it is found there too."""
    with place.session() as session:
        session(f"ALTER ROLE {place.user} SET synchronous_commit = off")
    with place.store() as store, pytest.raises(StoreMismatch, match="synchronous_commit"):
        run(store.claim(claim_of()))


def test_a_role_with_peculiar_settings(place: Place, colour: Colour) -> None:
    """Isolation, encodings, formats, time zones and planner settings of a role change nothing."""
    peculiar = {
        "default_transaction_isolation": "serializable",
        "client_encoding": "latin1",
        "DateStyle": "German",
        "IntervalStyle": "sql_standard",
        "TimeZone": "Asia/Kolkata",
        "extra_float_digits": "-15",
        "bytea_output": "escape",
        "standard_conforming_strings": "off",
        "enable_indexscan": "off",
        "lc_messages": "C",
        "search_path": "pg_catalog",
    }
    with place.session() as session:
        for name, value in peculiar.items():
            session(f"ALTER ROLE {place.user} SET {name} = '{value}'")
    with place.store(driver=colour.driver, schema="public") as store:
        verbs = colour.of(store)
        for key in ("straße", "STRASSE", "日本 😀", "a\\'b\"", "a ", "a", "A"):
            decision = colour.run(verbs.claim(claim_of(key)))
            assert decision.verdict is Verdict.CLAIMED
            assert granted(decision) == colour.run(verbs.get(key))
            assert colour.run(verbs.complete(ending_of(decision, b"\x00'\\\"\xff"))) is Ending.DONE
            assert colour.run(verbs.claim(claim_of(key))).record.result == b"\x00'\\\"\xff"
        assert abs(colour.run(verbs.now()) - time.time()) < 60
        assert colour.run(verbs.stats()).keys == 7


@pytest.mark.parametrize("unfit", [claim_of("\ud800"), claim_of("zero \x00")], ids=["surrogate", "zero"])
def test_what_does_not_fit_is_its_own_callers_error(place: Place, colour: Colour, unfit: Any) -> None:
    """A key that is no text for PostgreSQL: nothing is cut off or stored."""
    with place.store(driver=colour.driver) as store:
        verbs = colour.of(store)
        for _ in range(2):
            with pytest.raises(UsageError):
                colour.run(verbs.claim(unfit))
        assert colour.run(verbs.get(unfit.key)) is None
        assert colour.run(verbs.claim(claim_of())).verdict is Verdict.CLAIMED
        assert colour.run(verbs.stats()).keys == 1


def test_large_results(place: Place, colour: Colour) -> None:
    """A result may be larger than what a socket takes at once, on its way there and back, alone and in a batch."""
    large = random.Random(3).randbytes(5 << 20)
    with place.store(driver=colour.driver) as store:
        verbs = colour.of(store)
        decisions = colour.run(verbs.claim_many([claim_of(f"key {number}") for number in range(4)]))
        assert colour.run(verbs.complete(ending_of(decisions[0], large))) is Ending.DONE
        endings = [ending_of(decision, large) for decision in decisions[1:]]
        assert colour.run(verbs.complete_many(endings)) == [Ending.DONE] * 3
        for decision in decisions:
            assert colour.run(verbs.get(decision.record.key)).result == large


# Round trips


def test_round_trips(place: Place, colour: Colour) -> None:
    """New 2, duplicate 1, renewal 1, a hundred of them no more, a takeover 2: counted on the wire."""
    with FaultProxy(place.admin_url) as proxy, place.store(proxy.url, colour.driver) as store:
        ours = colour.of(store)

        def trips(verb: Any) -> tuple[int, Any]:
            before = proxy.bursts
            answer = colour.run(verb)
            return proxy.bursts - before, answer

        def life(key: str) -> None:
            one, decision = trips(ours.claim(claim_of(key)))
            record = granted(decision)
            renewed, _ = trips(ours.renew(Renewal(key, record.owner, record.fence, LONG, LONG)))
            saved, _ = trips(ours.renew(Renewal(key, record.owner, record.fence, LONG, LONG, b"journal")))
            two, ending = trips(ours.complete(ending_of(decision)))
            duplicate, decision = trips(ours.claim(claim_of(key)))
            assert (ending, decision.verdict) == (Ending.DONE, Verdict.REPLAY)
            if key != "warm up":
                assert (one, renewed, saved, two, duplicate) == (1, 1, 1, 1, 1)

        def lives(name: str) -> None:
            claims = [claim_of(f"{name} {number}") for number in range(100)]
            one, decisions = trips(ours.claim_many(claims))
            renewals = [Renewal(d.record.key, d.record.owner, d.record.fence, LONG, LONG) for d in decisions]
            renewed, answers = trips(ours.renew_many(renewals))
            journals = [renewal._replace(progress=renewal.key.encode()) for renewal in renewals]
            saved, _ = trips(ours.renew_many(journals))
            two, endings = trips(ours.complete_many([ending_of(decision) for decision in decisions]))
            duplicates, decisions = trips(ours.claim_many([c._replace(owner=b"B" * 16) for c in claims]))
            assert (answers, endings) == ([True] * 100, [Ending.DONE] * 100)
            assert {decision.verdict for decision in decisions} == {Verdict.REPLAY}
            if name != "warm up":
                assert (one, renewed, saved, two, duplicates) == (1, 1, 1, 1, 1)

        life("warm up")
        life("k")
        with place.session() as session:  # a purge rides along with a batch, on a connection of its own
            session(f"ALTER TABLE {place.table} SET (autovacuum_enabled = off)")
        store.count = lambda new_claims: None  # type: ignore[method-assign]
        ours.count = lambda new_claims: None  # type: ignore[attr-defined]
        lives("warm up")
        lives("k")
        for attempts in (2, 4):
            decision = colour.run(ours.claim(claim_of("released")))
            colour.run(ours.release("released", decision.record.owner, decision.record.fence, LONG))
            again, decision = trips(ours.claim(claim_of("released")))
            assert granted(decision).attempts == attempts
            colour.run(ours.release("released", decision.record.owner, decision.record.fence, LONG))
        assert again == 2


def test_a_duplicate_writes_nothing(place: Place, start_server: Callable[..., Server]) -> None:
    """Replays leave the server's log where it was, and a new key adds less than 650 bytes to it."""
    server = start_server("postgres", autovacuum="off", checkpoint_timeout="1h", max_wal_size="4GB")
    with open_store(server.url) as store, Session(server.url) as session:

        def live(key: str) -> None:
            run(store.complete(ending_of(run(store.claim(claim_of(key))), b"x" * 102)))

        keys = [f"{number:032}-key" for number in range(600)]
        for key in keys[:100]:  # the first pages of a table are logged whole
            live(key)
        before = session.log_position()
        for key in keys[100:]:
            live(key)
        assert (session.log_position() - before) / 500 < 650
        for _ in range(2):
            before = session.log_position()
            for key in keys:
                assert run(store.claim(claim_of(key))).verdict is Verdict.REPLAY
        assert session.log_position() == before


def test_bytes_per_key(start_server: Callable[..., Server]) -> None:
    """36 characters of key, a fingerprint and 102 bytes of result take less than 300 bytes, index included."""
    server = start_server("postgres", fsync="off", synchronous_commit="off", autovacuum="off")
    chance = random.Random(7)
    with open_store(f"{server.url}?durability=server") as store:
        for _ in range(10_000):
            claim = claim_of(f"{chance.getrandbits(144):036x}", fingerprint=b"f" * 16)
            run(store.complete(ending_of(run(store.claim(claim)), b"x" * 102)))
        stats = run(store.stats())
        assert stats.bytes / stats.keys < 300


def test_the_end_of_an_attempt_touches_no_index(start_server: Callable[..., Server]) -> None:
    """Endings are updates in place, as PostgreSQL counts them, as long as their page has room."""
    server = start_server("postgres", fsync="off", synchronous_commit="off", autovacuum="off")
    with open_store(f"{server.url}?durability=server") as store, Session(server.url) as session:
        for number in range(500):
            run(store.complete(ending_of(run(store.claim(claim_of(f"key {number}"))))))
        store.close()
        query = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'effectonce'"
        wait_until(lambda: session(query)[0][0] == 500)
        assert session(query)[0][1] > 450


def test_without_prepared_statements(place: Place, colour: Colour) -> None:
    """Behind a pooler nothing may be left in a session: nothing is prepared, nothing is set."""
    with place.store(driver=colour.driver, prepare="no") as store:
        verbs = colour.of(store)
        decision = colour.run(verbs.claim(claim_of()))
        assert colour.run(verbs.complete(ending_of(decision))) is Ending.DONE
        assert colour.run(verbs.claim(claim_of())).verdict is Verdict.REPLAY
        many = colour.run(verbs.claim_many([claim_of(f"key {number}") for number in range(10)]))
        assert {decision.verdict for decision in many} == {Verdict.CLAIMED}
        assert colour.run(verbs.watch(many[0].record, 1.0)) is False
        if not colour.driver:  # asyncpg prepares a statement of its own to learn about types

            async def prepared() -> Any:
                count = _postgres_sql.Statement("", "SELECT count(*) FROM pg_prepared_statements")
                return await verbs.run([_postgres_sql.Call(count)])  # type: ignore[attr-defined]

            assert colour.run(prepared()) == [[(0,)]]


# Failures stay with those they belong to


def test_a_batch_that_is_done_in_part(place: Place, colour: Colour) -> None:
    """The server tells what it has changed; each caller hears whether it was its own."""
    show_a_batch_done_in_part(place, colour)


def test_a_record_that_somebody_keeps_locked(place: Place) -> None:
    """It holds up its own caller, for so long; the others who shared the statement are answered."""
    with place.store(timeout=1.0) as store, place.session() as session:
        verbs = store.for_asyncio()

        async def crowd() -> list[Any]:
            held = [await verbs.claim(claim_of(f"key {number}")) for number in range(8)]
            session("BEGIN")
            session(f"SELECT * FROM {place.table} WHERE key = 'key 3' FOR UPDATE")
            endings = [verbs.complete(ending_of(decision)) for decision in held]
            return await asyncio.gather(*endings, return_exceptions=True)

        answers = asyncio.run(crowd())
        assert isinstance(answers.pop(3), StoreUnavailable)
        assert answers == [Ending.DONE] * 7


def keep_open(session: Session, place: Place, key: str) -> None:
    """Begin a transaction that has put a record in place, as a call in atomic mode does."""
    session("BEGIN")
    session(
        f"SELECT {place.table}_put('{uuid.UUID(bytes=id_of(key))}', '{key}', '{ASKED.decode()}', {CLAIMED}, 60, 60, '')"
    )


def test_a_key_that_an_open_transaction_has(place: Place, colour: Colour) -> None:
    """It is busy; whoever else is claimed in the same statement is served; and it is there when that commits."""
    with place.store(driver=colour.driver) as store, place.session() as session:
        verbs = colour.of(store)
        colour.run(verbs.claim(claim_of("other")))
        keep_open(session, place, "k")
        for _ in range(2):  # who comes later does not wait
            assert colour.run(verbs.claim(claim_of("k"))).verdict is Verdict.BUSY
        decisions = colour.run(verbs.claim_many([claim_of(key) for key in ("a", "k", "z")]))
        assert [decision.verdict.name for decision in decisions] == ["CLAIMED", "BUSY", "CLAIMED"]
        session("COMMIT")
        decision = colour.run(verbs.claim(claim_of("k")))
        assert decision.verdict is Verdict.BUSY
        assert decision.record is not None


def test_a_key_that_an_open_transaction_gives_up(place: Place) -> None:
    """Who waits for it gets it."""
    with place.store() as store, place.session() as session:
        run(store.claim(claim_of("other")))
        receiver = Receiver(store)
        message = Message(id="1", payload={}, source="s")
        receiver.process(message, lambda _: 1)
        ((key,),) = session(f"DELETE FROM {place.table} WHERE key <> 'other' RETURNING key")
        keep_open(session, place, key)
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(receiver.process, message, lambda _: 2)
            wait_until(lambda: receiver.stats().since_start.counts.get("waited", 0) > 0)
            session("ROLLBACK")
            assert answer.result(30).value == 2


def test_a_handler_in_a_transaction_that_asks_for_its_own_key_outside_of_it(place: Place) -> None:
    """It would wait for the transaction that waits for it: it is told at once."""
    with place.store() as store, place.session() as session:
        run(store.migrate())
        receiver = Receiver(store)
        message = Message(id="1", payload={}, source="s")
        with pytest.raises(UsageError, match="wait for itself"), session.connection.transaction():
            receiver.on(session.connection).process(
                message, lambda _: receiver.process(message, lambda _: 2).value
            )
        assert receiver.process(message, lambda _: 3).value == 3


def test_who_looks_while_the_table_is_made(place: Place) -> None:
    """A table that is newer than what a statement sees is not there for it, rather than there without its comment."""
    with place.store() as store, place.session() as session:
        session("BEGIN ISOLATION LEVEL REPEATABLE READ")
        session("SELECT 1")
        run(store.claim(claim_of()))
        whose = (
            _postgres_sql.Statements(f'"{place.table}"').one["whose"].text.replace("$1", f"'{place.table}'")
        )
        assert session(whose) == []
        session("COMMIT")
        assert len(session(whose)) == 1


# Connections


def test_threads_share_connections(place: Place) -> None:
    """However many threads there are, no more are open than was said."""
    with place.store(pool=3) as store, ThreadPoolExecutor(24) as threads:
        barrier = threading.Barrier(24)

        def work(number: int) -> Ending:
            barrier.wait()
            for turn in range(4):
                ending = run(store.complete(ending_of(run(store.claim(claim_of(f"{number} {turn}"))))))
            return ending

        assert set(threads.map(work, range(24))) == {Ending.DONE}
        assert 1 <= len(place.connections()) <= 3
    wait_until(lambda: not place.connections(), what="The end of the connections")


def test_a_pool_of_one(place: Place) -> None:
    """One connection is enough for everything, purges included."""
    with place.store(pool=1) as store:
        for number in range(80):
            assert run(store.complete(ending_of(run(store.claim(claim_of(f"key {number}")))))) is Ending.DONE
        assert len(place.connections()) == 1


def test_a_loop_that_ended_in_disorder(place: Place) -> None:
    """A loop that was closed with its connections open is no trouble for the next, and they end with it."""
    with place.store() as store:
        verbs = store.for_asyncio()
        loop = asyncio.new_event_loop()
        assert loop.run_until_complete(verbs.claim(claim_of("a"))).verdict is Verdict.CLAIMED
        loop.close()
        del loop
        gc.collect()
        wait_until(lambda: not place.connections(), what="The end of the connections")
        assert asyncio.run(verbs.claim(claim_of("a"))).verdict is Verdict.BUSY


@FORKS
@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
@pytest.mark.parametrize("colour", ["blocking"], indirect=True)
def test_a_child_leaves_its_parents_connections_alone(place: Place, colour: Colour) -> None:
    """After a fork both go on, each over connections of its own; also when a loop had some."""
    with place.store() as store, asyncio.Runner() as runner:
        decision = run(store.claim(claim_of()))
        runner.run(store.for_asyncio().get("k"))
        parents = sorted(place.connections())
        child = os.fork()
        if child == 0:
            code = 1
            try:
                other = run(store.claim(claim_of("child")))
                run(store.complete(ending_of(other)))
                asyncio.run(store.for_asyncio().claim(claim_of("child's loop")))
                gc.collect()
                code = 0 if run(store.claim(claim_of())).verdict is Verdict.BUSY else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert run(store.complete(ending_of(decision))) is Ending.DONE
        assert runner.run(store.for_asyncio().get("child")).state is State.COMPLETED
        wait_until(lambda: sorted(place.connections()) == parents, what="The end of the child's connections")


def test_many_who_make_the_table_at_once(place: Place) -> None:
    """One of them makes it; nobody fails."""
    stores = [place.store() for _ in range(8)]
    assert claimed_at_once(stores) == ["BUSY"] * 7 + ["CLAIMED"]


def claimed_at_once(stores: list[PostgresStore]) -> list[str]:
    """What each of them says of one key, sorted."""
    barrier = threading.Barrier(len(stores))

    def begin(store: PostgresStore) -> str:
        barrier.wait()
        return run(store.claim(claim_of())).verdict.name

    with ThreadPoolExecutor(len(stores)) as threads:
        verdicts = sorted(threads.map(begin, stores))
    for store in stores:
        store.close()
    return verdicts


def test_many_who_find_a_table_renamed(place: Place) -> None:
    """One of them makes the function beside it anew; nobody fails."""
    old, new = f"a{place.table}", f"b{place.table}"
    with place.session() as session:
        session(f"CREATE SCHEMA {old} AUTHORIZATION {place.user}")
        with place.store(schema=old) as store:
            run(store.purge())
        session(f"ALTER SCHEMA {old} RENAME TO {new}")
        assert claimed_at_once([place.store(schema=new) for _ in range(8)]) == ["BUSY"] * 7 + ["CLAIMED"]
        session(f"DROP SCHEMA {new} CASCADE")


# Purge


def test_traffic_alone_keeps_the_table_bounded(place: Place, colour: Colour) -> None:
    """New keys pay for forgetting the old ones, beside the traffic."""
    with place.store(driver=colour.driver) as store, place.session() as session:
        verbs = colour.of(store)
        sizes = []
        for turn in range(12):
            for number in range(60):
                decision = colour.run(verbs.claim(claim_of(f"{number * 7919 % 100_003:06} {turn}")))
                assert colour.run(verbs.complete(ending_of(decision, keep=0.001))) is Ending.DONE
            sizes.append(session(f"SELECT count(*) FROM {place.table}")[0][0])
        assert max(sizes) < 360


def test_short_lived_processes_keep_the_table_bounded(place: Place) -> None:
    """A process that lives for a few dozen keys does its share, and not all do the same one."""
    for life in range(40):
        with place.store() as store:
            for number in range(70):
                decision = run(store.claim(claim_of(f"{life} {number}")))
                run(store.complete(ending_of(decision, keep=0.001)))
    with place.session() as session:
        assert session(f"SELECT count(*) FROM {place.table}")[0][0] < 1400


def test_what_is_revived_is_not_forgotten(place: Place) -> None:
    """A key that is claimed again while the hand is at it stays; whoever is at a record just now keeps it."""
    with place.store() as store, place.session() as session:
        for key in ("a", "b"):
            run(store.complete(ending_of(run(store.claim(claim_of(key))), keep=0.001)))
        now = run(store.now())
        wait_until(lambda: run(store.now()) > now + 0.01)
        session("BEGIN")
        session(f"SELECT * FROM {place.table} WHERE key = 'a' FOR UPDATE")
        assert run(store.purge()) == 1
        session("ROLLBACK")
        revived = granted(run(store.claim(claim_of("a"))))
        assert run(store.purge()) == 0
        assert run(store.get("a")) == revived
        assert run(store.get("b")) is None


def test_a_large_table_is_counted_by_a_sample(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting stays cheap; what a sample suggests is not far from what is there."""
    with place.store() as store:
        for start in range(0, 20_000, 500):
            claims = [claim_of(f"key {number}") for number in range(start, start + 500)]
            decisions = run(store.claim_many(claims))
            run(store.complete_many([ending_of(decision) for decision in decisions[::2]]))
        assert run(store.stats()).by_state == {"PENDING": 10_000, "COMPLETED": 10_000}
        monkeypatch.setattr("effectonce.stores._postgres_verbs.COUNTED_PAGES", 100)
        stats = run(store.stats())
        assert 10_000 < stats.keys < 40_000
        assert set(stats.by_state) == {"PENDING", "COMPLETED"}


# Waiting


def held_elsewhere(place: Place, key: str = "k") -> tuple[PostgresStore, Completion]:
    """Another process's claim, and how it would end it."""
    other = place.store()
    return other, ending_of(run(other.claim(claim_of(key))))


@pytest.mark.parametrize("colour", ["blocking", "asyncio"], indirect=True)
def test_who_waits_is_told(place: Place, colour: Colour) -> None:
    """A waiter in another process hears of the end; it has marked the record, and the end is as good as any."""
    other, ending = held_elsewhere(place)
    with other, place.store() as store:
        verbs = colour.of(store)
        record = colour.run(verbs.get("k"))
        ender = threading.Thread(target=end_when_marked, args=(place, other, ending))
        ender.start()
        started = time.monotonic()
        assert colour.run(verbs.watch(record, 30.0)) is True
        assert time.monotonic() - started < 20
        ender.join()
        assert colour.run(verbs.claim(claim_of())).verdict is Verdict.REPLAY
        assert colour.run(verbs.watch(record, 30.0)) is True, "who comes too late need not wait"


def end_when_marked(place: Place, store: PostgresStore, ending: Completion) -> None:
    with place.session() as session:
        wait_until(lambda: session(f"SELECT state & 16 FROM {place.table}") == [(16,)])
    assert run(store.complete(ending)) is Ending.DONE


def test_nobody_is_told_when_nobody_waits(place: Place) -> None:
    """The end of a record that nobody watches is no notification; nor is that of the next attempt at it."""
    with place.store() as store, place.session() as session:
        session(f"LISTEN {place.table}")
        for number in range(20):
            run(store.complete(ending_of(run(store.claim(claim_of(f"key {number}"))))))
        record = granted(run(store.claim(claim_of())))
        assert run(store.watch(record, 1.0)) is True
        run(store.release("k", record.owner, record.fence, LONG))
        again = run(store.claim(claim_of()))
        run(store.complete(ending_of(again)))
        told = list(session.connection.notifies(timeout=0.2))
        assert len(told) == 1


@pytest.mark.parametrize("colour", ["blocking", "asyncio"], indirect=True)
def test_a_mark_is_in_nobodys_way(place: Place, colour: Colour) -> None:
    """A watched record is read, renewed, taken over and ended as any other, and reads the same."""
    with place.store(driver=colour.driver) as store:
        verbs = colour.of(store)
        held = granted(colour.run(verbs.claim(claim_of()._replace(lease=0.05))))
        assert colour.run(verbs.watch(held, 1.0)) is True
        assert colour.run(verbs.get("k")) == held
        assert colour.run(verbs.renew(Renewal("k", held.owner, held.fence, 0.05, LONG))) is True
        wait_until(lambda: colour.run(verbs.claim(claim_of())).verdict is Verdict.TAKEN_OVER)
        taken = colour.run(verbs.get("k"))
        assert colour.run(
            verbs.complete(Completion("k", taken.owner, taken.fence, State.FAILED, b"e", LONG))
        ) is (Ending.DONE)
        assert colour.run(verbs.get("k")).attempts == 2


def test_waiters_share_one_connection(place: Place) -> None:
    """Sixteen who wait for sixteen records listen together; when the connection is gone they look by themselves."""
    holders = [held_elsewhere(place, f"key {number}") for number in range(16)]
    with place.store() as store, ThreadPoolExecutor(16) as threads:
        before = len(place.connections())
        records = [run(store.get(f"key {number}")) for number in range(16)]
        waits = [threads.submit(lambda record=record: run(store.watch(record, 30.0))) for record in records]
        with place.session() as session:
            marked = f"SELECT count(*) FROM {place.table} WHERE state & 16 <> 0"
            wait_until(lambda: session(marked) == [(16,)])
            for other, ending in holders[:8]:
                run(other.complete(ending))
            assert [wait.result(20) for wait in waits[:8]] == [True] * 8
            listening = "SELECT pid FROM pg_stat_activity WHERE usename = %s AND query LIKE 'LISTEN%%'"
            ((pid,),) = session(listening, place.user)
            session("SELECT pg_terminate_backend(%s)", pid)
            assert [wait.result(20) for wait in waits[8:]] == [False] * 8
        assert before > 0
    for other, _ in holders:
        other.close()


def test_a_waiting_duplicate_through_receivers(place: Place) -> None:
    """The second process gets the first one's result without having looked more than twice."""
    with Receiver(place.url()) as first, Receiver(place.url()) as second, ThreadPoolExecutor(2) as threads:
        started, gate = threading.Event(), threading.Event()

        def handle(message: Message) -> str:
            started.set()
            gate.wait(30)
            return "receipt"

        running = threads.submit(first.process, Message("m"), handle)
        started.wait(30)
        waiting = threads.submit(second.process, Message("m"), lambda message: "another")
        with place.session() as session:
            wait_until(lambda: session(f"SELECT state & 16 FROM {place.table}") == [(16,)])
        gate.set()
        assert (running.result(30).value, waiting.result(30).value) == ("receipt", "receipt")


# Exactness


def test_keys_of_any_length(place: Place) -> None:
    """Each is a key of its own and comes back whole, however long, and however alike."""
    chance = random.Random(9)
    long = "".join(chr(chance.randrange(0x4E00, 0x9FFF)) for _ in range(5000))
    keys = [long, long + "a", long + "b", long[:-1], "short"]
    with place.store() as store:
        for key in keys:
            assert granted(run(store.claim(claim_of(key)))).key == key
        for key in keys:
            assert run(store.claim(claim_of(key))).verdict is Verdict.BUSY
        assert [record.key for record in run(store.scan())] == sorted(keys)


def test_errors_are_errors_of_the_tree(place: Place, colour: Colour) -> None:
    """A server that goes away in the middle of anything is a StoreError in every verb."""
    with FaultProxy(place.admin_url) as proxy, place.store(proxy.url, colour.driver) as store:
        verbs: Any = colour.of(store)
        decision = colour.run(verbs.claim(claim_of()))
        proxy.refuse()
        proxy.cut()
        for verb in (
            verbs.claim(claim_of()), verbs.complete(ending_of(decision)), verbs.get("k"), verbs.purge(),
            verbs.scan(), verbs.stats(), verbs.now(), verbs.migrate(), verbs.watch(decision.record, 1.0),
        ):  # fmt: skip
            with pytest.raises(StoreError):
                assert not colour.run(verb)
                raise StoreUnavailable("watch says no")
