"""What is particular to the MySQL store: what can be wrong with it, its round trips, its connections, its purge."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.integration import mysql_helpers
from tests.integration.mysql_helpers import Place, Session, speak_mysql
from tests.integration.sql_places import LONG, Colour, claim_of, claim_together, ending_of, granted
from tests.integration.sql_stories import SqlStories, show_a_batch_done_in_part
from tests.servers import Server
from tests.servers.fixtures import HasURL
from tests.servers.proxy import FaultProxy

from effectonce._blocking import run
from effectonce._records import Ending, Renewal, State, Verdict
from effectonce.errors import MissingExtra, StoreError, StoreMismatch, StoreUnavailable, UsageError
from effectonce.stores import _mysql_sql, open_store
from effectonce.stores.mysql import LINES, LOOP_LINES, MySQLStore
from effectonce.testing.clocks import wait_until

FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


place, colour, driver = mysql_helpers.FIXTURES


class TestMySQL(SqlStories):
    """The stories of every SQL store."""

    lanes = loop_connections = LOOP_LINES
    unfit = claim_of("key 7", fingerprint=b"x" * 300)


# What can be wrong

URLS = {
    "mysql://user:hush@host:3306": "names no database",
    "mysql://user:hush@host:3306/": "names no database",
    "mysql://user:hush@host:3306/a/b": "names no database",
    "mysql://user:hu#sh@host:3306/a": "names no database",
    "mariadb://user:hush@host:port/db": "a port or an option",
    "mysql://user:hush@host:0/db": "a port or an option",
    "mariadb://user:hush@host/db?tabel=x": "table=NAME",
    "mysql://user:hush@host/db?timeout=soon": "timeout=SECONDS",
    "mysql://user:hush@host/db?create=maybe": "create=yes|no",
    "mysql://user:hush@host/db?table=Ünfit": "table=",
    "mysql://user:hush@host/db?table=a`b": "table=",
    "mysql://user:hush@host/db?timeout=0": "timeout=",
    "mysql://user:hush@host/db?timeout=nan": "timeout=",
    "mysql://user:hush@host/db?durability=some": "durability=",
    "mysql://user:hush@host/db?tls=perhaps": "tls=",
}


@pytest.mark.parametrize("url", URLS)
def test_a_wrong_url_says_what_is_wrong(url: str) -> None:
    """Every mistake in a URL is named, and the password is not."""
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert URLS[url] in str(caught.value)
    assert "hush" not in str(caught.value)


def test_options_of_a_url(mariadb: HasURL) -> None:
    """Both schemes, and everything that may stand in them."""
    options = "table=t_1&create=no&timeout=2.5&durability=server&tls=verify&tls_ca=ca.pem&socket=/run/my.sock"
    for scheme in ("mysql", "mariadb"):
        store = open_store(f"{scheme}://us%40er:pa%3Ass@host:1234/d%20b?{options}")
        assert isinstance(store, MySQLStore)
        assert store.address == (
            "host", 1234, "us@er", "pa:ss", "d b", "/run/my.sock", "verify", "ca.pem", 2.5
        )  # fmt: skip
        store.close()


def test_drivers_are_imported_when_a_store_is_opened() -> None:
    """`import effectonce` knows of no driver; neither does opening the blocking colour know of asyncmy."""
    code = (
        "import sys, effectonce, effectonce.stores as s\n"
        "assert not {'pymysql', 'asyncmy'} & set(sys.modules)\n"
        "store = s.open_store('mysql://host/db')\n"
        "assert 'asyncmy' not in sys.modules\n"
        "store.for_asyncio()\n"
        "assert 'asyncmy' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_driver_that_poses_as_another() -> None:
    """PyMySQL that stands in for MySQLdb, as many have it for Django, is loaded twice; its errors are known."""
    code = (
        "import pymysql; pymysql.install_as_MySQLdb(); import MySQLdb.converters\n"
        "import effectonce\n"
        "try: effectonce.Receiver('mysql://u@127.0.0.1:9/db').process(effectonce.Message('1'), print)\n"
        "except effectonce.StoreUnavailable as error: print('told', error)\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert answer.stdout.startswith("told")


@pytest.mark.parametrize("driver", ["pymysql", "asyncmy"])
def test_a_missing_driver_is_named_with_its_extra(driver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the driver the error says what to install."""
    monkeypatch.setitem(sys.modules, driver, None)
    with pytest.raises(MissingExtra, match=rf"{driver}.*effectonce\[mysql\]"):
        open_store("mysql://host/db").for_asyncio()


def test_a_wrong_password(place: Place, colour: Colour) -> None:
    """The server turns us away: it says so, and not what was tried."""
    verbs, drive, _ = colour
    place.url()
    user, place.password = place.user, "hush"
    with (
        place.store() as store,
        pytest.raises(StoreUnavailable, match="user, password and database") as caught,
    ):
        drive(verbs(store).claim(claim_of()))
    assert user in str(caught.value)
    assert "hush" not in str(caught.value)


def test_a_wrong_database(place: Place, colour: Colour) -> None:
    """A database that does not exist is not made."""
    verbs, drive, _ = colour
    with place.session() as session:
        session(f"GRANT ALL ON nowhere.* TO {place.user}")
    place.database = "nowhere"
    with place.store() as store, pytest.raises(StoreUnavailable, match="nowhere"):
        drive(verbs(store).claim(claim_of()))


def test_a_missing_table_is_made_only_when_allowed(place: Place) -> None:
    """create=no leaves the database as it is, and says how to make the table."""
    with place.store(create="no") as store:
        with pytest.raises(StoreMismatch, match="effectonce migrate"):
            run(store.claim(claim_of()))
        with place.session() as session:
            assert session("SHOW TABLES LIKE %s", place.table) == []
            session(f"{store.ddl()}")
        assert run(store.claim(claim_of())).verdict is Verdict.CLAIMED


def test_a_user_who_may_not_create(place: Place) -> None:
    """Without the right to create, the table has to be made by somebody who has it; then the usual rights do."""
    with place.session() as session:
        session(f"REVOKE CREATE ON {place.database}.* FROM {place.user}")
    with place.store() as store:
        with pytest.raises(StoreMismatch, match=r"can't create it.*effectonce migrate"):
            run(store.claim(claim_of()))
        admin = MySQLStore.from_url(place.admin_url, {"table": place.table})
        assert run(admin.migrate()) is True
        assert run(admin.migrate()) is False
        admin.close()
        decision = run(store.claim(claim_of()))
        assert run(store.complete(ending_of(decision))) is Ending.DONE
        assert run(store.purge()) == 0
        assert run(store.stats()).keys == 1


def test_a_user_who_may_only_read(place: Place) -> None:
    """What is missing is named."""
    with place.store() as store:
        run(store.migrate())
    with place.session() as session:
        session(f"REVOKE INSERT, UPDATE, CREATE ON {place.database}.* FROM {place.user}")
    with place.store() as store, pytest.raises(StoreMismatch, match="Grant this user"):
        run(store.claim(claim_of()))


def test_another_programs_table(place: Place, colour: Colour) -> None:
    """A table that is not ours is left alone."""
    verbs, drive, _ = colour
    with place.session() as session:
        session(
            f"CREATE TABLE {place.table} (`key` VARBINARY(767) PRIMARY KEY, state INT) COMMENT = 'orders'"
        )
        session(f"INSERT INTO {place.table} VALUES ('k', 7)")
        with place.store() as store:
            for _ in range(2):
                with pytest.raises(StoreMismatch, match="another program"):
                    drive(verbs(store).claim(claim_of()))
            with pytest.raises(StoreMismatch, match="another program"):
                drive(verbs(store).migrate())
        assert session(f"SELECT * FROM {place.table}") == [(b"k", 7)]


def test_a_table_without_transactions(place: Place) -> None:
    """A table that was moved to MyISAM is refused: it would promise nothing."""
    with place.store() as store:
        run(store.migrate())
    with place.session() as session:
        session(f"ALTER TABLE {place.table} ENGINE = MyISAM, ROW_FORMAT = DYNAMIC")
    with place.store() as store, pytest.raises(StoreMismatch, match="InnoDB"):
        run(store.claim(claim_of()))


def test_a_server_that_is_too_old(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named with the oldest that will do."""
    monkeypatch.setattr(_mysql_sql, "OLDEST", {"MariaDB": (99, 0), "MySQL": (99, 0)})
    with place.store() as store, pytest.raises(StoreMismatch, match=r"MariaDB 10\.11.*MariaDB 10\.5"):
        run(store.claim(claim_of()))


def test_a_corrupt_record(place: Place) -> None:
    """A state that nobody knows is neither guessed at nor overwritten, and harms no other key."""
    with place.store() as store, place.session() as session:
        run(store.claim(claim_of()))
        session(f"UPDATE {place.table} SET state = 9")
        before = session(f"SELECT * FROM {place.table}")
        for verb in (store.claim(claim_of()), store.get("k"), store.scan()):
            with pytest.raises(StoreMismatch, match="makes no sense"):
                run(verb)
        assert session(f"SELECT * FROM {place.table}") == before
        answers = claim_together(store, [claim_of("k"), claim_of("other")])
        assert isinstance(answers[0], StoreMismatch)
        assert answers[1].verdict is Verdict.CLAIMED


@pytest.mark.parametrize(
    "settings",
    [{"innodb_flush_log_at_trx_commit": 2}, {"log_bin": "binlog", "sync_binlog": 0}],
    ids=["redo log", "binary log"],
)
def test_a_server_that_may_forget(start_server: Callable[..., Server], settings: dict[str, object]) -> None:
    """One that acknowledges before it has written is refused, unless that is said to be meant."""
    server = start_server("mariadb", **settings)
    with open_store(server.url) as store, pytest.raises(StoreMismatch, match="durability=server"):
        run(store.claim(claim_of()))
    with open_store(f"{server.url}?durability=server") as store:
        assert run(store.claim(claim_of())).verdict is Verdict.CLAIMED


def test_a_binary_log_that_can_not_take_it(start_server: Callable[..., Server]) -> None:
    """Statement-based replication does not go with the store's isolation; the error says what to set."""
    server = start_server("mariadb", log_bin="binlog", sync_binlog=1, binlog_format="STATEMENT")
    with open_store(server.url) as store, pytest.raises(StoreMismatch, match="binlog_format"):
        run(store.claim(claim_of()))


def test_a_server_with_peculiar_settings(start_server: Callable[..., Server]) -> None:
    """Character sets, SQL modes, time zones, engines and isolation of the server change nothing."""
    server = start_server(
        "mariadb",
        character_set_server="latin1",
        collation_server="latin1_swedish_ci",
        sql_mode="ANSI_QUOTES,NO_BACKSLASH_ESCAPES,PIPES_AS_CONCAT,ANSI",
        default_time_zone="+05:30",
        default_storage_engine="MyISAM",
        transaction_isolation="SERIALIZABLE",
        autocommit=0,
        lower_case_table_names=1,
    )
    with open_store(server.url) as store:
        for key in ("straße", "STRASSE", "日本 😀", "a\\'b\"", "a ", "a", "A"):
            decision = run(store.claim(claim_of(key)))
            assert decision.verdict is Verdict.CLAIMED
            assert granted(decision) == run(store.get(key))
            assert run(store.complete(ending_of(decision, b"\x00'\\\"\xff"))) is Ending.DONE
            assert run(store.claim(claim_of(key))).record.result == b"\x00'\\\"\xff"
        assert abs(run(store.now()) - time.time()) < 60
        assert run(store.stats()).keys == 7
    with Session(server.url) as session:
        (engine,) = session(
            "SELECT engine FROM information_schema.tables WHERE table_name = 'effectonce_records'"
        )
        assert engine == ("InnoDB",)


def test_what_does_not_fit_is_its_own_callers_error(place: Place, colour: Colour) -> None:
    """Too long a fingerprint, a key that is no text, a time that is none: nothing is cut off or stored."""
    verbs, drive, _ = colour
    with place.store() as store:
        for unfit in (
            claim_of("k", fingerprint=b"x" * 300),
            claim_of("k", b"o" * 300),
            claim_of("k" * 5000),
            claim_of("\ud800"),
            claim_of("k")._replace(keep=float("inf")),
        ):
            with pytest.raises(UsageError):
                drive(verbs(store).claim(unfit))
        assert drive(verbs(store).stats()).keys == 0


def test_a_result_larger_than_the_server_takes(start_server: Callable[..., Server]) -> None:
    """It is refused before it is sent; what fits one by one goes in as many packets as it needs."""
    server = start_server("mariadb", max_allowed_packet=1 << 20)
    with open_store(server.url) as store:
        decisions = run(store.claim_many([claim_of(f"key {number}") for number in range(6)]))
        with pytest.raises(UsageError, match="max_allowed_packet"):
            run(store.complete(ending_of(decisions[0], b"x" * (600 << 10))))
        endings = [
            ending_of(decision, bytes([number]) * (300 << 10)) for number, decision in enumerate(decisions)
        ]
        assert run(store.complete_many(endings)) == [Ending.DONE] * 6
        for number, replay in enumerate(run(store.claim_many([claim_of(f"key {n}") for n in range(6)]))):
            assert replay.record.result == bytes([number]) * (300 << 10)


def test_results_beyond_sixteen_megabytes(start_server: Callable[..., Server]) -> None:
    """The protocol's own limit for a packet is none for a result, on its way there or back."""
    server = start_server("mariadb", max_allowed_packet=64 << 20, innodb_log_file_size=256 << 20)
    large = random.Random(3).randbytes((1 << 24) + 5)
    with open_store(server.url) as store, asyncio.Runner() as runner:
        decision = run(store.claim(claim_of()))
        assert run(store.complete(ending_of(decision, large))) is Ending.DONE
        assert run(store.claim(claim_of())).record.result == large
        assert runner.run(store.for_asyncio().claim(claim_of())).record.result == large
        exactly = run(store.claim(claim_of("exactly")))
        run(store.complete(ending_of(exactly, b"")))
        for size in ((1 << 24) - 1 - 120, (1 << 24) - 1):
            filler = claim_of(f"size {size}")
            run(store.complete(ending_of(run(store.claim(filler)), large[:size])))
            assert run(store.get(filler.key)).result == large[:size]


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1 that nobody has signed, and its key beside it."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make a certificate with")
    made = tmp_path / "server.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(tmp_path / "server.key"), "-out", str(made)]
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names, *files],
        check=True,
        capture_output=True,
    )
    return made


def test_encrypted_connections(
    start_server: Callable[..., Server], certificate: Path, colour: Colour
) -> None:
    """tls=yes speaks to anybody, tls=verify only to whom the authority knows; a server without is refused."""
    verbs, drive, _ = colour
    server = start_server("mariadb", ssl_cert=certificate, ssl_key=certificate.with_suffix(".key"))
    with Session(server.url) as session:
        session("CREATE USER private IDENTIFIED BY 'secret' REQUIRE SSL")
        session("GRANT ALL ON effectonce.* TO private")
    url = server.url.replace("effectonce:secret@", "private:secret@")
    with open_store(url) as store, pytest.raises(StoreUnavailable, match="not open to us"):
        drive(verbs(store).claim(claim_of("a")))
    for number, options in enumerate(("tls=yes", f"tls=verify&tls_ca={certificate}")):
        with open_store(f"{url}?{options}") as store:
            decision = drive(verbs(store).claim(claim_of(f"key {number}")))
            assert drive(verbs(store).complete(ending_of(decision, b"x" * 100_000))) is Ending.DONE
            assert drive(verbs(store).claim(claim_of(f"key {number}"))).record.result == b"x" * 100_000
    with open_store(f"{url}?tls=verify") as store, pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
        drive(verbs(store).claim(claim_of("a")))
    with (
        open_store(f"{url}?tls=verify&tls_ca=nowhere.pem") as store,
        pytest.raises(UsageError, match=r"nowhere\.pem"),
    ):
        drive(verbs(store).claim(claim_of("a")))


def test_encryption_is_not_given_up(place: Place, colour: Colour) -> None:
    """Where it is asked for and the server has none, nothing is said in the open."""
    verbs, drive, _ = colour
    with place.store(tls="yes") as store, pytest.raises(StoreUnavailable, match="SSL"):
        drive(verbs(store).claim(claim_of()))


# Round trips


@pytest.mark.parametrize("words", ["MariaDB", "MySQL"])
def test_a_batch_that_is_done_in_part(
    place: Place, colour: Colour, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server only counts what it has changed; each caller hears all the same whether it was its own."""
    if words == "MySQL":
        speak_mysql(monkeypatch)
    show_a_batch_done_in_part(place, colour)


@pytest.mark.parametrize("words", ["MariaDB", "MySQL"])
def test_round_trips(place: Place, colour: Colour, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """New 2, duplicate 1, renewal 1, a hundred of them no more: counted on the wire, in either server's words."""
    verbs, drive, _ = colour
    if words == "MySQL":
        speak_mysql(monkeypatch)
    with FaultProxy(place.admin_url) as proxy, place.store(proxy.url) as store:
        ours = verbs(store)
        drive(ours.get("warm up"))

        def trips(verb: Any) -> tuple[int, Any]:
            before = proxy.bursts
            answer = drive(verb)
            return proxy.bursts - before, answer

        one, decision = trips(ours.claim(claim_of()))
        record = granted(decision)
        renewed, _ = trips(ours.renew(Renewal("k", record.owner, record.fence, LONG, LONG)))
        saved, _ = trips(ours.renew(Renewal("k", record.owner, record.fence, LONG, LONG, b"journal")))
        two, ending = trips(ours.complete(ending_of(decision)))
        assert (one, renewed, saved, two, ending) == (1, 1, 1, 1, Ending.DONE)
        duplicate, decision = trips(ours.claim(claim_of()))
        assert (duplicate, decision.verdict) == (1, Verdict.REPLAY)
        claims = [claim_of(f"key {number}") for number in range(100)]
        one, decisions = trips(ours.claim_many(claims))
        renewals = [Renewal(d.record.key, d.record.owner, d.record.fence, LONG, LONG) for d in decisions]
        renewed, answers = trips(ours.renew_many(renewals))
        journals = [renewal._replace(progress=renewal.key.encode()) for renewal in renewals]
        saved, _ = trips(ours.renew_many(journals))
        two, endings = trips(ours.complete_many([ending_of(decision) for decision in decisions]))
        assert (one, renewed, saved, two) == (1, 1, 1, 1)
        assert (answers, endings) == ([True] * 100, [Ending.DONE] * 100)
        duplicates, decisions = trips(ours.claim_many([claim._replace(owner=b"B" * 16) for claim in claims]))
        assert duplicates == 1
        assert {decision.verdict for decision in decisions} == {Verdict.REPLAY}


def test_a_duplicate_writes_nothing(start_server: Callable[..., Server]) -> None:
    """Replays leave the server's log where it was."""
    server = start_server("mariadb")
    with open_store(server.url) as store, Session(server.url) as session:
        run(store.complete(ending_of(run(store.claim(claim_of())))))
        quiet = [-1, session.status("Innodb_os_log_written")]

        def is_quiet() -> bool:
            quiet.append(session.status("Innodb_os_log_written"))
            return quiet[-1] == quiet[-2]

        wait_until(is_quiet)
        before = session.status("Innodb_lsn_current")
        for _ in range(200):
            run(store.claim(claim_of()))
        assert session.status("Innodb_lsn_current") - before < 200


# Failures stay with those they belong to


def test_a_failing_claim_fails_its_own_thread_only(place: Place) -> None:
    """The same for threads."""
    with place.store() as store, ThreadPoolExecutor(32) as threads:
        barrier = threading.Barrier(32)

        def claim(number: int) -> Any:
            asked = claim_of(f"key {number}", fingerprint=b"x" * (300 if number % 8 == 0 else 16))
            barrier.wait()
            try:
                return run(store.claim(asked)).verdict
            except UsageError as error:
                return type(error)

        answers = list(threads.map(claim, range(32)))
        assert answers == [UsageError if number % 8 == 0 else Verdict.CLAIMED for number in range(32)]


# Connections


def test_threads_share_a_few_connections(place: Place) -> None:
    """However many threads there are."""
    with place.store() as store, ThreadPoolExecutor(48) as threads:
        barrier = threading.Barrier(48)

        def work(number: int) -> Ending:
            barrier.wait()
            for turn in range(4):
                ending = run(store.complete(ending_of(run(store.claim(claim_of(f"{number} {turn}"))))))
            return ending

        assert set(threads.map(work, range(48))) == {Ending.DONE}
        assert 1 <= len(place.connections()) <= LINES
    wait_until(lambda: not place.connections(), what="The end of the connections")


def test_a_loop_that_ended_in_disorder(place: Place) -> None:
    """A loop that was closed with its connections open is no trouble for the next."""
    with place.store() as store:
        verbs = store.for_asyncio()
        loop = asyncio.new_event_loop()
        assert loop.run_until_complete(verbs.claim(claim_of("a"))).verdict is Verdict.CLAIMED
        loop.close()
        assert asyncio.run(verbs.claim(claim_of("a"))).verdict is Verdict.BUSY
        with pytest.warns(ResourceWarning):
            del loop
            gc.collect()
        wait_until(lambda: not place.connections(), what="The end of the connections")


@FORKS
@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_a_child_leaves_its_parents_connections_alone(place: Place) -> None:
    """After a fork both go on, each over connections of its own."""
    with place.store() as store:
        decision = run(store.claim(claim_of()))
        parents = place.connections()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                other = run(store.claim(claim_of("child")))
                run(store.complete(ending_of(other)))
                gc.collect()
                code = 0 if run(store.claim(claim_of())).verdict is Verdict.BUSY else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert run(store.complete(ending_of(decision))) is Ending.DONE
        assert place.connections() == parents
        assert run(store.get("child")).state is State.COMPLETED


# Purge


def test_traffic_alone_keeps_the_table_bounded(place: Place) -> None:
    """New keys pay for forgetting the old ones, without a round trip of its own."""
    with FaultProxy(place.admin_url) as proxy, place.store(proxy.url) as store:
        sizes = []
        for turn in range(12):
            before = proxy.bursts
            for number in range(60):
                decision = run(store.claim(claim_of(f"{number * 7919 % 100_003:06} {turn}")))
                assert run(store.complete(ending_of(decision, keep=0.001))) is Ending.DONE
            if turn:
                assert proxy.bursts - before == 120
            with place.session() as session:
                sizes.append(session(f"SELECT COUNT(*) FROM {place.table}")[0][0])
        assert max(sizes) < 240


def test_short_lived_processes_keep_the_table_bounded(place: Place) -> None:
    """A process that lives for a few dozen keys does its share, and not all do the same one."""
    chance = random.Random(1)
    for _ in range(60):
        with place.store() as store:
            for _ in range(36):
                decision = run(store.claim(claim_of(f"{chance.getrandbits(64):016x}")))
                run(store.complete(ending_of(decision, keep=0.001)))
    with place.session() as session:
        assert session(f"SELECT COUNT(*) FROM {place.table}")[0][0] < 600


def test_what_is_revived_is_not_forgotten(place: Place) -> None:
    """Between the look and the forgetting a key may be claimed again; then it stays."""
    with place.store() as store:
        for key in ("a", "b"):
            run(store.complete(ending_of(run(store.claim(claim_of(key))), keep=0.001)))
        now = run(store.now())
        wait_until(lambda: run(store.now()) > now + 0.01)
        line = store._lanes[0].lines._idle[0]
        purging = store.stepper.purge(256)
        told = run(line.ask(next(purging)))
        looked = run(line.ask(purging.send(told)))
        revived = granted(run(store.claim(claim_of("a"))))
        (forgetting,) = purging.send(looked)
        assert run(line.ask([forgetting]))[0].changed == 1
        assert run(store.get("a")) == revived
        assert run(store.get("b")) is None


# Exactness


def test_keys_too_long_for_an_index(place: Place) -> None:
    """Each is a key of its own and comes back whole; pages of them neither overlap nor leave a gap."""
    keys = [f"{'é' * 400}{'x' * length}{number}" for length in (0, 33, 700) for number in range(7)]
    keys += ["é" * 383, "é" * 383 + "a", "é" * 384, "zzz"]
    with place.store() as store:
        for key in keys:
            assert granted(run(store.claim(claim_of(key)))).key == key
        for key in keys:
            assert run(store.claim(claim_of(key))).verdict is Verdict.BUSY
            assert run(store.get(key)).key == key
        seen: list[str] = []
        while page := run(store.scan(after=seen[-1] if seen else "", limit=4)):
            seen += [record.key for record in page]
        assert sorted(seen) == sorted(keys)
        assert len(seen) == len(keys)


def test_errors_are_errors_of_the_tree(place: Place) -> None:
    """A server that goes away in the middle of anything is a StoreError in every verb."""
    with FaultProxy(place.admin_url) as proxy, place.store(proxy.url) as store:
        decision = run(store.claim(claim_of()))
        proxy.refuse()
        proxy.cut()
        for verb in (store.claim(claim_of()), store.complete(ending_of(decision)), store.get("k"), store.purge(),
                     store.scan(), store.stats(), store.now(), store.migrate()):  # fmt: skip
            with pytest.raises(StoreError):
                run(verb)
