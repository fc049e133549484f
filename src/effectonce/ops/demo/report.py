"""What a run came to, and how it is told: the table side by side, and the closing sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .drawing import Canvas, Cell, Row, money, table
from .storm import Storm


@dataclass(frozen=True, slots=True)
class Result:
    """One run's figures; ``--json`` prints them under these names. ``effectonce demo --help`` says what they mean."""

    transfers: int
    kills: int
    deliveries: int
    executed: int
    replayed: int
    takeovers: int
    refused: int
    unanswered: int
    stopped: int
    lost: int
    double: int
    vanished_cents: int
    overpaid_cents: int
    books_balance: bool
    passed: bool
    seconds: float


def introduce(canvas: Canvas, storm: Storm, workers: int, seed: int) -> None:
    """Say what is about to happen, and what is promised."""
    canvas.line(
        f"{len(storm.transfers):,} transfers in {len(storm.deliveries):,} deliveries to {workers} worker processes; "
        f"{storm.kills} workers will be killed with SIGKILL. Seed {seed}."
    )
    canvas.line(
        "Guarantee: fenced. One result is recorded per transfer; what a kill makes run again is booked once, because "
        "the bank dedupes on current().key_for(...).",
        "quiet",
    )


def conclude(canvas: Canvas, protected: Result, unprotected: Result, seconds: float) -> None:
    """Show the audit, then say it in a sentence."""
    canvas.line()
    for line in table(canvas, ("audit", "protected", "unprotected"), rows(protected, unprotected)):
        canvas.line(line)
    if not protected.passed:
        canvas.line("The audit of the protected run FAILED: see the figures above.", "bad")
        return
    canvas.line(
        f"{protected.transfers:,} transfers, {protected.deliveries:,} deliveries, {protected.kills} workers killed: "
        f"each transfer took effect exactly once; without protection {unprotected.double:,} were booked more than "
        f"once, {money(unprotected.overpaid_cents)} was overpaid and {money(unprotected.vanished_cents)} vanished "
        f"({seconds:.1f} s)."
    )


def rows(protected: Result, unprotected: Result) -> list[Row | None]:
    """The audit's rows: first what happened, then what it came to."""

    def count(name: str) -> Row:
        return (
            name,
            (number(getattr(protected, name)), "plain"),
            (number(getattr(unprotected, name)), "plain"),
        )

    def verdict(label: str, name: str, wanted: Any, show: Callable[[Any], str]) -> Row:
        def cell(value: Any) -> Cell:
            return show(value), "good" if value == wanted else "bad"

        return label, cell(getattr(protected, name)), cell(getattr(unprotected, name))

    happened = ("transfers", "kills", "deliveries", "executed", "replayed", "takeovers")
    besides = ("refused", "unanswered", "stopped")
    return [
        *(count(name) for name in happened + besides),
        None,
        verdict("lost", "lost", 0, number),
        verdict("double", "double", 0, number),
        verdict("money vanished", "vanished_cents", 0, money),
        verdict("money overpaid", "overpaid_cents", 0, money),
        verdict("books balance", "books_balance", True, lambda balance: "yes" if balance else "NO"),
    ]


def number(value: int) -> str:
    """A count as people write it."""
    return f"{value:,}"
