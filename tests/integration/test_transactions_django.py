"""Atomic mode with Django's connections, over its SQLite and PostgreSQL backends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.integration.transaction_drivers import Place
from tests.servers.fixtures import HasURL

ROOT = Path(__file__).parents[2]


def tell(database: dict[str, Any], place: Place) -> None:
    """Have the story told."""
    told = subprocess.run(
        [sys.executable, "-m", "tests.integration.django_atomic", json.dumps([database, place.store_url])],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "told to its end" in told.stdout, told.stderr


def test_over_sqlite(tmp_path: Path) -> None:
    """Commit, rollback, savepoints, errors, a batch: inside ``transaction.atomic``, and refused outside."""
    place = Place("sqlite", f"sqlite:///{tmp_path / 'app.db'}")
    tell({"ENGINE": "django.db.backends.sqlite3", "NAME": place.path}, place)


@pytest.mark.parametrize("binding", [False, True], ids=["client-side binding", "server-side binding"])
def test_over_postgresql(postgres: HasURL, binding: bool) -> None:
    """The same, however psycopg is told to send values."""
    place = Place("postgresql", postgres.url)
    parts = urlsplit(postgres.url)
    database = {
        "ENGINE": "django.db.backends.postgresql", "NAME": parts.path[1:], "USER": parts.username,
        "PASSWORD": parts.password, "HOST": parts.hostname, "PORT": parts.port,
        "OPTIONS": {"server_side_binding": binding},
    }  # fmt: skip
    place.ask(f"CREATE TABLE {place.effects} (id VARCHAR(100))")
    try:
        tell(database, place)
    finally:
        place.remove()
