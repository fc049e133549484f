"""The demo: its plan, its bank, an audit that can say no, and one real storm."""

from __future__ import annotations

import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from effectonce import __version__
from effectonce.errors import StoreUnavailable
from effectonce.ops import cli
from effectonce.ops.demo import play
from effectonce.ops.demo.audit import audit
from effectonce.ops.demo.bank import Bank, Entry
from effectonce.ops.demo.broker import Tally
from effectonce.ops.demo.drawing import Canvas, Progress, money, table
from effectonce.ops.demo.storm import ACCOUNTS, OPENING_CENTS, PLACES, Place, Storm, Transfer, plan
from effectonce.ops.demo.worker import pay

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "error"}


def settle(storm: Storm, bank: Bank) -> None:
    """Pay every transfer exactly once."""
    for transfer in storm.transfers:
        pay(bank, transfer, lambda _: None, lambda _: None)


@pytest.fixture
def storm() -> Storm:
    return plan(transfers=40, kills=8, seed=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "bank.db"
    Bank.found(path, [OPENING_CENTS] * ACCOUNTS)
    return path


@pytest.fixture
def bank(path: Path) -> Iterator[Bank]:
    with Bank(path) as bank:
        yield bank


class TestPlan:
    def test_same_seed_same_storm(self) -> None:
        """A storm is its arguments; another seed is another storm."""
        assert plan(200, 12, seed=5) == plan(200, 12, seed=5)
        assert plan(200, 12, seed=5) != plan(200, 12, seed=6)

    def test_each_transfer_is_delivered_one_to_five_times(self) -> None:
        """Nothing is left out, and every number of repeats occurs."""
        storm = plan(500, 0, seed=2)
        times = Counter(storm.deliveries)
        assert set(times) == set(range(500))
        assert set(times.values()) == {1, 2, 3, 4, 5}

    def test_deliveries_are_out_of_order(self) -> None:
        """Repeats overtake other transfers' first deliveries."""
        storm = plan(500, 0, seed=2)
        assert list(storm.deliveries) != sorted(storm.deliveries)

    @pytest.mark.parametrize("kills", [0, 1, 5, 16, 70])
    def test_as_many_kills_as_asked_for_in_every_place(self, kills: int) -> None:
        """Kills are spread over the three places, and some are blind; more than there are transfers is fine."""
        storm = plan(40, kills, seed=3)
        assert storm.kills == kills
        if kills >= 5:
            assert set(storm.kills_at.values()) == set(PLACES)
            assert storm.kills_after
        assert all(0 <= number < len(storm.deliveries) for number in storm.kills_after)

    def test_transfers_move_money_and_make_none(self) -> None:
        """The orders themselves balance: closing balances add up to the opening ones."""
        storm = plan(300, 0, seed=4)
        assert sum(storm.closing_balances()) == ACCOUNTS * OPENING_CENTS
        assert all(transfer.payer != transfer.payee and transfer.cents > 0 for transfer in storm.transfers)


class TestBank:
    def test_an_entry_is_posted_once_per_key(self, bank: Bank) -> None:
        """The bank's half of the bargain: a known key changes neither ledger nor balance."""
        assert bank.post(Entry("t", 3, -500), "key")
        assert not bank.post(Entry("t", 3, -500), "key")
        assert bank.entries() == [Entry("t", 3, -500)]
        assert bank.balances()[3] == OPENING_CENTS - 500
        assert bank.stopped() == 1

    @pytest.mark.parametrize("place", PLACES)
    def test_a_transfer_cut_short_anywhere_is_finished_by_its_repeat(self, bank: Bank, place: Place) -> None:
        """Died before the debit, half way or after the credit: paying again under the same keys books it once."""
        transfer = Transfer("t", 1, 2, 700)

        def die(where: Place) -> None:
            if where == place:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pay(bank, transfer, lambda name: f"t-{name}", die)
        pay(bank, transfer, lambda name: f"t-{name}", lambda _: None)
        assert bank.entries() == [Entry("t", 1, -700), Entry("t", 2, 700)]


DOCTORED: dict[str, tuple[str, dict[str, Any]]] = {
    "a credit was lost": ("DELETE FROM entries WHERE id = 2", {"lost": 1}),
    "a debit was lost": ("DELETE FROM entries WHERE id = 1", {"lost": 1}),
    "a credit was booked twice": (
        "INSERT INTO entries (transfer, account, cents) SELECT transfer, account, cents FROM entries WHERE id = 2",
        {"double": 1, "lost": 0},
    ),
    "a debit was booked twice": (
        "INSERT INTO entries (transfer, account, cents) SELECT transfer, account, cents FROM entries WHERE id = 1",
        {"double": 1, "overpaid_cents": 0},
    ),
    "an amount was changed": ("UPDATE entries SET cents = cents + 1 WHERE id = 2", {"lost": 1}),
    "money went to another account": (
        "UPDATE entries SET account = (account + 1) % 100 WHERE id = 2",
        {"lost": 1},
    ),
    "a transfer nobody ordered": (
        "INSERT INTO entries (transfer, account, cents) VALUES ('forged', 1, -5), ('forged', 2, 5)",
        {"lost": 0, "double": 0},
    ),
    "a balance was changed": (
        "UPDATE accounts SET cents = cents - 1 WHERE number = 9",
        {"lost": 0, "double": 0},
    ),
}


class TestAudit:
    def test_says_yes_when_every_transfer_was_booked_once(self, storm: Storm, bank: Bank) -> None:
        """Nothing lost, nothing double, the books balance."""
        settle(storm, bank)
        assert audit(storm, bank) == (0, 0, 0, 0, True)
        assert audit(storm, bank).passed

    @pytest.mark.parametrize("what", DOCTORED)
    def test_says_no_when_the_ledger_was_doctored(
        self, storm: Storm, bank: Bank, path: Path, what: str
    ) -> None:
        """A check that can't say no is worse than none."""
        settle(storm, bank)
        statement, findings = DOCTORED[what]
        connection = sqlite3.connect(path)
        connection.execute(statement)
        connection.commit()
        connection.close()
        found = audit(storm, bank)
        assert not found.passed
        assert not found.books_balance
        assert findings.items() <= found._asdict().items()

    def test_money_that_left_and_never_arrived_has_vanished(self, storm: Storm, bank: Bank) -> None:
        """A debit without its credit, then the whole transfer again: the first debit's cents are gone."""
        settle(storm, bank)
        transfer = storm.transfers[0]
        bank.post(Entry(transfer.id, transfer.payer, -transfer.cents), None)
        found = audit(storm, bank)
        assert (found.lost, found.double, found.vanished_cents) == (0, 1, transfer.cents)

    def test_nothing_booked_is_everything_lost(self, storm: Storm, bank: Bank) -> None:
        """An empty ledger is no clean one."""
        assert audit(storm, bank).lost == len(storm.transfers)


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class TestDrawing:
    ROWS: Any = (
        ("lost", ("0", "good"), ("1,234", "bad")),
        None,
        ("books balance", ("yes", "good"), ("NO", "bad")),
    )
    HEADS = ("audit", "protected", "unprotected")

    def test_columns_line_up(self) -> None:
        """Every line of a table is as wide as the others, and a file gets no colour."""
        lines = table(Canvas(io.StringIO()), self.HEADS, self.ROWS)
        assert len({len(line) for line in lines}) == 1
        assert "\x1b" not in "".join(lines)

    def test_colour_on_a_terminal_unless_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """NO_COLOR is honoured."""
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        assert "\x1b[32m" in "".join(table(Canvas(Terminal()), self.HEADS, self.ROWS))
        monkeypatch.setenv("NO_COLOR", "1")
        assert "\x1b" not in "".join(table(Canvas(Terminal()), self.HEADS, self.ROWS))

    def test_plain_characters_where_boxes_can_not_be_shown(self) -> None:
        """An ASCII stream gets an ASCII table."""
        stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        assert "\n".join(table(Canvas(stream), self.HEADS, self.ROWS)).isascii()

    def test_progress_is_a_few_plain_lines_in_a_file(self) -> None:
        """One line a quarter, however often progress is told."""
        stream = io.StringIO()
        progress = Progress(Canvas(stream), "protected", 1000)
        for done in range(1001):
            progress.show(done, "detail")
        progress.end()
        assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["25%", "50%", "75%", "100%"]

    def test_progress_is_one_live_line_on_a_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each state overwrites the last; the final one stays."""
        monkeypatch.setenv("TERM", "xterm")
        stream = Terminal()
        progress = Progress(Canvas(stream), "protected", 10)
        for done in range(11):
            progress.show(done, "detail")
        progress.end()
        assert stream.getvalue().count("\n") == 1
        assert "100%" in stream.getvalue().rpartition("\r")[2]

    @pytest.mark.parametrize(
        ("cents", "text"), [(0, "0.00"), (5, "0.05"), (123456, "1,234.56"), (-250, "-2.50")]
    )
    def test_money_is_written_as_people_do(self, cents: int, text: str) -> None:
        """Thousands are grouped, cents have two places."""
        assert money(cents) == text


class TestCommandLine:
    @pytest.fixture
    def run_demo(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], int]:
        """Run the command with something else in place of the broker."""

        def run(broker: Callable[..., Any]) -> int:
            monkeypatch.setattr(play, "Broker", broker)
            return cli.main(["demo", "--transfers", "10"])

        return run

    def test_failed_audit_is_exit_code_1(
        self, run_demo: Callable[..., int], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A protected run that leaves a transfer unpaid is said loudly, and fails the command."""

        class Careless:
            def __init__(self, storm: Storm, arguments: list[str], *_: object) -> None:
                self.storm, self.path = storm, Path(arguments[1])

            def run(self) -> Tally:
                with Bank(self.path) as bank:
                    for transfer in self.storm.transfers[1:]:
                        pay(bank, transfer, lambda _: None, lambda _: None)
                return Tally()

        assert run_demo(Careless) == 1
        assert "FAILED" in capsys.readouterr().out

    def test_an_error_is_one_line_and_exit_code_2(
        self, run_demo: Callable[..., int], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """What the error tree says reaches the user without a traceback."""

        def refuse(*_: object) -> None:
            raise StoreUnavailable("the disk is full;\n make room")

        assert run_demo(refuse) == 2
        assert capsys.readouterr().err == "effectonce: the disk is full; make room\n"

    def test_ctrl_c_is_exit_code_130(
        self, run_demo: Callable[..., int], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Without a traceback."""

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        assert run_demo(interrupt) == 130
        assert capsys.readouterr().err.strip() == ""

    def test_a_used_directory_is_left_alone(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Another demo's books are never overwritten."""
        (tmp_path / "protected-bank.db").write_text("mine")
        assert cli.main(["demo", "--dir", str(tmp_path)]) == 2
        assert "is there already" in capsys.readouterr().err
        assert (tmp_path / "protected-bank.db").read_text() == "mine"

    def test_version_and_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        """``--version`` says it; no command at all shows the help and fails."""
        with pytest.raises(SystemExit, match="0"):
            cli.main(["--version"])
        assert capsys.readouterr().out == f"effectonce {__version__}\n"
        assert cli.main([]) == 2
        assert "demo" in capsys.readouterr().err

    def test_every_figure_is_explained(self, capsys: pytest.CaptureFixture[str]) -> None:
        """``demo --help`` says what each row of the audit means."""
        with pytest.raises(SystemExit):
            cli.main(["demo", "--help"])
        text = capsys.readouterr().out
        for figure in (
            "executed",
            "replayed",
            "takeovers",
            "refused",
            "unanswered",
            "stopped",
            "lost",
            "double",
        ):
            assert f"\n  {figure} " in text


def test_a_storm_is_weathered_with_protection_and_not_without(tmp_path: Path) -> None:
    """Real processes, really killed: each transfer takes effect once; the same storm unprotected books many twice."""
    command = [sys.executable, "-m", "effectonce", "demo", "--json", "--dir", str(tmp_path / "kept")]
    size = ["--transfers", "150", "--kills", "8", "--workers", "3", "--seed", "11"]
    ran = subprocess.run([*command, *size], env=ENVIRONMENT, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    figures = json.loads(ran.stdout)
    protected, unprotected = figures["protected"], figures["unprotected"]
    arrivals = len(plan(150, 8, 11).deliveries)

    assert "unprotected  100%  8 of 8 workers killed" in ran.stderr
    assert (protected["lost"], protected["double"], protected["books_balance"]) == (0, 0, True)
    assert (protected["executed"], protected["kills"], unprotected["kills"]) == (150, 8, 8)
    # Two of three aimed kills leave a claim behind the effect; each kill in a handler is taken over.
    assert protected["takeovers"] >= 6
    assert protected["stopped"] >= 4
    # The deliveries add up. A worker killed between its record and its acknowledgement leaves one more to replay.
    answered = protected["deliveries"] - protected["refused"] - protected["unanswered"]
    assert answered == arrivals
    assert arrivals - 150 <= protected["replayed"] <= arrivals - 150 + protected["kills"]
    assert unprotected["double"] > 50
    assert unprotected["vanished_cents"] > 0
    assert not unprotected["books_balance"]
    for figure in ("deliveries", "executed", "replayed", "takeovers", "lost", "double"):
        assert type(protected[figure]) is type(unprotected[figure]) is int
    assert (tmp_path / "kept" / "protected-effects.db").is_file()


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_ends_the_demo_and_its_workers() -> None:
    """In the middle of a storm: exit code 130, no traceback, and no worker left behind."""
    command = [sys.executable, "-u", "-m", "effectonce", "demo", "--kills", "0"]
    demo = subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert demo.stdout is not None
    assert demo.stderr is not None
    with demo:
        next(line for line in demo.stdout if line.startswith("protected"))
        demo.send_signal(signal.SIGINT)
        # Workers inherit stderr, so it ends only when the last of them has.
        assert demo.stderr.read().strip() == ""
    assert demo.returncode == 130
