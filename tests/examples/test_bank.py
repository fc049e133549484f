"""The bank of the examples: what its README says, and the money, through duplicates and ``kill -9``, on two engines."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import httpx
import psycopg
import pytest
from tests.examples.running import Example, ExampleServer
from tests.integration.transaction_drivers import Place
from tests.servers.fixtures import HasURL

from effectonce.http.client import replayed

pytestmark = pytest.mark.timeout(300)

SERVE = "uvicorn app:app --port 8000"
MORTAL = """
import os, signal
import books
from app import app

transfer = books.transfer

async def transfer_and_die(*asked):
    await transfer(*asked)
    os.kill(os.getpid(), signal.SIGKILL)

books.transfer = transfer_and_die
"""
"""The bank in a process that dies when the money is moved, and not committed."""
NAIVE = """

from uuid import uuid4

app.user_middleware.clear()
app.router.routes[:] = [each for each in app.router.routes if getattr(each, "endpoint", 0) is not create_transfer]


@app.post("/transfers", status_code=201)
async def transfer_at_once(asked: Transfer) -> Transfer:
    try:
        async with engine.begin() as own:
            await books.transfer(own, uuid4().hex, asked.model_dump())
    except books.Refused as refused:
        raise HTTPException(402, str(refused)) from None
    return asked
"""
"""What is added to the app so that nobody asks whether a transfer was made already."""


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def bank(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bank]:
    example = Example("bank", tmp_path_factory.mktemp("bank"))
    (example.folder / "mortal.py").write_text(MORTAL)
    if request.param == "sqlite":
        yield Bank(example, Place("sqlite", f"sqlite:///{example.folder / 'bank.db'}"))
        return
    server: HasURL = request.getfixturevalue("postgres")
    name = f"bank_{uuid4().hex[:12]}"
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        yield Bank(example, Place("postgresql", f"{server.url.rpartition('/')[0]}/{name}"))
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


class Bank:
    """An example on a database, and what an auditor sees who asks the database alone."""

    def __init__(self, example: Example, place: Place) -> None:
        self.example, self.place = example, place
        self.environment = {"BANK_DATABASE": place.url}
        example.run("python books.py", **self.environment)

    def serve(self, command: str = SERVE) -> ExampleServer:
        return self.example.serve(command, self.environment)

    def made(self, reference: str) -> int:
        rows = self.place.ask(f"SELECT count(*) FROM transfers WHERE reference = '{reference}'")
        return int(rows[0][0])

    def balances(self) -> dict[str, int]:
        return {name: int(cents) for name, cents in self.place.ask("SELECT name, balance FROM accounts")}

    def audit(self) -> None:
        """No reference twice, every balance what its transfers make of it, and not a cent lost or made."""
        assert not self.place.ask("SELECT reference FROM transfers GROUP BY reference HAVING count(*) > 1")
        moved = "SELECT coalesce(sum(amount), 0) FROM transfers WHERE {} = accounts.name"
        assert not self.place.ask(
            "SELECT name, balance FROM accounts WHERE balance < 0 OR balance <> opened_with"
            f" - ({moved.format('sender')}) + ({moved.format('recipient')})"
        )
        assert sum(self.balances().values()) == 205_000


def ask(server: ExampleServer, key: str, amount: str = "5.00", **words: str) -> httpx.Response:
    """Ask for a transfer, once."""
    headers = {"X-API-Key": words.pop("caller", "sk_counter"), "Idempotency-Key": f'"{key}"'}
    asked = {"sender": "ada", "recipient": "bob", "amount": amount, "reference": key} | words
    return httpx.post(f"{server.url}/transfers", json=asked, headers=headers, timeout=60)


def test_the_commands_of_the_readme(bank: Bank) -> None:
    """They run as they stand there: a hundred transfers, processes that are killed, and books that balance."""
    install, storm = bank.example.commands
    bank.example.run(install)
    said = bank.example.run(storm, **bank.environment)
    assert said.splitlines()[-1] == "The books balance."
    arrived, kills, made = (int(said.split()[place]) for place in (3, 5, 7))
    assert (kills, made) == (4, bank.place.ask("SELECT count(*) FROM transfers")[0][0])
    assert arrived > 200
    bank.audit()


def test_the_storm_would_tell(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Without the receiver, and with another key each time, the same audit finds transfers that were made twice."""
    example = Example("bank", tmp_path_factory.mktemp("naive"))
    app = example.folder / "app.py"
    app.write_text(app.read_text() + NAIVE)
    assert "made twice: [" in example.run("python storm.py 20 0", status=1)


def test_killed_before_the_commit(bank: Bank) -> None:
    """Nothing has happened, and nobody has to wait: the next one with the same key makes the transfer at once."""
    key = f"killed-{uuid4()}"
    before = bank.balances()
    with bank.serve("uvicorn mortal:app --port 8000") as mortal, pytest.raises(httpx.TransportError):
        ask(mortal, key)
    assert (bank.made(key), bank.balances()) == (0, before)
    with bank.serve() as server:
        answers = [ask(server, key) for _ in range(3)]
    assert [(answer.status_code, replayed(answer)) for answer in answers] == [
        (201, False),
        (201, True),
        (201, True),
    ]
    assert bank.made(key) == 1
    bank.audit()


def test_what_is_refused(bank: Bank) -> None:
    """Too much money is an answer that stays; strangers, unknown accounts and parts of a cent move nothing."""
    before, large, key = bank.balances(), f"large-{uuid4()}", f"other-{uuid4()}"
    with bank.serve() as server:
        answers = [ask(server, large, "100000.00") for _ in range(2)]
        assert [(answer.status_code, replayed(answer)) for answer in answers] == [(402, False), (402, True)]
        assert answers[0].json() == answers[1].json() == {"detail": "ada has less than 100000.00."}
        assert ask(server, f"{key}-1", caller="sk_nobody").status_code == 403
        assert ask(server, f"{key}-2", recipient="nobody").json() == {"detail": "There is no account nobody."}
        assert ask(server, f"{key}-3", "0.001").status_code == 422
        assert httpx.get(f"{server.url}/accounts", timeout=60).status_code == 403
        assert bank.balances() == before
        assert ask(server, key, "0.01").status_code == 201
        assert ask(server, key, "0.02").json()["code"] == "key-reused"
    assert bank.balances() == before | {"ada": before["ada"] - 1, "bob": before["bob"] + 1}


def test_no_program_can_overdraw(bank: Bank) -> None:
    """It is the database's own rule, whoever asks."""
    with pytest.raises(Exception, match="no_overdraft"):
        bank.place.ask("UPDATE accounts SET balance = -1 WHERE name = 'ada'")


def test_a_receiver_without_memory(bank: Bank) -> None:
    """The second line: its records are gone, the handler runs again, the books have the transfer and move nothing."""
    key = f"forgotten-{uuid4()}"
    with bank.serve() as server:
        first = ask(server, key)
        records = "effectonce_records" if bank.place.dialect == "sqlite" else "effectonce"
        bank.place.ask(f"DELETE FROM {records}")
        again = ask(server, key)
    assert (first.status_code, again.status_code, replayed(again)) == (201, 201, False)
    assert (first.json(), bank.made(key)) == (again.json(), 1)
    bank.audit()
