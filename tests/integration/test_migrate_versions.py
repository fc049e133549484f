"""``effectonce migrate --versions``: the tables of the version guards, on every engine, from the command line."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pymysql
import pytest
from tests.integration.transaction_drivers import Place

from effectonce.ops.cli import main
from effectonce.versions import EventOrder

TABLES = {"effectonce_updates", "effectonce_positions", "effectonce_parked"}


@pytest.fixture(params=["sqlite", "postgresql", "mysql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """An empty database on each engine."""
    if request.param == "sqlite":
        yield Place("sqlite", f"sqlite:///{tmp_path / 'app.db'}")
        return
    server = Place(
        request.param, request.getfixturevalue({"postgresql": "postgres"}.get(request.param, "mariadb")).url
    )
    name = f"versions_{uuid4().hex[:12]}"
    server.ask(f"CREATE DATABASE {name}")
    yield Place(request.param, f"{server.url.rpartition('/')[0]}/{name}")
    server.ask(f"DROP DATABASE {name}")


def tables(place: Place) -> set[str]:
    if place.dialect == "sqlite":
        return {
            name for (name,) in place.ask("SELECT name FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%'")
        }
    here = "current_schema()" if place.dialect == "postgresql" else "DATABASE()"
    return {
        name
        for (name,) in place.ask(
            f"SELECT table_name FROM information_schema.tables WHERE table_schema = {here}"
        )
    }


def connect(place: Place) -> Any:
    if place.dialect == "sqlite":
        return sqlite3.connect(place.path)
    return psycopg.connect(place.url) if place.dialect == "postgresql" else pymysql.connect(**place.mysql())


def test_it_makes_the_tables_and_says_so(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Safe to repeat, what is there stays, and the guards find what they need."""
    order = EventOrder("shipping")
    assert main(["migrate", "--versions", place.url]) == 0
    connection = connect(place)
    assert order.on(connection).take("order-7", 1, {"is": "placed"}) == [{"is": "placed"}]
    connection.commit()
    assert main(["migrate", "--versions", place.url]) == 0
    assert order.on(connection).take("order-7", 1, {"is": "placed"}) == []
    connection.close()
    said = capsys.readouterr().out.splitlines()
    assert [line.endswith(" is ready.") for line in said] == [True, True]
    assert tables(place) == TABLES


def test_it_prints_what_a_person_may_run(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """The statements make the same tables; printing them touches nothing."""
    assert main(["migrate", "--versions", "--print", place.url]) == 0
    assert tables(place) == set()
    statements = capsys.readouterr().out.split(";")
    assert statements.pop().isspace()
    place.ask(*statements)
    assert tables(place) == TABLES


def test_several_at_the_same_moment(place: Place) -> None:
    """Each instance of an application may do it when it starts."""
    with ThreadPoolExecutor(8) as people:
        assert list(people.map(main, [["migrate", "--versions", place.url]] * 8)) == [0] * 8
    assert tables(place) == TABLES


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://u:secret@host/0", "is no database for this"),
        ("sqlite://", "names no file"),
        ("postgresql://u:secret@127.0.0.1:9/app", "gave no answer"),
        ("mysql://u:secret@127.0.0.1:9/app", "gave no answer"),
        ("sqlite:///nowhere/app.db", "gave no answer"),
    ],
)
def test_what_is_wrong_is_said(url: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2 and a sentence, without a password."""
    assert main(["migrate", "--versions", url]) == 2
    said = capsys.readouterr().err
    assert why in said
    assert "secret" not in said


def test_one_thing_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    """An outbox and versions are two commands."""
    with pytest.raises(SystemExit):
        main(["migrate", "--versions", "--outbox", "sqlite:///app.db"])
    assert "not allowed with" in capsys.readouterr().err
