"""Whoever installs an extra has what its part of effectonce imports."""

from __future__ import annotations

import ast
import os
import re
import subprocess
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


def public_modules() -> list[str]:
    paths = [path.relative_to(SOURCE.parent).with_suffix("") for path in SOURCE.rglob("*.py")]
    names = {".".join(path.parts).removesuffix(".__init__") for path in paths}
    return sorted(name for name in names if not re.search(r"\._", name))


def test_without_its_extra_a_module_says_which_one_it_needs() -> None:
    """Every public module can be imported with nothing installed, or its error names an extra that there is."""
    code = (
        "import importlib, sys\n"
        "class Nothing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        root = name.partition('.')[0]\n"
        "        if root not in {'effectonce', *sys.stdlib_module_names}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Nothing())\n"
        "from effectonce.errors import MissingExtra\n"
        "for name in sys.argv[1:]:\n"
        "    try: importlib.import_module(name)\n"
        "    except MissingExtra as error: print(name, error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    modules = public_modules()
    run = subprocess.run(
        [sys.executable, "-S", "-c", code, *modules], env=environment, capture_output=True, text=True
    )
    assert (run.returncode, run.stderr) == (0, "")
    refused = dict(line.split(" ", 1) for line in run.stdout.splitlines())
    assert {"effectonce.http.django_atomic", "effectonce.testing.contract"} <= set(refused) < set(modules)
    for name, why in refused.items():
        found = re.search(r"effectonce\[(\w+)\]", why)
        assert found, name
        assert found[1] in EXTRAS
