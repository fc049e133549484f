"""Whoever installs an extra has what its part of effectonce imports."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "effectonce"
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
PARTS = {
    "redis": ["stores/*redis*.py", "messaging/redis_streams.py"],
    "postgres": [f"stores/_postgres_{name}.py" for name in ("wire", "threads", "loops", "ears")],
    "asyncpg": ["stores/_postgres_*.py"],  # those of psycopg too: blocking verbs use them, and whoever waits
    "dynamodb": ["stores/*dynamodb*.py"],
    "celery": ["messaging/celery.py"],
    "dramatiq": ["messaging/dramatiq.py"],
    "taskiq": ["messaging/taskiq.py"],
    "client": ["http/client.py", "http/_httpx.py", "http/_requests.py"],
}
COMES_WITH = {"anyio": "httpx", "botocore": "boto3"}
"""Packages that others bring along."""


def imported(path: Path) -> set[str]:
    """The packages that a module imports, at once or when it needs them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(aliases):
                names |= {alias.name for alias in aliases}
            case ast.ImportFrom(str(module), _, 0):
                names.add(module)
            case ast.Call(ast.Name("import_module"), [ast.Constant(str(module)), *_]):
                names.add(module)
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("extra", PARTS)
def test_an_extra_brings_what_is_imported(extra: str) -> None:
    """Every package that a part imports is in its extra, and nothing else is."""
    paths = [path for pattern in PARTS[extra] for path in SOURCE.glob(pattern)]
    packages = set[str]().union(*map(imported, paths)) - set(sys.stdlib_module_names) - {"effectonce", ""}
    brought = {re.match(r"[\w.-]+", line)[0].lower() for line in EXTRAS[extra]}  # type: ignore[index]
    assert {COMES_WITH.get(name, name) for name in packages} == brought
