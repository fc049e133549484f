"""The Redis store: what it refuses, what it says, what it sends, and who shares its connections."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.integration.redis_helpers import (
    COLOURS,
    LONG,
    claim_of,
    clients,
    ending_of,
    forget,
    hold,
    in_colour,
    renewal_of,
)
from tests.integration.sqlite_helpers import output_of
from tests.servers import Server
from tests.servers.fixtures import HasURL

from effectonce._blocking import run
from effectonce._records import Decision, Ending, Verdict
from effectonce.errors import StoreMismatch, StoreUnavailable, UsageError
from effectonce.keys import uuid4
from effectonce.stores import Store, _redis_verbs, open_store
from effectonce.stores.redis import RedisStore

StartServer = Callable[..., Server]


@pytest.fixture
def prefix(valkey: HasURL) -> Iterator[str]:
    prefix = f"{uuid4()}:"
    yield prefix
    forget(valkey.url, prefix)


@pytest.fixture
def store(valkey: HasURL, prefix: str) -> Iterator[RedisStore]:
    with RedisStore(valkey.url, prefix=prefix) as store:
        yield store


# What it refuses


@pytest.mark.parametrize(
    "url",
    [
        "redis://",
        "redis://:secret@",
        "redis://:secret@host:notaport/0",
        "redis://:secret@host:99999/0",
        "redis://:secret@host:0/0",
        "redis://:secret@host/zero",
        "redis://:secret@host/0/1",
        "redis://:secret@host/-1",
        "redis://:secret@host/0?prefx=a",
        "redis://:secret@host/0?timeout=soon",
        "redis://:secret@host/0?timeout=0",
        "redis://:secret@host/0?timeout=-1",
        "redis://:secret@host/0?timeout=nan",
        "redis://:secret@host/0?durability=wait",
        "redis://:secret@host/0?durability=wait:0",
        "redis://:secret@host/0?durability=full",
        "redis://:secret@host/0?eviction=maybe",
        "redis://:secret@host/0?ca=/etc/ssl/cert.pem",
        "rediss://:secret@host/0?ca=/no/such/file.pem",
        "rediss://:secret@host/0?ca=a%00b",
        "redis://:secret@host:7000,host:7001/0",
        "rediss://:secret@host,other/0",
        "redis+cluster://:secret@host:7000,,host:7001",
        "redis+sentinel://:secret@host",
    ],
)
def test_a_url_with_a_mistake_is_refused(url: str) -> None:
    """Before anything is asked of a server, and without a word of the password."""
    with pytest.raises(UsageError) as refusal:
        open_store(url)
    assert "secret" not in str(refusal.value)


def test_a_file_of_certificates_that_is_not_there() -> None:
    """It is named."""
    with pytest.raises(UsageError, match=r"ca='/no/such/file\.pem' is no file with certificates"):
        open_store("rediss://host/0?ca=/no/such/file.pem")


@pytest.mark.parametrize(
    "choices",
    [
        {"url": None},
        {"url": 6379},
        {"prefix": None},
        {"prefix": b"eo:"},
        {"timeout": "5"},
        {"timeout": None},
        {"timeout": float("inf")},
        {"durability": 1},
        {"durability": None},
        {"eviction": True},
    ],
)
def test_a_wrong_argument_is_refused(choices: dict[str, Any]) -> None:
    """What makes no sense is told where it is said."""
    with pytest.raises(UsageError):
        RedisStore(**choices)


@pytest.mark.parametrize(
    ("prefix", "instead"),
    [("shop", "shop:"), ("shop:eu:", "shop.eu:"), ("shop::", "shop:"), (":", "eo:"), ("", "eo:")],
)
def test_a_prefix_that_might_begin_another_is_refused(prefix: str, instead: str) -> None:
    """With one colon, at the end, no prefix begins another: no store finds, scans or sweeps the keys of another."""
    with pytest.raises(UsageError, match=re.escape(f"prefix={instead!r}")):
        RedisStore(prefix=prefix)


def test_stores_whose_prefixes_begin_alike_know_nothing_of_each_other(valkey: HasURL, prefix: str) -> None:
    """Whatever the scopes in their keys look like."""
    longer = f"{prefix[:-1]}eu:"
    with RedisStore(valkey.url, prefix=prefix) as shop, RedisStore(valkey.url, prefix=longer) as other:
        for store, key in ((shop, "eu:k"), (shop, "euk"), (other, "k"), (other, ":k")):
            assert run(store.claim(claim_of(key))).verdict is Verdict.CLAIMED
        assert [record.key for record in run(shop.scan())] == ["eu:k", "euk"]
        assert [record.key for record in run(other.scan())] == [":k", "k"]
    forget(valkey.url, longer)


def test_a_url_says_everything(start_server: StartServer) -> None:
    """User, password, database and options are taken from it, percent-escaped where they have to be."""
    server = start_server("valkey")
    with clients(server.url) as (client,):
        client.execute_command("ACL", "SETUSER", "worker@1", "on", ">p:a/s s", "~*", "&*", "+@all")
    url = f"redis://worker%401:p%3Aa%2Fs%20s@127.0.0.1:{server.port}/3?prefix=mine:&timeout=2.5"
    with open_store(url) as store:
        assert run(store.claim(claim_of("k"))).verdict is Verdict.CLAIMED
    with clients(server.url) as (client,):
        client.execute_command("SELECT", 3)
        assert client.keys() == [b"mine:k"]


@COLOURS
@pytest.mark.parametrize("login", ["", ":wrong@", "nobody:secret@"])
def test_a_wrong_password_is_told(start_server: StartServer, colour: str, login: str) -> None:
    """The error says what to look at, and never the password."""
    server = start_server("valkey", requirepass="secret")
    with (
        RedisStore(f"redis://{login}127.0.0.1:{server.port}") as store,
        pytest.raises(StoreUnavailable, match="password") as told,
    ):
        in_colour(colour, store, lambda verbs: verbs.claim(claim_of("k")))
    assert "secret" not in str(told.value)
    assert "wrong" not in str(told.value).replace("WRONGPASS", "").replace("Wrong", "")


@COLOURS
def test_a_password_too_many_is_told(valkey: HasURL, colour: str) -> None:
    """A server without a password does not take one."""
    with (
        RedisStore(valkey.url.replace("://", "://:secret@")) as store,
        pytest.raises(StoreUnavailable, match="has no password") as told,
    ):
        in_colour(colour, store, lambda verbs: verbs.claim(claim_of("k")))
    assert "secret" not in str(told.value)


@COLOURS
def test_a_wrong_database_is_told(valkey: HasURL, colour: str) -> None:
    """A server has so many databases and no more."""
    with (
        RedisStore(valkey.url.replace("/0", "/9999")) as store,
        pytest.raises(StoreMismatch, match="database"),
    ):
        in_colour(colour, store, lambda verbs: verbs.claim(claim_of("k")))


@COLOURS
def test_nobody_there_is_unavailable(colour: str) -> None:
    """A closed port is told at once, with the address."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    with (
        RedisStore(f"redis://127.0.0.1:{port}") as store,
        pytest.raises(StoreUnavailable, match=f"127.0.0.1:{port}") as told,
    ):
        in_colour(colour, store, lambda verbs: verbs.claim(claim_of("k")))
    assert told.value.retry_after > 0


@COLOURS
def test_a_name_that_means_nothing_is_unavailable(colour: str) -> None:
    """A host that can't be found is told as such."""
    with (
        RedisStore("redis://no-such-host.invalid") as store,
        pytest.raises(StoreUnavailable, match=r"\.invalid"),
    ):
        in_colour(colour, store, lambda verbs: verbs.get("k"))


@contextmanager
def impostor(answer: bytes) -> Iterator[str]:
    """A server that gives one answer to whatever is said first on a connection."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65_536)
                    connection.sendall(answer)
                    connection.recv(1)

        threading.Thread(target=serve, daemon=True).start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@COLOURS
def test_another_protocol_is_told(colour: str) -> None:
    """What answers in another language is not taken for Redis."""
    with (
        impostor(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n") as url,
        RedisStore(url) as store,
        pytest.raises(StoreMismatch, match="language"),
    ):
        in_colour(colour, store, lambda verbs: verbs.get("k"))


@COLOURS
def test_an_old_server_is_refused(colour: str) -> None:
    """A server without the commands that are needed is told by its version."""
    info = b"# Server\r\nredis_version:6.2.14\r\nredis_mode:standalone\r\n"
    answer = b"%1\r\n+proto\r\n:3\r\n" + (b"$%d\r\n%b\r\n" % (len(info), info)) * 2
    with (
        impostor(answer) as url,
        RedisStore(url) as store,
        pytest.raises(StoreMismatch, match=r"6\.2\.14.*7\.0"),
    ):
        in_colour(colour, store, lambda verbs: verbs.get("k"))


@COLOURS
def test_a_server_that_evicts_is_refused(start_server: StartServer, colour: str) -> None:
    """Evicted records would be effects that happen again; who knows better says so by name."""
    server = start_server("redis", maxmemory="100mb", maxmemory_policy="volatile-lru")
    with (
        RedisStore(server.url) as store,
        pytest.raises(StoreMismatch, match=r"volatile-lru.*eviction=accept"),
    ):
        in_colour(colour, store, lambda verbs: verbs.claim(claim_of("k")))
    with open_store(f"{server.url}?eviction=accept") as store:
        decision = in_colour(colour, store, lambda verbs: verbs.claim(claim_of("k")))
        assert decision.verdict is Verdict.CLAIMED


def test_a_server_that_may_not_be_asked_is_refused(start_server: StartServer) -> None:
    """Where INFO is forbidden nobody knows whether keys are evicted; CONFIG is not needed at all."""
    server = start_server("valkey")
    with clients(server.url) as (client,):
        client.execute_command("ACL", "SETUSER", "a", "on", ">p", "~*", "&*", "+@all", "-config")
        client.execute_command("ACL", "SETUSER", "b", "on", ">p", "~*", "&*", "+@all", "-info")
    address = f"127.0.0.1:{server.port}"
    with RedisStore(f"redis://a:p@{address}") as store:
        assert run(store.claim(claim_of("k"))).verdict is Verdict.CLAIMED
    with RedisStore(f"redis://b:p@{address}") as store, pytest.raises(StoreMismatch, match="INFO"):
        run(store.get("k"))
    with RedisStore(f"redis://b:p@{address}", eviction="accept") as store:
        assert run(store.get("k"))


def test_a_user_without_the_right_is_told(start_server: StartServer) -> None:
    """What the server forbids is told as such, and nothing is believed to have been written."""
    server = start_server("valkey")
    with clients(server.url) as (client,):
        client.execute_command("ACL", "SETUSER", "a", "on", ">p", "~other:*", "&*", "+@all")
    with (
        RedisStore(f"redis://a:p@127.0.0.1:{server.port}") as store,
        pytest.raises(StoreUnavailable, match="NOPERM"),
    ):
        run(store.claim(claim_of("k")))


@COLOURS
def test_a_cluster_is_told_from_a_single_server(valkey: HasURL, valkey_cluster: HasURL, colour: str) -> None:
    """Each URL has to say which of the two it means."""
    with (
        RedisStore(valkey_cluster.url.replace("+cluster", "")) as store,
        pytest.raises(StoreMismatch, match=r"redis\+cluster://"),
    ):
        in_colour(colour, store, lambda verbs: verbs.claim(claim_of("k")))
    with (
        RedisStore(valkey.url.replace("valkey:", "valkey+cluster:")) as store,
        pytest.raises(StoreMismatch, match="redis://"),
    ):
        in_colour(colour, store, lambda verbs: verbs.claim(claim_of("k")))


@COLOURS
@pytest.mark.parametrize(
    "command",
    [
        ("SET", "theirs"),
        ("SET", ""),
        ("SET", "1"),
        ("SET", b"\x80\x04\x95pickle"),
        ("SET", b"\xa4\x10cut off"),
        ("SET", b"\xa9cut off"),
        ("SET", b"\xa8cut off"),
        ("SET", b"\xbfof a newer version"),
        ("HSET", "field", "theirs"),
        ("RPUSH", "theirs"),
    ],
)
def test_another_programs_key_is_left_alone(
    valkey: HasURL, store: RedisStore, prefix: str, colour: str, command: tuple[Any, ...]
) -> None:
    """A value that is no record is neither taken for one nor overwritten, by any verb."""
    verb, *values = command
    held = hold(store, "other")
    with clients(valkey.url) as (client,):
        client.execute_command(verb, f"{prefix}k", *values)
        before = client.dump(f"{prefix}k")
        for action in (
            lambda verbs: verbs.claim(claim_of("k")),
            lambda verbs: verbs.claim(claim_of("k", may_create=False)),
            lambda verbs: verbs.claim_many([claim_of("other"), claim_of("k")]),
            lambda verbs: verbs.renew(renewal_of(held._replace(key="k"))),
            lambda verbs: verbs.complete(ending_of(held._replace(key="k"))),
            lambda verbs: verbs.release("k", b"A" * 16, 1, LONG),
            lambda verbs: verbs.get("k"),
        ):
            with pytest.raises(StoreMismatch) as told:
                in_colour(colour, store, action)
            assert "theirs" not in str(told.value)
        assert client.dump(f"{prefix}k") == before
        assert [record.key for record in in_colour(colour, store, lambda verbs: verbs.scan())] == ["other"]
        assert in_colour(colour, store, lambda verbs: verbs.stats()).keys == 1


@COLOURS
def test_a_replica_is_told(start_server: StartServer, colour: str) -> None:
    """Nobody can claim on a server that can't write, and it says so."""
    primary = start_server("valkey")
    replica = start_server("valkey", replicaof=f"127.0.0.1 {primary.port}")
    with RedisStore(replica.url) as store, pytest.raises(StoreUnavailable, match=r"READONLY.*replica"):
        in_colour(colour, store, lambda verbs: verbs.claim(claim_of("k")))


def test_a_missing_driver_is_named() -> None:
    """Without hiredis the error says what to install; nothing else of the package needs it."""
    script = (
        "import sys; sys.modules['hiredis'] = None\n"
        "import effectonce\n"
        "from effectonce.errors import MissingExtra\n"
        "from effectonce.stores import open_store\n"
        "try: open_store('redis://localhost')\n"
        "except MissingExtra as error: print(error)"
    )
    assert "effectonce[redis]" in output_of(script)


# Hung and lost connections


@COLOURS
def test_a_hung_server_is_unavailable_in_time(start_server: StartServer, colour: str) -> None:
    """Nobody waits longer than the time-out, and everything goes on when the server does."""
    server = start_server("valkey")

    async def claims(verbs: Store) -> list[Any]:
        assert (await verbs.claim(claim_of("before"))).verdict is Verdict.CLAIMED
        server.pause()
        with pytest.raises(StoreUnavailable, match=r"within 0\.3 s"):
            await verbs.claim(claim_of("meanwhile"))
        with pytest.raises(StoreUnavailable, match=r"within 0\.3 s"):  # also on a new connection
            await verbs.claim(claim_of("meanwhile"))
        server.resume()
        return [await verbs.claim(claim_of("after")), await verbs.claim(claim_of("before"))]

    with RedisStore(server.url, timeout=0.3) as store:
        after, before = in_colour(colour, store, claims)
    assert (after.verdict, before.verdict) == (Verdict.CLAIMED, Verdict.BUSY)


@COLOURS
def test_a_restarted_server_is_found_again(start_server: StartServer, colour: str) -> None:
    """The connections of before are of no use, and nobody has to notice."""
    server = start_server("valkey")

    async def claims(verbs: Store) -> list[Decision]:
        first = await verbs.claim(claim_of("k"))
        server.restart()
        if colour == "asyncio":
            await _until_lost(verbs)
        return [first, await verbs.claim(claim_of("k")), await verbs.claim(claim_of("new"))]

    with RedisStore(server.url) as store:
        decisions = in_colour(colour, store, claims)
    assert [decision.verdict for decision in decisions] == [Verdict.CLAIMED, Verdict.BUSY, Verdict.CLAIMED]


async def _until_lost(verbs: Store) -> None:
    """A loop hears of a lost connection as soon as it listens."""
    lines = verbs._store.lines()  # type: ignore[attr-defined]
    for _ in range(1000):
        if not lines.links:
            return
        await asyncio.sleep(0.001)
    raise AssertionError("The connection was not lost.")


@COLOURS
def test_a_server_that_comes_later_is_found(start_server: StartServer, colour: str) -> None:
    """A store can be made before its server is there."""
    server = start_server("valkey")
    server.kill()
    with RedisStore(server.url) as store:
        with pytest.raises(StoreUnavailable):
            in_colour(colour, store, lambda verbs: verbs.claim(claim_of("k")))
        server.restart()
        assert in_colour(colour, store, lambda verbs: verbs.claim(claim_of("k"))).verdict is Verdict.CLAIMED


@COLOURS
def test_flushed_scripts_are_loaded_again(valkey: HasURL, store: RedisStore, colour: str) -> None:
    """Every verb survives that the server has forgotten the scripts."""

    async def everything(verbs: Store) -> None:
        with clients(valkey.url) as (client,):
            flush = client.script_flush
            flush()
            held = (await verbs.claim(claim_of("k"))).record
            assert held is not None
            flush()
            assert await verbs.renew_many([renewal_of(held)]) == [True]
            flush()
            assert await verbs.get("k")
            flush()
            assert await verbs.watch(held, 0.01) in (True, False)
            flush()
            assert await verbs.release("k", held.owner, held.fence, LONG, began=False) is Ending.DONE
            flush()
            many = await verbs.claim_many([claim_of(f"key {n}") for n in range(100)])
            assert {decision.verdict for decision in many} == {Verdict.CLAIMED}
            flush()
            endings = [ending_of(decision.record) for decision in many if decision.record]
            assert await verbs.complete_many(endings) == [Ending.DONE] * 100

    in_colour(colour, store, everything)


# Memory and size


@pytest.mark.parametrize("server", ["redis7", "valkey"])
def test_a_result_takes_no_more_memory_than_it_must(request: pytest.FixtureRequest, server: str) -> None:
    """A 36-character key with a fingerprint and a 102-byte result costs what these alone would cost, and the prefix."""
    url = request.getfixturevalue(server).url
    key, result = str(uuid4()), b"r" * 102
    with RedisStore(url) as store, clients(url) as (client,):
        held = hold(store, key)
        run(store.complete(ending_of(held, result)))
        raw = f"xx:{uuid4()}"
        client.set(raw, held.fingerprint + result, px=3_600_000)
        assert client.memory_usage(f"eo:{key}") <= client.memory_usage(raw) <= 216
        client.delete(raw, f"eo:{key}")


def test_stats_of_a_large_store_are_an_estimate(
    valkey: HasURL, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond a sample, what was seen stands for what was not, other programs' keys counted out."""
    held = [
        decision.record for decision in run(store.claim_many([claim_of(f"key {n}") for n in range(2000)]))
    ]
    run(store.complete_many([ending_of(record) for record in held[:1000] if record]))
    exact = run(store.stats())
    assert exact.by_state == {"COMPLETED": 1000, "PENDING": 1000}
    assert 100 * 2000 < exact.bytes < 500 * 2000
    monkeypatch.setattr(_redis_verbs, "SAMPLE", 500)
    monkeypatch.setattr(_redis_verbs, "PAGE", 100)
    with clients(valkey.url) as (client,):
        names = [f"{uuid4()}" for _ in range(2000)]
        client.mset(dict.fromkeys(names, "of another program"))
        estimate = run(store.stats())
        client.unlink(*names)
    assert 1200 < estimate.keys < 2800
    assert 0.5 < estimate.bytes / exact.bytes < 2


def test_a_record_made_to_stay_stays(valkey: HasURL, store: RedisStore, prefix: str) -> None:
    """What an operator takes the expiry from is kept, and can still be claimed after a release."""
    held = hold(store, "k")
    run(store.release("k", held.owner, held.fence, LONG))
    with clients(valkey.url) as (client,):
        assert client.persist(f"{prefix}k")
    record = run(store.get("k"))
    assert record is not None
    assert record.expires_at == float("inf")
    again = hold(store, "k")
    assert (again.attempts, again.fence > held.fence) == (2, True)


def test_a_fence_ahead_of_the_clock_is_not_given_out_again(valkey: HasURL, store: RedisStore) -> None:
    """However quickly a key is claimed and released, no later record of it has a lower fence: it is kept until then."""
    fences = []
    for _ in range(3):
        for _ in range(40):
            held = hold(store, "k")
            fences.append(held.fence)
            run(store.release("k", held.owner, held.fence, 0.001))
        while run(store.get("k")):
            pass
    assert fences == sorted(set(fences))


# TLS


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate that signs itself, with its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not there to make a certificate")
    path = tmp_path / "server.pem"
    asked = (
        "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    command = ["openssl", *asked.split(), "-keyout", path, "-out", f"{path}.crt"]
    subprocess.run(command, check=True, capture_output=True)
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path


@COLOURS
def test_a_secure_connection(start_server: StartServer, certificate: Path, colour: str) -> None:
    """Records go through TLS; a certificate that nobody vouches for is refused, and so is talking past TLS."""
    options = {
        "tls_port": 0,
        "tls_cert_file": certificate,
        "tls_key_file": certificate,
        "tls_ca_cert_file": certificate,
    }
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        options["tls_port"] = listener.getsockname()[1]
    start_server("redis", tls_auth_clients="no", **options)
    address = f"127.0.0.1:{options['tls_port']}"
    with open_store(f"rediss://{address}/0?ca={certificate}") as store:
        held = in_colour(colour, store, lambda verbs: verbs.claim(claim_of("k"))).record
        big = ending_of(held, b"x" * 1_000_000)
        assert in_colour(colour, store, lambda verbs: verbs.complete(big)) is Ending.DONE
        assert in_colour(colour, store, lambda verbs: verbs.get("k")).result == big.result
    with RedisStore(f"rediss://{address}") as store, pytest.raises(StoreUnavailable, match="certificate"):
        in_colour(colour, store, lambda verbs: verbs.get("k"))
    context = ssl.create_default_context(cafile=str(certificate))
    with RedisStore(f"rediss://{address}", tls=context) as store:
        assert in_colour(colour, store, lambda verbs: verbs.get("k"))
    with (
        RedisStore(f"redis://{address}", timeout=2.0) as store,
        pytest.raises((StoreUnavailable, StoreMismatch)),
    ):
        in_colour(colour, store, lambda verbs: verbs.get("k"))
