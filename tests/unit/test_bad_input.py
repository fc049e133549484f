"""Bad input: each mistake is an error of the tree that says what is wrong; nothing runs, nothing is overwritten."""

from __future__ import annotations

import asyncio
import functools
import pickle
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tests.integration.sqlite_helpers import files_in
from tests.unit.receiving import Counted, must_not_run

from effectonce import EffectOnceError, Message, Policy, Receiver, errors, keys
from effectonce.errors import ColourMismatch, InvalidKey, StoreError, StoreMismatch, Unencodable, UsageError
from effectonce.stores import open_store
from effectonce.stores._urls import shown

EVENT = Message("e-1")


@pytest.fixture
def memory() -> Receiver:
    return Receiver("memory://")


def kind(value: object) -> str:
    """A name for a test that is the same in every run."""
    return type(value).__name__


def nothing_happened(receiver: Receiver) -> bool:
    counts = receiver.stats().since_start.counts
    return not any(counts.values())


# Keys

BAD_KEYS: dict[str, tuple[Any, str]] = {
    "empty": ("", "empty"),
    "blank": ("   ", "blank"),
    "no text": (None, "NoneType"),
    "a number": (5, "int"),
    "a very long number": (10**5000, "int"),
    "bytes": (b"k", "bytes"),
    "a list": (["k"], "list"),
    "too long": ("x" * 256, "256 characters"),
    "a new line": ("a\nb", "control"),
    "a null": ("a\0b", "control"),
    "an escape": ("\x1b[31m", "control"),
    "half a character": ("\ud800", "surrogate"),
}


@pytest.mark.parametrize("what", BAD_KEYS)
def test_an_id_has_to_name_something(what: str) -> None:
    """A message's id is checked as the message is made; the error says which part, and what is wrong with it."""
    id_, why = BAD_KEYS[what]
    with pytest.raises(InvalidKey, match=why) as refused:
        Message(id_)
    assert "id" in str(refused.value)


@pytest.mark.parametrize("what", BAD_KEYS)
def test_an_id_is_checked_in_a_changed_copy_too(memory: Receiver, what: str) -> None:
    """A message made by _replace() is refused before it is claimed, if not before."""
    id_, _ = BAD_KEYS[what]
    with pytest.raises(InvalidKey):
        memory.process(EVENT._replace(id=id_), must_not_run)


@pytest.mark.parametrize("part", ["scope", "operation", "version"])
@pytest.mark.parametrize("what", [what for what in BAD_KEYS if what not in ("empty", "blank", "no text")])
def test_every_part_of_a_key_is_checked(memory: Receiver, part: str, what: str) -> None:
    """A scope, an operation and a version obey the same rules, wherever they are given."""
    value, _ = BAD_KEYS[what]
    if (part, what) == ("version", "a number"):
        return  # that is a version
    calls: list[Callable[[], Any]] = [
        lambda: memory.process(EVENT, must_not_run, **{part: value}),
        lambda: memory.claim("k", **{part: value}),
        lambda: memory.idempotent(**{part: value})(must_not_run)(),
    ]
    for call in calls:
        with pytest.raises(EffectOnceError):
            call()
    assert nothing_happened(memory)


@pytest.mark.parametrize(
    "what", ["a number", "bytes", "a list", "too long", "a new line", "half a character"]
)
def test_a_source_and_a_consumer_are_checked(memory: Receiver, what: str) -> None:
    """They are part of the key, so they obey its rules."""
    value, _ = BAD_KEYS[what]
    with pytest.raises(InvalidKey):
        memory.process(Message("e-1", source=value), must_not_run)
    if not isinstance(value, str):
        with pytest.raises(InvalidKey):
            Message.with_content_id({"cents": 5}, source=value)
    with pytest.raises(InvalidKey):
        Receiver("memory://", consumer=value).process(EVENT, must_not_run)
    with pytest.raises(InvalidKey):
        Receiver("memory://", scope=value).process(EVENT, must_not_run)


@pytest.mark.parametrize("what", ["empty", "too long", "a new line", "a very long number"])
def test_a_key_in_its_parts_is_checked(memory: Receiver, what: str) -> None:
    """One that was made without ``Key.of``, and one that a function's argument makes."""
    value, _ = BAD_KEYS[what]
    with pytest.raises(InvalidKey):
        memory.claim(keys.Key("", "claim", "", value))

    @memory.idempotent(key="k")
    def function(k: Any) -> None:
        must_not_run()

    with pytest.raises(InvalidKey):
        function(value)
    with pytest.raises(InvalidKey):
        keys.composite("order", value)
    assert nothing_happened(memory)


@pytest.mark.parametrize("version", [True, 1.0, 1.5])
def test_a_version_is_text_or_a_whole_number(memory: Receiver, version: Any) -> None:
    """Also when a number that is equal to it has been used before."""
    memory.process(EVENT, Counted(), version=1)
    with pytest.raises(InvalidKey, match="version"):
        memory.process(EVENT, must_not_run, version=version)


@pytest.mark.parametrize("what", ["empty", "no text", "a number", "bytes", "a new line"])
def test_a_key_to_look_at_is_checked(memory: Receiver, what: str) -> None:
    """get() and resolve() refuse what can't be a key."""
    value, _ = BAD_KEYS[what]
    with pytest.raises(InvalidKey):
        memory.get(value)
    with pytest.raises(InvalidKey):
        memory.resolve(value, "completed")


# Messages


@pytest.mark.parametrize("message", [None, "e-1", {"id": "e-1"}, ("e-1",), b"e-1", object()], ids=kind)
def test_only_a_message_is_a_message(memory: Receiver, message: Any) -> None:
    """Anything else is refused, and the error says how to wrap it."""
    with pytest.raises(UsageError, match=r"Message\(id="):
        memory.process(message, must_not_run)
    with pytest.raises(UsageError, match=r"Message\(id="):
        asyncio.run(memory.aprocess(message, must_not_run))
    with pytest.raises(UsageError, match=r"Message\(id="):
        memory.process_batch([EVENT, message], must_not_run)
    assert nothing_happened(memory)


NOT_TIMES = [
    "2024-05-01", b"1", [1], True, float("nan"), float("inf"), 1794812486508.9, -(10**400), datetime(2024, 5, 1)  # noqa: DTZ001
]  # fmt: skip


def hears_nothing(_: object) -> Any:
    return asyncio.sleep(0)


async def hears_later(_: object) -> None: ...


@pytest.mark.parametrize("hooks", [5, hears_nothing, [5], ["log_events"], [hears_later]], ids=kind)
def test_hooks_are_functions(hooks: Any) -> None:
    """What can't be called, or would be called without being awaited, is refused before the first event."""
    with pytest.raises(UsageError, match="hook"):
        Receiver("memory://", hooks=hooks)


@pytest.mark.parametrize("breaker", [5, True, {"errors": 3}, "open"], ids=kind)
def test_a_breaker_is_a_breaker(breaker: Any) -> None:
    """Anything else is refused, with an example of what would do."""
    with pytest.raises(UsageError, match="Breaker"):
        Receiver("memory://", breaker=breaker)


def test_a_long_key_that_is_not_there_is_none(memory: Receiver) -> None:
    """What an error named may be forgotten by now, however long its text is."""
    message = Message("x" * 255)
    with pytest.raises(LookupError):
        memory.process(message, Counted(LookupError()), policy=Policy(in_doubt=(LookupError,)))
    key = memory.key_of(message)
    assert memory.get(key) is not None
    assert memory.get(key.replace("x", "y")) is None
    assert memory.resolve(key.replace("x", "y"), "not_applied") is False
    assert memory.resolve(key, "not_applied") is True


@pytest.mark.parametrize("timestamp", NOT_TIMES, ids=lambda timestamp: repr(timestamp)[:30])
def test_a_timestamp_is_a_time(memory: Receiver, timestamp: Any) -> None:
    """An aware datetime or seconds; anything else is refused, not compared."""
    with pytest.raises(UsageError, match="timestamp"):
        memory.process(Message("e-1", timestamp=timestamp), must_not_run)
    assert nothing_happened(memory)


def test_a_payload_needs_a_stored_form(memory: Receiver) -> None:
    """What has none can't be told from another; the error names the spot."""
    with pytest.raises(Unencodable, match="object") as refused:
        memory.process(Message("e-1", {"rows": [1, object()]}), must_not_run)
    assert "rows" in refused.value.path
    assert nothing_happened(memory)


@pytest.mark.parametrize("handler", [None, "handler", 5], ids=repr)
def test_a_handler_can_be_called(memory: Receiver, handler: Any) -> None:
    """Something that can't is refused before anything is claimed."""
    with pytest.raises((EffectOnceError, TypeError)):
        memory.process(EVENT, handler)
    assert nothing_happened(memory)


# Stores


@pytest.mark.parametrize(
    "url",
    ["", "effects.db", "redit://x", "oracle://host/db", "sqlite:effects.db", "://", "http://example.com"],
)
def test_an_unknown_scheme_is_refused(url: str) -> None:
    """The error says which there are."""
    with pytest.raises(UsageError, match="sqlite://") as refused:
        Receiver(url)
    assert "memory://" in str(refused.value)


@pytest.mark.parametrize("url", [None, 5, b"memory://", ["memory://"], object()], ids=kind)
def test_a_store_is_a_url_or_a_store(url: Any) -> None:
    """Anything else is refused, with an example of what would do."""
    with pytest.raises(UsageError, match="sqlite:///effects"):
        Receiver(url)


@pytest.mark.parametrize(
    "url",
    [
        "oracle://scott:t1ger@db.example.com/prod",
        "oracle://:t1ger@db.example.com",
        "scott:t1ger@db.example.com/prod",
        "oracle://db.example.com/prod?user=scott&password=t1ger",
        "oracle://db.example.com/prod?PASSWORD=t1ger#x",
        "oracle:/scott:t1ger@db.example.com",
        "oracle://scott:a@t1ger@db.example.com/x",
        "memory://scott:t1ger@db.example.com",
        "memory://?password=t1ger",
        "sqlite://scott:t1ger@db.example.com/effects.db",
        "sqlite:///effects.db?password=t1ger",
        "postgresql://scott:t1ger[@db.example.com/prod",
        "redis://scott:t1ger\N{ACCOUNT OF}@db.example.com/0",  # urlsplit says what it stumbles over
        "mysql://scott:t1ger\N{ACCOUNT OF}@db.example.com/prod",
    ],
)
def test_no_error_shows_a_password(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors go into logs; what may be a password does not."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as refused:
        open_store(url)
    assert "t1ger" not in str(refused.value)
    assert files_in(tmp_path) == []


@pytest.mark.parametrize(
    "url",
    [
        "redis://scott:t1ger@db.example.com/0",
        "postgresql://scott:t1ger@db.example.com/prod",
        "mysql://scott:t1ger@db.example.com/prod",
    ],
)
def test_no_variable_of_a_store_shows_a_password(url: str) -> None:
    """Error trackers and debuggers print what the variables along a traceback hold."""
    store = open_store(url)
    assert "t1ger" not in repr([store, vars(store)])
    store.close()


def a_directory(path: Path) -> None:
    path.mkdir()


def a_text(path: Path) -> None:
    path.write_bytes(b"Dear diary, " * 500)


def a_damaged_store(path: Path) -> None:
    Receiver(f"sqlite:///{path}").close()
    content = bytearray(path.read_bytes())
    content[:100] = b"\xff" * 100
    path.write_bytes(content)


def another_programs(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE diary (entry TEXT)")


def a_newer_one(path: Path) -> None:
    Receiver(f"sqlite:///{path}").close()
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("UPDATE effectonce_meta SET value = 99 WHERE name = 'schema'")


FILES = [a_directory, a_text, a_damaged_store, another_programs, a_newer_one]


@pytest.mark.parametrize("make", FILES, ids=lambda make: make.__name__)
def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """A receiver on it is a store error that names the file; not a byte of it changes and nothing is left beside it."""
    path = tmp_path / "effects.db"
    make(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(StoreMismatch, match=r"effects\.db"):
        Receiver(f"sqlite:///{path}")
    assert (path.read_bytes() if path.is_file() else None) == before
    assert files_in(tmp_path) == ["effects.db"]


def test_a_missing_directory_is_a_store_error(tmp_path: Path) -> None:
    """It is not made, since it is more likely a mistake than a wish."""
    with pytest.raises(StoreError, match="no directory"):
        Receiver(f"sqlite:///{tmp_path}/nowhere/effects.db")
    assert files_in(tmp_path) == []


# Policies


@pytest.mark.parametrize(
    "words", [{"busy": "block"}, {"on_crash": "?"}, {"late": "drop"}, {"keep": "1 fortnight"}], ids=repr
)
def test_an_unknown_policy_word_is_refused(words: dict[str, Any]) -> None:
    """As the policy is made, also as a change of another or of a preset."""
    for make in (lambda: Policy(**words), lambda: Policy().but(**words), lambda: Policy.payments(**words)):
        with pytest.raises(UsageError):
            make()


# Colours


async def coroutine_handler(_: Message) -> None:
    raise AssertionError("the handler ran")


class AsyncCallable:
    """An object whose call is a coroutine."""

    async def __call__(self, _: Message) -> None:
        raise AssertionError("the handler ran")

    async def method(self, _: Message) -> None:
        raise AssertionError("the handler ran")


COROUTINES: dict[str, Callable[[Receiver], Any]] = {
    "a function": lambda _: coroutine_handler,
    "an object": lambda _: AsyncCallable(),
    "a method": lambda _: AsyncCallable().method,
    "a partial": lambda _: functools.partial(coroutine_handler),
    "a decorated function": lambda receiver: receiver.idempotent(coroutine_handler),
}


@pytest.mark.parametrize("what", COROUTINES)
def test_a_coroutine_function_needs_an_awaitable_call(memory: Receiver, what: str) -> None:
    """process() and process_batch() refuse it before anything is claimed, and name the call to use."""
    handler = COROUTINES[what](memory)
    with pytest.raises(ColourMismatch, match="aprocess"):
        memory.process(EVENT, handler)
    with pytest.raises(ColourMismatch, match="aprocess_batch"):
        memory.process_batch([EVENT], handler)
    assert nothing_happened(memory)


def test_a_coroutine_that_shows_late_is_not_run(memory: Receiver) -> None:
    """A plain function that returns a coroutine: it is closed, the claim is given back, and the error says why."""
    with pytest.raises(ColourMismatch, match="awaitable form"):
        memory.process(EVENT, lambda message: coroutine_handler(message))
    (outcome,) = memory.process_batch([EVENT], lambda message: coroutine_handler(message))
    assert isinstance(outcome.error, ColourMismatch)
    assert memory.process(EVENT, Counted()).status == "executed"


def test_a_decorated_function_that_returns_a_coroutine_is_not_run(memory: Receiver) -> None:
    """The same for the decorator, which takes a function's colour from how it is defined."""

    @memory.idempotent
    def pay() -> Any:
        return coroutine_handler(EVENT)

    with pytest.raises(ColourMismatch):
        pay()


# All of them


def test_every_error_is_of_the_tree() -> None:
    """One except clause catches all that effectonce raises, and each has something to say."""
    from effectonce import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert all(issubclass(kind, EffectOnceError) for kind in kinds)
    assert all(kind.__name__ in (errors.__doc__ or "") for kind in kinds)
    assert all(kind.__doc__ for kind in kinds)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), 1e9])
def test_a_busy_timeout_is_a_time(tmp_path: Path, seconds: float) -> None:
    """How long to wait for others has to make sense."""
    with pytest.raises(UsageError, match="busy_timeout"):
        open_store(f"sqlite:///{tmp_path}/effects.db?busy_timeout={seconds}")


def test_what_is_ignored_is_a_tuple(memory: Receiver) -> None:
    """A text would be taken for its letters."""
    with pytest.raises(UsageError, match="tuple"):
        memory.idempotent(ignore="session")(lambda session: None)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://user:pa?ss@host/0?timeout=5", "redis://…@host/0?timeout=…"),
        ("postgresql://u:p/a@s@host/db", "postgresql://…@host/db"),
        ("mysql://host/db?password=secret&table=t", "mysql://host/db?password=…&table=…"),
        ("secret@nowhere", "…@nowhere"),
        ("sqlite:///effects.db", "sqlite:///effects.db"),
    ],
)
def test_a_url_is_shown_without_secrets(url: str, message: str) -> None:
    """Whatever a password is made of."""
    assert shown(url) == message


ERRORS = {
    name: each
    for name, each in vars(errors).items()
    if isinstance(each, type) and issubclass(each, EffectOnceError) and each is not Unencodable
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_come_back_from_other_processes(name: str) -> None:
    """One that could not be unpickled would break a pool of processes."""
    error = ERRORS[name]("what happened")
    error.key = "k"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), "what happened", vars(error))


def test_a_value_without_a_form_is_told_from_other_processes() -> None:
    """Its error is made of other parts than a message."""
    with pytest.raises(Unencodable) as refused:
        Receiver("memory://").process(Message("e-1", {"now": object()}), must_not_run)
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)
