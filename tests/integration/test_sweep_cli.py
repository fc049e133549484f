"""``effectonce sweep``: a Sweeper by its name, or a store by its URL; once, or until a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from effectonce import Message, Policy, Receiver
from effectonce._blocking import run
from effectonce.ops.cli import main
from effectonce.testing.clocks import wait_until

ROOT = Path(__file__).parents[2]
APP = """
import os, signal, sys
from effectonce import Policy, Receiver
from effectonce.saga import Saga, step
from effectonce.sweeper import Sweeper

receiver = Receiver("sqlite:///effects.db", policy=Policy(lease="2s"))

def note(what):
    with open("notes", "a") as file:
        file.write(what + "\\n")

def first(order: str) -> None:
    note("first")

def second(order: str) -> None:
    note("second")
    if __name__ == "__main__":
        os.kill(os.getpid(), signal.SIGKILL)

saga = Saga(receiver, "two", step(first, None), step(second, None))
sweeper = Sweeper(receiver, saga, every="20ms")
other = "no sweeper"

if __name__ == "__main__":
    saga.run(sys.argv[1], "an order")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def leave(folder: Path, id: str) -> None:
    """A saga whose process dies in its second step."""
    victim = started(folder, "app.py", id)
    victim.communicate(timeout=60)
    assert victim.returncode == -signal.SIGKILL


def notes(folder: Path) -> list[str]:
    return (folder / "notes").read_text().splitlines()


def test_it_sweeps_until_a_signal(folder: Path) -> None:
    """Sagas are brought to their end by whoever sweeps; SIGTERM ends it with a word about what it did."""
    sweeper = started(folder, "-m", "effectonce", "sweep", "app:sweeper", "--every", "50ms")
    for number in range(2):
        leave(folder, f"o-{number}")
    wait_until(lambda: notes(folder).count("second") == 4)
    wait_until(lambda: "COMPLETED" in states(folder) and len(states(folder)) == 1)
    sweeper.send_signal(signal.SIGTERM)
    said, _ = sweeper.communicate(timeout=60)
    assert sweeper.returncode == 0
    assert said.splitlines() == [
        "sweeping app:sweeper",
        "completed 2, compensated 0, called 0 handlers, in doubt 0, settled 0, failed 0",
    ]
    assert sorted(notes(folder)) == ["first"] * 2 + ["second"] * 4


def states(folder: Path) -> set[str]:
    with Receiver(f"sqlite:///{folder / 'effects.db'}") as receiver:
        return {record.state.name for record in run(receiver.store.for_blocking().scan())}


def test_once(folder: Path) -> None:
    """``--once`` ends by itself."""
    leave(folder, "o-1")
    done = 0
    while not done:  # the lease of the dead has to end first
        swept = started(folder, "-m", "effectonce", "sweep", "app:sweeper", "--once")
        said, _ = swept.communicate(timeout=60)
        assert swept.returncode == 0
        done = int(said.split("completed ")[1].split(",")[0])
    assert notes(folder) == ["first", "second", "second"]


def test_a_store_without_handlers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its URL: what was claimed at most once is marked as in doubt."""
    url = f"sqlite:///{tmp_path / 'effects.db'}"

    def die(message: Message) -> None:
        raise KeyboardInterrupt

    with Receiver(url, policy=Policy(lease="200ms", on_crash="in_doubt")) as receiver:
        with pytest.raises(KeyboardInterrupt):
            receiver.process(Message(id="m-1"), die)
        key = receiver.key_of(Message(id="m-1"))
        wait_until(lambda: _is_over(receiver, key))
    assert main(["sweep", url, "--once"]) == 0
    assert "in doubt 1" in capsys.readouterr().out


def _is_over(receiver: Receiver, key: str) -> bool:
    record, now = receiver.get(key), run(receiver.store.for_blocking().now())
    return record is not None and record.lease_until < now


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("app", "names no Sweeper"),
        ("nowhere:sweeper", "no module 'nowhere'"),
        ("app:other", "not a Sweeper"),
        ("app:missing", "not a Sweeper"),
    ],
)
def test_a_wrong_name_is_explained(folder: Path, what: str, message: str) -> None:
    """In one line, with exit code 2."""
    refused = started(folder, "-m", "effectonce", "sweep", what)
    said, complaint = refused.communicate(timeout=60)
    assert (refused.returncode, said) == (2, "")
    assert message in complaint
    assert len(complaint.splitlines()) == 1
