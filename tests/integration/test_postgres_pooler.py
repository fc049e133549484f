"""PgBouncer between the store and PostgreSQL, lending each of its sessions for a transaction.

What a session knows, statements and listeners, is then whoever's has it next. So with ``prepare=no`` everything works,
and without it nobody is left to guess.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NoReturn

import pytest
from tests.integration import postgres_helpers
from tests.integration.postgres_helpers import Place
from tests.integration.sql_places import Colour, Effects
from tests.servers.base import Unavailable
from tests.servers.pgbouncer import PgBouncer

from effectonce import Message, Outcome, Policy, Receiver
from effectonce.errors import StoreMismatch
from effectonce.stores._postgres_sql import Statements
from effectonce.stores.postgres import PostgresStore
from effectonce.testing.clocks import wait_until

place, colour, _ = postgres_helpers.FIXTURES

StartPooler = Callable[..., PgBouncer]
LENIENT = {"ignore_startup_parameters": "options"}
"""What operators set for programs that say something about their sessions: it is not done, and not refused either."""


@pytest.fixture
def start_pooler(place: Place, server_unavailable: Callable[[str, str], NoReturn]) -> Iterator[StartPooler]:
    """``start_pooler(default_pool_size=1)``: a pooler of this test's own."""

    def start(**settings: object) -> PgBouncer:
        try:
            return stack.enter_context(PgBouncer(place.admin_url, **settings).start())
        except Unavailable as reason:
            server_unavailable("pgbouncer", str(reason))

    with ExitStack() as stack:
        yield start


def url_of(pooler: PgBouncer, place: Place, table: str = "", **options: object) -> str:
    """The URL of a store behind the pooler."""
    return f"{pooler.url}?" + "&".join(
        f"{k}={v}" for k, v in {"table": table or place.table, **options}.items()
    )


def test_many_callers_share_few_sessions(place: Place, colour: Colour, start_pooler: StartPooler) -> None:
    """With prepare=no every key has one effect and one answer, with more callers than sessions."""
    pooler, effects = start_pooler(default_pool_size=3), Effects()
    url = url_of(pooler, place, prepare="no").replace("://", f"{colour.driver}://", 1)
    messages = [Message(f"m-{number // 4}") for number in range(256)]
    with Receiver(url) as receiver:
        if colour.awaits:
            outcomes = colour.run(_gathered(receiver, messages, effects))
        else:
            with ThreadPoolExecutor(64) as threads:
                outcomes = list(threads.map(lambda m: receiver.process(m, effects.handle), messages))
    assert [outcome.value for outcome in outcomes] == [f"receipt of {message.id}" for message in messages]
    assert set(effects.runs.values()) == {1} and len(effects.runs) == 64


async def _gathered(receiver: Receiver, messages: list[Message], effects: Effects) -> list[Outcome[str]]:
    return await asyncio.gather(*(receiver.aprocess(message, effects.ahandle) for message in messages))


def test_a_pooler_that_refuses_settings(place: Place, colour: Colour, start_pooler: StartPooler) -> None:
    """It does so for good, so the error says what to write instead of asking for patience."""
    url = url_of(start_pooler(), place).replace("://", f"{colour.driver}://", 1)
    with Receiver(url) as receiver, pytest.raises(StoreMismatch, match=r"startup parameter.*prepare=no"):
        colour.process(receiver, Message("m"), Effects())


def test_a_session_that_knows_a_statement_already(place: Place, start_pooler: StartPooler) -> None:
    """Another store had prepared it there: the error says what to write."""
    pooler, effects = start_pooler(default_pool_size=1, **LENIENT), Effects()
    with Receiver(url_of(pooler, place)) as first, Receiver(url_of(pooler, place)) as second:
        first.process(Message("m"), effects.handle)
        with pytest.raises(StoreMismatch, match=r"already exists.*prepare=no"):
            second.process(Message("m"), effects.handle)
    assert effects.runs == {"m": 1}


def test_a_statement_of_another_table_has_another_name() -> None:
    """So what a session knows by a name is what was meant, whichever store had it prepared there."""
    texts: dict[bytes, str] = {}
    for table in ('"one"', '"other"', '"schema"."one"'):
        statements = Statements(table)
        for statement in (*statements.one.values(), *statements.many.values()):
            assert texts.setdefault(statement.name, statement.text) == statement.text


def test_who_waits_behind_a_pooler_looks(place: Place, colour: Colour, start_pooler: StartPooler) -> None:
    """What it listens for might be told to another, so it does not wait to be told."""
    pooler, effects = start_pooler(default_pool_size=1, **LENIENT), Effects()
    policy = Policy(wait="20s", lease="10m")
    began, go_on = threading.Event(), threading.Event()

    def hold(message: Message) -> str:
        began.set()
        assert go_on.wait(20)
        return effects.handle(message)

    with Receiver(place.url(), policy=policy) as holder, ThreadPoolExecutor(2) as threads:
        first = threads.submit(holder.process, Message("m"), hold)
        assert began.wait(20)
        with Receiver(url_of(pooler, place), policy=policy) as waiting:
            second = threads.submit(colour.process, waiting, Message("m"), effects)
            assert isinstance(waiting.store, PostgresStore)
            ears = waiting.store._ears
            wait_until(lambda: ears.open or ears._closed)
            go_on.set()
            assert second.result(15).value == first.result(15).value
    assert effects.runs == {"m": 1}
