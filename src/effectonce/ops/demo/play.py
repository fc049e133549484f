"""The play in three acts: the storm with protection, the same storm without, and the audit of both."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from ... import Message, Receiver, State
from ...errors import UsageError
from .audit import Audit, audit
from .bank import Bank
from .broker import Broker, Tally
from .drawing import Canvas, Progress
from .report import Result, conclude, introduce
from .storm import ACCOUNTS, OPENING_CENTS, Storm, plan
from .worker import OPERATION


def play(arguments: argparse.Namespace) -> int:
    """Run both storms, show what came of them, and give 1 if protection did not hold."""
    started = time.monotonic()
    storm = plan(arguments.transfers, arguments.kills, arguments.seed)
    canvas = Canvas(sys.stderr if arguments.json else sys.stdout)
    with _directory(arguments.dir) as directory:
        url = f"sqlite:///{directory / 'protected-effects.db'}?durability={arguments.durability}"
        Receiver(url).close()  # what is wrong with the store is said here, once, and not by every worker
        introduce(canvas, storm, arguments.workers, arguments.seed)
        protected = _weather(canvas, storm, arguments.workers, directory / "protected-bank.db", url)
        unprotected = _weather(canvas, storm, arguments.workers, directory / "unprotected-bank.db", None)
    if arguments.json:
        print(json.dumps({"protected": asdict(protected), "unprotected": asdict(unprotected)}))
    else:
        conclude(canvas, protected, unprotected, time.monotonic() - started)
    return 0 if protected.passed else 1


def _weather(canvas: Canvas, storm: Storm, workers: int, bank: Path, url: str | None) -> Result:
    """Bring the storm over one service, then audit its bank."""
    Bank.found(bank, [OPENING_CENTS] * ACCOUNTS)
    progress = Progress(canvas, "protected" if url else "unprotected", len(storm.deliveries))

    def show(tally: Tally) -> None:
        progress.show(tally.acknowledged, f"{tally.kills.total()} of {storm.kills} workers killed")

    arguments = ["--bank", str(bank), *(["--store", url] if url else [])]
    try:
        tally = Broker(storm, arguments, workers, show).run()
    finally:
        progress.end()
    executed, takeovers = _recorded(storm, url) if url else (tally.answers["executed"], 0)
    with Bank(bank) as books:
        return _result(storm, tally, audit(storm, books), executed, takeovers, books.stopped())


def _recorded(storm: Storm, url: str) -> tuple[int, int]:
    """What the store remembers: completed transfers, and attempts that took over."""
    with Receiver(url) as receiver:
        found = [
            receiver.get(receiver.key_of(Message(transfer.id), operation=OPERATION))
            for transfer in storm.transfers
        ]
    records = [record for record in found if record is not None]
    completed = sum(record.state is State.COMPLETED for record in records)
    return completed, sum(record.attempts - 1 for record in records)


def _result(storm: Storm, tally: Tally, found: Audit, executed: int, takeovers: int, stopped: int) -> Result:
    return Result(
        transfers=len(storm.transfers),
        kills=tally.kills.total(),
        deliveries=tally.deliveries,
        executed=executed,
        replayed=tally.answers["replayed"],
        takeovers=takeovers,
        refused=tally.answers["refused"],
        unanswered=tally.unanswered,
        stopped=stopped,
        **found._asdict(),
        passed=found.passed,
        seconds=round(tally.seconds, 2),
    )


@contextmanager
def _directory(wanted: Path | None) -> Iterator[Path]:
    """The user's directory, or one that is gone afterwards."""
    if wanted is None:
        with tempfile.TemporaryDirectory(prefix="effectonce-demo-") as temporary:
            yield Path(temporary)
        return
    try:
        wanted.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--dir {wanted} can't be used: {error.strerror}.") from error
    if taken := sorted(wanted.glob("*protected-*.db*")):
        raise UsageError(f"{taken[0]} is there already, from another demo. Name another --dir, or remove it.")
    yield wanted
