"""The table in the terminal and the JSON file."""

from __future__ import annotations

import json
import math
import os
import platform
import sqlite3
import statistics
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.cases import Case
from benchmarks.harness import Result

Measured = list[tuple[Case, list[Result]]]

TAILS = {"p50", "p99"}
HEADINGS = ("", "median", "min – max", "per second", "ratio", "min – max", "floor", "")


def amount(value: float, unit: str) -> str:
    """A cost with its unit, three figures long."""
    if unit == "bytes":
        return f"{value:,.0f} B"
    if unit == "rows":
        return three_figures(value)
    for factor, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= factor:
            return f"{three_figures(value / factor)} {name}"
    return f"{value * 1e9:.0f} ns"


def three_figures(value: float) -> str:
    """12.3 rather than 12.3456, 0.012 rather than 0.01."""
    if value < 0:  # a gauge that went down meanwhile, as dead rows do where a vacuum comes by
        return f"-{three_figures(-value)}"
    if value >= 100 or value == 0:
        return f"{value:,.0f}"
    if value >= 0.095:
        return f"{value:.{1 if value >= 10 else 2}f}"
    return f"{value:.{1 - math.floor(math.log10(value))}f}"


def bound(result: Result, unit: str) -> str:
    """What the row has to hold."""
    if result.limit is not None:
        return f"≤ {amount(result.limit, unit)}"
    return f"≥ {three_figures(result.floor)}" if result.floor is not None else ""


def table(case: Case, results: Iterable[Result]) -> str:
    """One case as text, columns aligned."""
    lines: list[tuple[str, ...]] = [(case.title, *HEADINGS[1:])]
    lines += [_line(result, case.unit) for result in results]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    text = []
    for line in lines:
        cells = [
            cell.ljust(width) if column in (0, len(HEADINGS) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(cells).rstrip())
    # The last column holds remarks of any length, so the rule ends before it.
    text.insert(1, "─" * (sum(widths[:-1]) + 2 * (len(widths) - 2)))
    return "\n".join(text) + "\n"


def _line(result: Result, unit: str) -> tuple[str, ...]:
    tails = [
        f"{name} {amount(statistics.median(result.extra[name]), unit)}"
        for name in TAILS & result.extra.keys()
    ]
    remark = "; ".join(filter(None, (result.verdict, *tails, result.note)))
    median, ratio = result.median, result.ratio
    if median is None:
        return (
            f"  {result.label}",
            "–",
            "",
            "",
            "",
            "",
            bound(result, unit),
            f"{remark}  {result.error}".strip(),
        )
    values, ratios = sorted(result.values), sorted(result.ratios)
    return (
        f"  {result.label}",
        amount(median, unit),
        f"{amount(values[0], unit)} – {amount(values[-1], unit)}" if len(values) > 1 else "",
        f"{1 / median:,.0f}" if unit == "seconds" else "",
        "" if ratio is None else three_figures(ratio),
        f"{three_figures(ratios[0])} – {three_figures(ratios[-1])}" if len(ratios) > 1 else "",
        bound(result, unit),
        f"{remark}  {result.error}".strip(),
    )


def as_json(measured: Measured, options: dict[str, Any], servers: dict[str, str]) -> str:
    """Everything that was found, with what it was found on."""
    found = {
        "schema": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "servers": servers,
        "options": options,
        "versions": {
            result.contender: result.version
            for _, results in measured
            for result in results
            if result.version
        },
        "cases": [
            {
                "name": case.name,
                "title": case.title,
                "store": case.store,
                "operation": case.op,
                "threads": case.threads,
                "tasks": case.tasks,
                "server": case.server,
                "unit": case.unit,
                "rows": [result.as_dict() for result in results],
            }
            for case, results in measured
        ],
    }
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "sqlite": sqlite3.sqlite_version,
    }


def _processor() -> str:
    about = Path("/proc/cpuinfo")
    if about.exists():
        for line in about.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
