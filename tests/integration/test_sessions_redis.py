"""What is particular to sessions in Redis: those of one moment share a command, and no trouble."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from tests.integration.redis_helpers import clients, forget
from tests.servers.fixtures import HasURL

from effectonce import Receiver
from effectonce.errors import StoreError
from effectonce.sessions import ClientSession, Request, Sessions
from effectonce.sessions._rules import session_id

CROWD = 20
PREFIX = "crowd:"


class Crowd:
    """Clients with a session each, and a look at their server."""

    def __init__(self, sessions: Sessions, server: redis.Redis) -> None:
        self.sessions, self.server = sessions, server
        self.clients = [ClientSession(sessions.open()) for _ in range(CROWD)]

    def scripts(self) -> int:
        """How many the server has run."""
        about: Any = self.server.info("commandstats")
        return int(about["cmdstat_evalsha"]["calls"])

    def spoil(self, client: ClientSession) -> None:
        """Put something else where a session was."""
        self.server.set(f"{PREFIX}session:{session_id('', client.client)}", "somebody else's")

    async def ask_on_a_loop(self) -> list[Any]:
        async def ask(client: ClientSession) -> Any:
            async def effect(request: Request) -> int:
                return request.number

            with client.request() as request:
                return (await self.sessions.aprocess(request, effect)).value

        return await asyncio.gather(*map(ask, self.clients), return_exceptions=True)

    def ask_in_threads(self) -> list[Any]:
        def ask(client: ClientSession) -> Any:
            try:
                with client.request() as request:
                    return self.sessions.process(request, lambda request: request.number).value
            except StoreError as error:
                return error

        with ThreadPoolExecutor(CROWD) as pool:
            return list(pool.map(ask, self.clients))


@pytest.fixture
def crowd(valkey: HasURL) -> Iterator[Crowd]:
    with Receiver(f"{valkey.url}?prefix={PREFIX}") as receiver, clients(valkey.url) as (server, *_):
        yield Crowd(Sessions(receiver), server)
    forget(valkey.url, PREFIX)


def test_requests_of_one_moment_share_a_command(crowd: Crowd) -> None:
    """Twenty clients of a loop cost the server a few scripts, not forty."""

    async def story() -> None:
        await crowd.ask_on_a_loop()
        before = crowd.scripts()
        assert await crowd.ask_on_a_loop() == [2] * CROWD
        assert crowd.scripts() - before < CROWD / 2

    asyncio.run(story())


@pytest.mark.parametrize("colour", ["blocking", "asyncio"])
def test_what_is_wrong_with_one_session_is_its_own(crowd: Crowd, colour: str) -> None:
    """Who shares a command with it has an answer all the same."""
    crowd.spoil(crowd.clients[7])
    answers = crowd.ask_in_threads() if colour == "blocking" else asyncio.run(crowd.ask_on_a_loop())
    (wrong,) = [number for number, answer in enumerate(answers) if answer != 1]
    assert wrong == 7
    assert isinstance(answers[7], StoreError)
