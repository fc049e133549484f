"""The bar chart, written as SVG by hand: ratio to the baseline on a log scale, 1.0 marked, floors marked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from xml.sax.saxutils import escape

from benchmarks.cases import Case
from benchmarks.harness import Result
from benchmarks.report import Measured, amount, machine, three_figures

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1000, 210, 150, 96, 56
ROW, TITLE, GAP = 22, 30, 14
INK, FAINT, GRID, FLOOR = "#1f2933", "#7b8794", "#e4e7eb", "#d64545"
COLOURS = {
    "raw": "#9aa5b1",
    "effectonce": "#2563eb",
    "exactly_once": "#f0b429",
    "idemkit": "#8e6fd0",
    "dbos": "#3ebd93",
    "powertools": "#ef8354",
    "usual": "#c9a18a",
}
FONT = "font-family=\"system-ui, 'Segoe UI', Helvetica, Arial, sans-serif\""


@dataclass(frozen=True)
class _Scale:
    """Decades from left to right."""

    low: int
    high: int

    def x(self, ratio: float) -> float:
        share = (math.log10(ratio) - self.low) / (self.high - self.low)
        return LEFT + min(1.0, max(0.0, share)) * (WIDTH - LEFT - RIGHT)


def draw(measured: Measured) -> str:
    """The whole chart. What has no ratio to a store is left to the table."""
    groups = [
        (case, [result for result in results if result.ratio is not None or result.error])
        for case, results in measured
        if case.group != "micro"
    ]
    groups = [(case, rows) for case, rows in groups if any(row.ratio is not None for row in rows)]
    ratios = [row.ratio for _, rows in groups for row in rows if row.ratio is not None] or [1.0]
    floors = [row.floor for _, rows in groups for row in rows if row.floor]
    scale = _Scale(
        math.floor(math.log10(min(ratios + floors))), max(1, math.ceil(math.log10(max(ratios + floors))))
    )
    height = TOP + sum(TITLE + GAP + ROW * len(rows) for _, rows in groups) + BOTTOM
    parts = [*_frame(scale, height)]
    y = float(TOP)
    for case, rows in groups:
        parts.append(_text(16, y + 19, case.title, size=14, weight=600))
        y += TITLE
        for row in rows:
            parts += _bar(case, row, rows, scale, y)
            y += ROW
        y += GAP
    parts.append(_one_line(scale, height))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" role="img" {FONT}>\n{body}\n</svg>\n'
    )


def _frame(scale: _Scale, height: float) -> list[str]:
    about = machine()
    system = f"{about['processor']}, {about['cores']} cores, {about['python']}, SQLite {about['sqlite']}"
    parts = [
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>',
        _text(16, 34, "effectonce against the raw store and its rivals", size=20, weight=700),
        _text(
            16,
            56,
            f"Cost of the raw limit / own cost, on a log scale: longer is better.  {system}",
            fill=FAINT,
        ),
        f'<line x1="16" x2="16" y1="68" y2="80" stroke="{FLOOR}" stroke-width="2.5"/>',
        _text(23, 78, "floor", fill=FAINT, size=11),
    ]
    for decade in range(scale.low, scale.high + 1):
        x = scale.x(10.0**decade)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{height - BOTTOM + 8:.0f}" stroke="{GRID}"/>'
        )
        label = f"{10.0**decade:g}×"
        parts.append(_text(x, TOP - 14, label, fill=FAINT, size=11, anchor="middle"))
        parts.append(_text(x, height - BOTTOM + 24, label, fill=FAINT, size=11, anchor="middle"))
    return parts


def _one_line(scale: _Scale, height: float) -> str:
    x, end = scale.x(1.0), height - BOTTOM + 8
    return f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{end:.0f}" stroke="{FAINT}" stroke-dasharray="3 3"/>'


def _bar(case: Case, row: Result, rows: list[Result], scale: _Scale, y: float) -> list[str]:
    """A row: its name, its bar with the spread of the repetitions, its figures, and its floor."""
    is_ours = row.contender == "effectonce"
    parts = [_text(LEFT - 10, y + 15, row.label, anchor="end", weight=600 if is_ours else 400)]
    if row.ratio is None or row.median is None:
        return [*parts, _text(LEFT + 4, y + 15, f"not measured: {row.error[:70]}", fill=FAINT, size=11)]
    colour, x = COLOURS.get(row.contender, INK), scale.x(row.ratio)
    parts.append(
        f'<rect x="{LEFT}" y="{y + 3:.1f}" width="{max(1.0, x - LEFT):.1f}" height="{ROW - 6}" rx="2" fill="{colour}"/>'
    )
    if len(row.ratios) > 1:
        low, high = scale.x(min(row.ratios)), scale.x(max(row.ratios))
        parts.append(
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y + ROW / 2:.1f}" y2="{y + ROW / 2:.1f}" '
            f'stroke="{INK}" stroke-opacity="0.55" stroke-width="1.5"/>'
        )
    floor = _floor_ratio(row, rows)
    if floor is not None:
        at = scale.x(floor)
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y:.1f}" y2="{y + ROW:.1f}" stroke="{FLOOR}" stroke-width="2.5"/>'
        )
    ink, weight = FLOOR if row.verdict == "MISSED" else INK, 600 if is_ours else 400
    for right, figure in ((78, f"{three_figures(row.ratio)}×"), (8, amount(row.median, case.unit))):
        parts.append(_text(WIDTH - right, y + 15, figure, fill=ink, weight=weight, anchor="end"))
    return parts


def _floor_ratio(row: Result, rows: list[Result]) -> float | None:
    """A limit is drawn where it lies as a ratio of the baseline's median."""
    if row.limit is None:
        return row.floor
    baseline = next((other.median for other in rows if other.label == row.baseline), None)
    return None if baseline is None else baseline / row.limit


def _text(
    x: float,
    y: float,
    words: str,
    *,
    fill: str = INK,
    size: int = 12,
    weight: int = 400,
    anchor: str = "start",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}" xml:space="preserve">{escape(words)}</text>'
    )
