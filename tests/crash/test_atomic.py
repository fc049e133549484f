"""kill -9 in atomic mode: record and effect are there together or not at all, no key is stuck, the books balance.

Every victim moves money between two accounts of its own, in transactions with their records. After its death: an
effect is visible if and only if its record is; what was answered is there; nobody has to wait for a lease. Then all of
it is asked again: every transfer happened once, every repeat has the first answer, and not a cent is lost or made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from tests.crash.atomic_executioner import (
    ENGINES,
    FINAL,
    Execute,
    Executioner,
    kill_at_boundaries,
    kill_at_random,
    scene,
)
from tests.crash.atomic_victims import AMOUNT, START, Bank, connect, ids_of, open_accounts, prepare
from tests.integration.transaction_drivers import Place

from effectonce import Message

MOMENTS = 25
"""Random points on every engine in an ordinary run."""
SOAK_MOMENTS = 600


class Auditor(Executioner):
    """Orders victims, and examines what they leave behind."""

    victims = "atomic_victims"

    def __init__(self, place: Place, folder: Path) -> None:
        super().__init__(place, folder)
        self.bank = Bank(place)
        self.pairs: list[str] = []

    def new_name(self) -> str:
        if not self.pairs:
            self.pairs = [super(Auditor, self).new_name() for _ in range(100)]
            open_accounts(self.place, self.pairs)
        return self.pairs.pop()

    def examine(self, name: str, answered: dict[str, str]) -> None:
        """Look first, then ask again."""
        ids, bank = ids_of(name), self.bank
        with closing(connect(self.place)) as bank.connection:
            for id in ids:
                self.look(bank, id, answered.get(id))
            for answers in (bank.process_all(ids), [bank.answer(id) for id in ids]):
                for id, answer in zip(ids, answers, strict=True):
                    assert answer == ("declined" if "declined" in id else id)
                    assert answer == answered.get(id, answer), "a repeat got another answer"
            self.balance(bank, name, ids)

    def look(self, bank: Bank, id: str, answered: str | None) -> None:
        """One look at the effect and the record of a transfer, both of the same moment."""
        record = self.record_of(bank.receiver.key_of(Message(id=id)))
        transfers = f"SELECT count(*) FROM transfers_{self.place.name} WHERE id = '{id}'"
        effects, state = bank.execute(f"SELECT ({transfers}), ({record})").fetchone()
        bank.connection.rollback()
        done = state is not None and int(state) in FINAL
        assert state is None or done, f"a claim can be seen that nobody committed: {state}"
        if "declined" in id:
            assert effects == 0, "a declined transfer has moved money"
        else:
            assert effects == int(done), "effect and record are apart"
        assert done or answered is None, "answered, but not recorded"

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
        super().close()


@pytest.fixture(scope="module", params=ENGINES)
def atomic(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Execute]:
    with scene(request, tmp_path_factory) as (place, folder):
        prepare(place)
        auditor = Auditor(place, folder)
        yield auditor.execute
        auditor.close()
        place.ask(f"DROP TABLE accounts_{place.name}", f"DROP TABLE transfers_{place.name}")


def test_killed_at_every_boundary_of_statements(atomic: Execute) -> None:
    """Before and after each statement that goes to the engine, ours, the handler's and COMMIT."""
    assert kill_at_boundaries(atomic) >= 20


def test_killed_at_any_moment(atomic: Execute) -> None:
    """Also while the engine is at work: in the middle of a commit as well as between two."""
    kill_at_random(atomic, Random(5), MOMENTS)


def test_an_effect_that_is_committed_first_is_found_out(atomic: Execute) -> None:
    """The examiner can say no: who commits the effect and then the record has, at some point, one without the other."""
    with pytest.raises(AssertionError, match="apart"):
        for at in range(1, 30):
            atomic("statement", at, "the effect first")


@pytest.mark.soak
def test_soak(atomic: Execute) -> None:
    """Hundreds of moments on every engine."""
    random = Random(int(os.environ.get("EFFECTONCE_SEED", "0")))
    kill_at_random(atomic, random, SOAK_MOMENTS)
