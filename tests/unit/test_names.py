"""Names of functions and classes: the same however the module that has them was started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import effectonce

SCRIPT = """
import multiprocessing
from dataclasses import dataclass

from effectonce import Receiver, keys
from effectonce.codec import encode_error

receiver = Receiver("memory://")


class Declined(Exception): ...


@dataclass
class Order:
    id: str


@receiver.idempotent(key="order.id")
def charge(order: Order) -> None: ...


def names():
    print(charge.key(Order("o-1")), keys.fingerprint(Order("o-1")).hex(), encode_error(Declined()).hex(), flush=True)


if __name__ == "__main__":
    names()
    child = multiprocessing.get_context("spawn").Process(target=names)
    child.start()
    child.join()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "shop"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "till.py").write_text(SCRIPT)
    (tmp_path / "till.py").write_text(SCRIPT)
    return tmp_path


def printed(folder: Path, *command: str) -> list[str]:
    path = os.pathsep.join([str(folder), str(Path(effectonce.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_script_has_the_names_of_its_module(folder: Path) -> None:
    """Run as a script, in a process that it spawns, or imported: one key, one fingerprint, one remembered error."""
    imported = printed(folder, "-c", "import till; till.names()")
    assert imported[0].startswith("|till.charge|")
    assert printed(folder, "till.py") == imported * 2


def test_a_module_of_a_package_has_its_whole_name(folder: Path) -> None:
    """``python -m shop.till`` and ``import shop.till`` mean the same functions."""
    imported = printed(folder, "-c", "import shop.till; shop.till.names()")
    assert imported[0].startswith("|shop.till.charge|")
    assert printed(folder, "-m", "shop.till") == imported * 2


def test_a_program_without_a_file_keeps_its_name(folder: Path) -> None:
    """What is typed at a prompt, or in a notebook, has no other name than ``__main__``."""
    assert printed(folder, "-c", SCRIPT.partition("if __name__")[0] + "names()")[0].startswith(
        "|__main__.charge|"
    )
