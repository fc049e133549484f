"""The client's journal: one name, one key, across processes, crashes and time."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from effectonce import _journal_file
from effectonce.errors import (
    InDoubt,
    InvalidKey,
    KeyReused,
    LateArrival,
    StoreMismatch,
    StoreUnavailable,
    UsageError,
)
from effectonce.http._journal import Entry, Journal
from effectonce.testing.clocks import ManualClock

ROOT = Path(__file__).parents[2]
HOUR, DAY = 3600.0, 86_400.0
REQUEST, ASKED = "POST https://api.example.com/charges", b"asked"


@pytest.fixture
def journal(tmp_path: Path, clock: ManualClock) -> Journal:
    return Journal(tmp_path / "sent.db", clock=clock)


def begin(journal: Journal, name: str = "invoice-77", key: str = "k-1", asked: bytes = ASKED) -> Entry:
    return journal.begin(name, REQUEST, asked, key)


def test_the_first_key_of_a_name_stays_its_key(journal: Journal, clock: ManualClock) -> None:
    """Whoever begins it again, in this process or the next, gets that one and not the new one."""
    assert begin(journal, key="k-1").key == "k-1"
    assert begin(journal, key="k-2").key == "k-1"
    assert begin(Journal(journal.path, clock=clock), key="k-3").key == "k-1"
    journal.done("invoice-77")
    assert begin(journal, key="k-4").key == "k-1", "whoever lost the answer can ask for it again"


def test_names_are_apart(journal: Journal) -> None:
    """Each has its own key."""
    assert begin(journal, "a", "k-1").key != begin(journal, "b", "k-2").key


def test_the_same_name_for_another_request_is_refused(journal: Journal) -> None:
    """Neither the old key nor a new one would be right; the old one is not touched."""
    begin(journal)
    with pytest.raises(KeyReused, match=r"invoice-77.*POST https://api.example.com/charges"):
        begin(journal, asked=b"something else")
    assert begin(journal, key="k-2").key == "k-1"


def test_what_was_not_answered_is_in_doubt(journal: Journal, clock: ManualClock) -> None:
    """Oldest first, with what a person needs to look for it."""
    for number in (3, 1, 2):
        begin(journal, f"invoice-{number}", f"k-{number}")
        clock.advance(1.0)
    journal.done("invoice-1")
    assert [entry.name for entry in journal.in_doubt()] == ["invoice-3", "invoice-2"]
    assert journal.in_doubt()[0] == Entry("invoice-3", "k-3", REQUEST, 1_000_000.0)


def test_done_is_said_once(journal: Journal, clock: ManualClock) -> None:
    """A repeat is not a later answer, and a name that nobody knows is nobody's."""
    begin(journal)
    journal.done("invoice-77")
    clock.advance(HOUR)
    journal.done("invoice-77")
    journal.done("never heard of")
    entry = journal.get("invoice-77")
    assert entry is not None
    assert entry.done == 1_000_000.0
    assert journal.get("never heard of") is None


def test_forgetting_makes_the_name_new(journal: Journal) -> None:
    """For another request, with another key."""
    begin(journal)
    assert journal.forget("invoice-77")
    assert not journal.forget("invoice-77")
    assert begin(journal, key="k-2", asked=b"something else").key == "k-2"


def test_a_key_the_server_has_forgotten_is_not_sent_again(journal: Journal, clock: ManualClock) -> None:
    """It would run a second time. Up to the window it is sent; after it, a person decides."""
    begin(journal)
    clock.advance(DAY)
    assert begin(journal).key == "k-1"
    clock.advance(1.0)
    with pytest.raises(InDoubt, match="never answered"):
        begin(journal)
    assert [entry.name for entry in journal.in_doubt()] == ["invoice-77"]
    journal.done("invoice-77")
    with pytest.raises(LateArrival, match="answered before"):
        begin(journal)


def test_answered_names_are_dropped_when_they_are_old(journal: Journal, clock: ManualClock) -> None:
    """Those in doubt are kept, however old they are."""
    begin(journal, "answered")
    begin(journal, "in doubt")
    journal.done("answered")
    clock.advance(30 * DAY + 1)
    begin(journal, "another")
    assert journal.get("answered") is None
    assert [entry.name for entry in journal.in_doubt()] == ["in doubt", "another"]


def test_a_clock_set_back_makes_nothing_old(journal: Journal, clock: ManualClock) -> None:
    """The key is the same."""
    begin(journal)
    clock.advance(-10 * DAY)
    assert begin(journal, key="k-2").key == "k-1"


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "x" * 256, None, 7])
def test_a_name_has_to_be_one(journal: Journal, name: str) -> None:
    """The rules are those of ids."""
    with pytest.raises(InvalidKey):
        begin(journal, name)


@pytest.mark.parametrize("name", ["Rechnung 77 – größer", "'; DROP TABLE requests; --", "💶"])
def test_any_text_is_a_name(journal: Journal, name: str) -> None:
    """It is data."""
    begin(journal, name)
    assert [entry.name for entry in journal.in_doubt()] == [name]


def test_keeping_less_than_the_window_is_refused(tmp_path: Path) -> None:
    """A name that is forgotten while the server remembers would get a second key."""
    with pytest.raises(UsageError):
        Journal(tmp_path / "sent.db", window="7d", keep="24h")


# The file


def test_another_programs_file_is_left_alone(tmp_path: Path) -> None:
    """Text, or somebody's database."""
    (tmp_path / "notes.txt").write_text("not a database, but long enough to be looked at as one" * 20)
    with sqlite3.connect(tmp_path / "theirs.db") as theirs:
        theirs.execute("CREATE TABLE t (x)")
    theirs.close()
    for name in ("notes.txt", "theirs.db"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(StoreMismatch):
            Journal(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before


def test_a_journal_that_cant_be_written_says_so(tmp_path: Path) -> None:
    """Before anything is sent."""
    with pytest.raises(StoreUnavailable):
        Journal(tmp_path / "nowhere" / "sent.db")
    with pytest.raises(StoreUnavailable):
        Journal(tmp_path)


def test_a_held_lock_is_waited_for_and_then_told(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the journal nothing is sent."""
    monkeypatch.setattr(_journal_file, "BUSY_SECONDS", 0.01)
    other = sqlite3.connect(journal.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="nothing is sent"):
        begin(journal)
    other.execute("ROLLBACK")
    other.close()
    assert begin(journal).key == "k-1"


def test_threads_agree_on_a_key(journal: Journal) -> None:
    """Eight at once for each of twenty names."""
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: (n % 20, begin(journal, f"n-{n % 20}", f"k-{n}").key), range(160)))
    assert len(set(found)) == 20


RACE = """
import sys
from effectonce.http.client import Journal
journal = Journal(sys.argv[1])
sys.stdin.readline()
for number in range(40):
    print(number, journal.begin(f"n-{number}", "POST /", b"asked", f"{sys.argv[2]}-{number}").key)
"""


def child(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_processes_agree_on_a_key(tmp_path: Path) -> None:
    """Also on a file that none of them had made before."""
    racing = [child(RACE, tmp_path / "sent.db", who) for who in range(4)]
    for process in racing:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=100)[0] for process in racing]
    assert [process.returncode for process in racing] == [0] * 4
    assert len(set(outputs)) == 1
    assert len(outputs[0].splitlines()) == 40


DOOMED = """
import os, signal, sqlite3, sys
from effectonce.http.client import Journal
path, statement = sys.argv[1], int(sys.argv[2])
journal = Journal(path)
journal.begin("before", "POST /", b"asked", "k-0")
executed, connect = 0, sqlite3.connect
def die(_):
    global executed
    executed += 1
    if executed == statement:
        os.kill(os.getpid(), signal.SIGKILL)
def doomed(*args, **choices):
    connection = connect(*args, **choices)
    connection.set_trace_callback(die)
    return connection
sqlite3.connect = doomed
print(journal.begin("doomed", "POST /", b"asked", "k-1").key, flush=True)
journal.done("doomed")
print("done", flush=True)
"""


def test_a_process_killed_at_any_statement_leaves_all_or_nothing(tmp_path: Path) -> None:
    """What it had told its caller is there; what it was writing is there or not; the next one goes on."""
    said: list[list[str]] = []
    for statement in range(1, 40):
        path = tmp_path / f"{statement}.db"
        process = child(DOOMED, path, statement)
        said.append(process.communicate(timeout=60)[0].split())
        journal = Journal(path)
        entry = journal.get("doomed")
        assert journal.get("before") is not None
        if said[-1]:
            assert entry is not None
            assert entry.key == "k-1"
        if said[-1] == ["k-1", "done"]:
            assert entry is not None
            assert entry.done is not None
            break
        assert process.returncode == -signal.SIGKILL
        assert begin(journal, "doomed", "k-2").key == ("k-1" if entry else "k-2")
    assert said[0] == []
    assert ["k-1"] in said
    assert said[-1] == ["k-1", "done"], "it was killed at every statement there is"
