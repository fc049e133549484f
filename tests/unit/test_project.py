"""The project is what its files say: light to import, small at the front, ready to run."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import effectonce
from effectonce import errors

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def modules_imported_in(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module for node in nodes if isinstance(node, ast.ImportFrom) if node.module}


def test_import_loads_only_the_standard_library() -> None:
    """``import effectonce`` brings in no third-party module, installed or not."""
    # -S keeps site-packages out of the way of the start-up itself: some packages load themselves from .pth files.
    code = "import json, sys; import effectonce; print(json.dumps(sorted(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    output = subprocess.check_output([sys.executable, "-S", "-c", code], env=environment)
    loaded = {name.partition(".")[0] for name in json.loads(output)}
    assert loaded - sys.stdlib_module_names - {"__main__"} == {"effectonce"}


def test_import_does_not_try_third_party_modules_either() -> None:
    """Every module that the façade reaches imports drivers only where they are used.

    The standard library's own ``copy`` looks for Jython's ``org``; that is not ours.
    """
    code = (
        "import sys\n"
        "class Spy:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        root = name.partition('.')[0]\n"
        "        if root not in {'effectonce', 'org', *sys.stdlib_module_names}: sys.exit('tried ' + name)\n"
        "sys.meta_path.insert(0, Spy())\n"
        "import effectonce\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run([sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


def test_facade_is_small_and_sorted() -> None:
    """At most 15 names, in order, all of them there."""
    names = effectonce.__all__
    assert len(names) <= 15
    assert list(names) == sorted(names)
    assert not [name for name in names if not hasattr(effectonce, name)]


def test_what_callers_have_to_catch_is_in_the_facade() -> None:
    """Every error that a single call raises in everyday use, beside what the handler itself raises."""
    everyday = {"InProgress", "KeyReused", "InDoubt", "LateArrival", "LeaseLost", "StoreUnavailable"}
    assert everyday | {"EffectOnceError", "NotApplied"} <= set(effectonce.__all__)
    assert all(getattr(effectonce, name) is getattr(errors, name) for name in everyday)


def test_version_is_written_once() -> None:
    """What the package says of itself is what the project file says."""
    assert effectonce.__version__ == PYPROJECT["project"]["version"]


def test_core_has_no_dependencies() -> None:
    """Drivers are extras, and the extra ``all`` forgets none of them."""
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert PYPROJECT["project"]["dependencies"] == []
    collected = {name for line in extras["all"] for name in line.partition("[")[2].rstrip("]").split(",")}
    assert collected == set(extras) - {"all"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_nothing_stored_is_executed_when_read(path: Path) -> None:
    """No pickle, marshal or shelve anywhere: a store's bytes are data."""
    assert not modules_imported_in(path) & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}


@pytest.mark.parametrize("command", ["demo", "test", "lint", ".ci/run"])
def test_root_commands_can_be_run(command: str) -> None:
    """The commands the README names carry the run bit and a shebang."""
    path = ROOT / command
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/usr/bin/env bash\n")


def test_package_says_that_it_is_typed() -> None:
    """Type checkers look for the marker beside the modules."""
    assert (ROOT / "src/effectonce/py.typed").is_file()


def test_lock_names_no_private_registry() -> None:
    """The lock file works everywhere: its packages come from the public index."""
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    registries = {package["source"].get("registry") for package in lock["package"]} - {None}
    assert registries == {"https://pypi.org/simple"}
