"""The tables of client sessions: made when they are first used, or by hand where programs may not."""

from __future__ import annotations

import pytest
from tests.integration import mysql_helpers, postgres_helpers
from tests.servers.fixtures import HasURL

from effectonce import Receiver
from effectonce.errors import StoreError, UsageError
from effectonce.sessions import Request, Sessions
from effectonce.stores.memory import MemoryStore


def test_postgresql_by_hand(postgres: HasURL) -> None:
    """With create=no the error names the statements; they are all that it takes."""
    with postgres_helpers.Place(postgres.url) as place:
        with Receiver(place.url()) as receiver:
            receiver.get("nothing")  # makes the store's own table
        with Receiver(place.url(create="no")) as receiver:
            sessions = Sessions(receiver)
            with pytest.raises(StoreError, match=r"Sessions\.ddl"):
                sessions.open()
            with place.session() as session:
                session(f"SET ROLE {place.user}")
                session(sessions.ddl())
            opened = sessions.open()
            assert sessions.process(Request(opened.client, 1), lambda request: request.number).value == 1
            sessions.close()


@pytest.mark.parametrize("engine", ["postgres", "mariadb"])
def test_two_sorts_of_sessions_share_a_receiver(engine: str, request: pytest.FixtureRequest) -> None:
    """With leases of their own: what one has prepared on a connection is the other's, too."""
    helpers = {"postgres": postgres_helpers, "mariadb": mysql_helpers}[engine]
    server: HasURL = request.getfixturevalue(engine)
    with helpers.Place(server.url) as place, Receiver(place.url()) as receiver:
        for lease in ("1h", "1m"):
            sessions = Sessions(receiver, lease=lease)
            opened = sessions.open()
            assert sessions.process(Request(opened.client, 1), lambda request: request.number).value == 1
        if engine == "mariadb":
            with place.session() as session:
                for table in ("sessions", "requests"):
                    session(f"DROP TABLE {place.table}_{table}")


def test_mysql_by_hand(mariadb: HasURL) -> None:
    """Likewise, and what is missing is said."""
    with mysql_helpers.Place(mariadb.url) as place:
        with Receiver(place.url()) as receiver:
            receiver.get("nothing")
        with Receiver(place.url(create="no")) as receiver:
            sessions = Sessions(receiver)
            with pytest.raises(StoreError, match=r"Sessions\.ddl"):
                sessions.open()
            with place.session() as session:
                for statement in filter(str.strip, sessions.ddl().split(";")):
                    session(statement)
            opened = sessions.open()
            assert sessions.process(Request(opened.client, 1), lambda request: request.number).value == 1
            sessions.close()
            with place.session() as session:
                for table in ("sessions", "requests"):
                    session(f"DROP TABLE {place.table}_{table}")


def test_what_has_no_sessions_or_no_tables_says_so(dynamodb: HasURL) -> None:
    """A store of another make has none; memory has no tables, and DynamoDB's sessions are in the store's own."""

    class Other(MemoryStore):
        """Not one that there are sessions for, as far as its class tells."""

    store = Other()
    with Receiver(store) as receiver, pytest.MonkeyPatch.context() as patch:
        patch.setattr("effectonce.sessions._server.STORES", {})
        with pytest.raises(UsageError, match="no sessions in a Other"):
            Sessions(receiver)
    for url in ("memory://", dynamodb.url):
        with Receiver(url) as receiver, pytest.raises(UsageError, match="no tables"):
            Sessions(receiver).ddl()
