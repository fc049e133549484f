"""What people see: a live line while it runs, and a table at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Literal, TextIO

Tone = Literal["good", "bad", "quiet", "plain"]
Cell = tuple[str, Tone]
Row = tuple[str, Cell, Cell]

CODES = {"good": "\x1b[32m", "bad": "\x1b[1;31m", "quiet": "\x1b[2m", "plain": ""}
END = "\x1b[0m"
BOX = "┌┬┐├┼┤└┴┘─│"
PLAIN_BOX = "+++++++++-|"
BAR_WIDTH = 30
REDRAW_SECONDS = 0.05
PLAIN_STEPS = 4
"""Without a terminal, progress is so many lines."""


class Canvas:
    """A stream, and what it can show: colour only on a terminal and unless NO_COLOR says otherwise."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self.colour = self.live and not os.environ.get("NO_COLOR")
        self.box = BOX if _can_show(stream, BOX) else PLAIN_BOX
        self.bar = "█░" if _can_show(stream, "█░") else "#."

    def line(self, text: str = "", tone: Tone = "plain") -> None:
        """Write a line."""
        self.stream.write(self.paint(text, tone) + "\n")
        self.stream.flush()

    def paint(self, text: str, tone: Tone) -> str:
        """The text in its colour, if there is colour here."""
        return f"{CODES[tone]}{text}{END}" if self.colour and CODES[tone] else text


class Progress:
    """One line that follows the work on a terminal, a few plain lines elsewhere."""

    def __init__(self, canvas: Canvas, label: str, total: int) -> None:
        self._canvas, self._label, self._total = canvas, label, total
        self._drawn_at = 0.0
        self._steps = 0

    def show(self, done: int, detail: str) -> None:
        """Tell how far it is."""
        if not self._canvas.live:
            if done * PLAIN_STEPS >= self._total * (self._steps + 1):
                self._steps = done * PLAIN_STEPS // self._total
                self._canvas.line(f"{self._label:<12} {done / self._total:>4.0%}  {detail}")
        elif (now := time.monotonic()) - self._drawn_at >= REDRAW_SECONDS or done == self._total:
            self._drawn_at = now
            full = done * BAR_WIDTH // self._total
            bar = self._canvas.bar[0] * full + self._canvas.bar[1] * (BAR_WIDTH - full)
            self._canvas.stream.write(f"\r\x1b[K{self._label:<12} {bar} {done / self._total:>4.0%}  {detail}")
            self._canvas.stream.flush()

    def end(self) -> None:
        """Leave the last state standing."""
        if self._canvas.live:
            self._canvas.line()


def table(canvas: Canvas, heads: tuple[str, str, str], rows: Sequence[Row | None]) -> list[str]:
    """Lines of a table with two columns of figures. None is a line across."""
    real = [row for row in rows if row is not None]
    widths = [
        max(len(heads[0]), *(len(row[0]) for row in real)),
        *(max(len(heads[column]), *(len(row[column][0]) for row in real)) for column in (1, 2)),
    ]
    vertical = canvas.box[10]

    def across(left: str, middle: str, right: str) -> str:
        return left + middle.join(canvas.box[9] * (width + 2) for width in widths) + right

    def line(name: str, *cells: Cell) -> str:
        shown = [
            canvas.paint(text.rjust(width), tone)
            for (text, tone), width in zip(cells, widths[1:], strict=True)
        ]
        return f" {vertical} ".join([f"{vertical} {name:<{widths[0]}}", *shown]) + f" {vertical}"

    middle = across(*canvas.box[3:6])
    body = [middle if row is None else line(row[0], row[1], row[2]) for row in rows]
    head = line(heads[0], (heads[1], "plain"), (heads[2], "plain"))
    return [across(*canvas.box[0:3]), head, middle, *body, across(*canvas.box[6:9])]


def money(cents: int) -> str:
    """Cents as people write them."""
    return f"{'-' if cents < 0 else ''}{abs(cents) // 100:,}.{abs(cents) % 100:02d}"


def _can_show(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True
