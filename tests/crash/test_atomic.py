"""kill -9 in atomic mode: record and effect are there together or not at all, no key is stuck, the books balance.

Every victim moves money between two accounts of its own, in transactions with their records. After its death: an
effect is visible if and only if its record is; what was answered is there; nobody has to wait for a lease. Then all of
it is asked again: every transfer happened once, every repeat has the first answer, and not a cent is lost or made.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.crash.atomic_victims import AMOUNT, START, Bank, connect, ids_of, open_accounts, prepare
from tests.integration.transaction_drivers import Place

from effectonce import Message

ROOT = Path(__file__).parents[2]
MOMENTS = 25
"""Random points on every engine in an ordinary run."""
SOAK_MOMENTS = 700


class Executioner:
    """Orders victims, and examines what they leave behind."""

    def __init__(self, place: Place, folder: Path) -> None:
        self.place, self.folder = place, folder
        self.bank = Bank(place)
        self.pairs: list[str] = []
        self.numbers = count(1)
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from tests.crash.atomic_victims import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
        )

    def execute(self, by: str, at: int | None, fault: str = "") -> dict[str, Any]:
        """Have one victim killed, and examine."""
        if not self.pairs:
            self.pairs = [f"p{next(self.numbers)}" for _ in range(100)]
            open_accounts(self.place, self.pairs)
        pair = self.pairs.pop()
        journal = self.folder / pair
        place = (self.place.dialect, self.place.url, self.place.name)
        order = {"by": by, "at": at, "pair": pair, "journal": str(journal), "place": place, "fault": fault}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        assert not answer["failed"], f"{order} failed instead of dying; its traceback is on stderr"
        try:
            self.examine(pair, journal)
        except AssertionError as error:
            error.add_note(f"after {order}")
            raise
        return answer

    def examine(self, pair: str, journal: Path) -> None:
        """Look first, then ask again."""
        ids = ids_of(pair)
        answered = dict(line.split() for line in journal.read_text().splitlines()) if journal.exists() else {}
        bank = self.bank
        with closing(connect(self.place)) as bank.connection:
            for id in ids:
                self.look(bank, id, answered.get(id))
            for answers in (bank.process_all(ids), [bank.answer(id) for id in ids]):
                for id, answer in zip(ids, answers, strict=True):
                    assert answer == ("declined" if "declined" in id else id)
                    assert answer == answered.get(id, answer), "a repeat got another answer"
            self.balance(bank, pair, ids)

    def look(self, bank: Bank, id: str, answered: str | None) -> None:
        """One look at the effect and the record of a transfer, both of the same moment."""
        record, states = self.record_of(bank, id)
        transfers = f"SELECT count(*) FROM transfers_{self.place.name} WHERE id = '{id}'"
        effects, state = bank.execute(f"SELECT ({transfers}), ({record})").fetchone()
        bank.connection.rollback()
        done = state is not None and int(state) in states
        assert state is None or done, f"a claim can be seen that nobody committed: {state}"
        if "declined" in id:
            assert effects == 0, "a declined transfer has moved money"
        else:
            assert effects == int(done), "effect and record are apart"
        assert done or answered is None, "answered, but not recorded"

    def record_of(self, bank: Bank, id: str) -> tuple[str, set[int]]:
        """A subquery for the state of a record, and the states that are final."""
        key = bank.receiver.key_of(Message(id=id))
        if self.place.dialect == "sqlite":
            return f"SELECT state FROM effectonce_records WHERE key = '{key}'", {2, 3}
        if self.place.dialect == "postgresql":
            return f"SELECT state & 7 FROM records_{self.place.name} WHERE key = '{key}'", {2, 3}
        return f"SELECT state FROM records_{self.place.name} WHERE `key` = '{key}'", {2, 3}

    def balance(self, bank: Bank, pair: str, ids: list[str]) -> None:
        """The books."""
        done = [id for id in ids if "declined" not in id]
        rows = bank.execute(
            f"SELECT id FROM transfers_{self.place.name} WHERE id LIKE '{pair}-%' ORDER BY id"
        ).fetchall()
        assert [id for (id,) in rows] == sorted(done), "a transfer is missing, or was made twice"
        accounts = f"SELECT balance FROM accounts_{self.place.name} WHERE id = '{pair}-{{}}'"
        left, right = (bank.execute(accounts.format(side)).fetchone()[0] for side in ("from", "to"))
        assert (left, right) == (START - AMOUNT * len(done), START + AMOUNT * len(done))
        bank.connection.rollback()

    def close(self) -> None:
        self.bank.receiver.close()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module", params=["sqlite", "postgresql", "mysql"])
def atomic(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., dict[str, Any]]]:
    memory = Path("/dev/shm")  # a killed process leaves the kernel's caches alone: no need to wait for a disk
    inside = memory if os.access(memory, os.W_OK) else tmp_path_factory.mktemp("atomic")
    folder = Path(tempfile.mkdtemp(prefix="effectonce-atomic-", dir=inside))
    if request.param == "sqlite":
        place = Place("sqlite", f"sqlite:///{folder / 'bank.db'}")
    else:
        server = request.getfixturevalue("postgres" if request.param == "postgresql" else "mariadb")
        place = Place(request.param, server.url)
    prepare(place)
    executioner = Executioner(place, folder)
    yield executioner.execute
    executioner.close()
    place.ask(f"DROP TABLE accounts_{place.name}", f"DROP TABLE transfers_{place.name}")
    place.remove()
    shutil.rmtree(folder)


def test_killed_at_every_boundary_of_statements(atomic: Callable[..., dict[str, Any]]) -> None:
    """Before and after each statement that goes to the engine, ours, the handler's and COMMIT."""
    whole = atomic("statement", None)
    assert whole["count"] >= 20
    killed = [atomic("statement", at)["killed"] for at in range(1, whole["count"] + 1)]
    assert all(killed)


def kill_at_random(atomic: Callable[..., dict[str, Any]], random: Random, moments: int) -> int:
    """Kill at moments of a victim's life; how many had not come to its end."""
    life = min(atomic("statement", None)["seconds"] for _ in range(3))
    return sum(atomic("time", random.randrange(int(life * 1e6)))["killed"] for _ in range(moments))


def test_killed_at_any_moment(atomic: Callable[..., dict[str, Any]]) -> None:
    """Also while the engine is at work: in the middle of a commit as well as between two."""
    assert kill_at_random(atomic, Random(5), MOMENTS)


def test_an_effect_that_is_committed_first_is_found_out(atomic: Callable[..., dict[str, Any]]) -> None:
    """The examiner can say no: who commits the effect and then the record has, at some point, one without the other."""
    with pytest.raises(AssertionError, match="apart"):
        for at in range(1, 30):
            atomic("statement", at, "the effect first")


@pytest.mark.soak
def test_soak(atomic: Callable[..., dict[str, Any]]) -> None:
    """Hundreds of moments on every engine."""
    random = Random(int(os.environ.get("EFFECTONCE_SEED", "0")))
    assert kill_at_random(atomic, random, SOAK_MOMENTS) >= 500
