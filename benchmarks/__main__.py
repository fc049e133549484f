"""The command line: `benchmarks/run`, or `python -m benchmarks` from the root of the project."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks import chart, report
from benchmarks.cases import Case, all_cases
from benchmarks.contenders import OURS, WorkerError, own_pythons, rival_pythons
from benchmarks.harness import QUICK, Effort, run_case
from benchmarks.servers import Servers


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table, write what was asked for; 1 when --check found a floor missed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    cases = _chosen(parser, options)
    if options.list:
        for case in cases:
            print(f"{case.name:<20} {case.title}")
        return 0
    if options.pin:
        # Inherited by every worker and server. The last core, because the first ones serve the machine's interrupts.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    effort = QUICK if options.quick else Effort()
    if options.repetitions:
        effort = replace(effort, repetitions=options.repetitions)
    pythons: dict[str, Path] = {}
    if options.no_rivals:
        cases = [
            replace(case, rows=tuple(row for row in case.rows if row.contender in OURS)) for case in cases
        ]
    else:
        try:
            pythons = rival_pythons()
        except WorkerError as error:
            print(f"warning: {error}", file=sys.stderr)
    measured: report.Measured = []
    with Servers() as servers:
        for number, case in enumerate(cases, 1):
            progress = _Progress(f"[{number}/{len(cases)}]", case.title)
            its_pythons = pythons | own_pythons(with_drivers=bool(case.server))
            results = run_case(case, effort, its_pythons, servers, options.dir, progress.show)
            progress.clear()
            print(report.table(case, results), flush=True)
            measured.append((case, results))
    return _finish(measured, options, servers.versions)


def _finish(measured: report.Measured, options: argparse.Namespace, servers: dict[str, str]) -> int:
    if options.json:
        chosen = {"quick": options.quick, "full": options.full, "pin": options.pin}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(report.as_json(measured, chosen, servers), encoding="utf-8")
    if options.chart:
        options.chart.parent.mkdir(parents=True, exist_ok=True)
        options.chart.write_text(chart.draw(measured), encoding="utf-8")
    missed = [
        f"{case.title}: {row.label}" for case, rows in measured for row in rows if row.verdict == "MISSED"
    ]
    held = sum(row.verdict == "ok" for _, rows in measured for row in rows)
    print(f"floors held: {held}, missed: {len(missed)}")
    for one in missed:
        print(f"  missed: {one}")
    return 1 if options.check and missed else 0


def _chosen(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Case]:
    """The cases of --only: names or groups, separated by commas. A case named outright needs no --full."""
    cases = all_cases(options.keys)
    wanted = set(filter(None, (options.only or "").split(",")))
    known = {case.name for case in cases} | {case.group for case in cases}
    if unknown := wanted - known:
        parser.error(f"no such case or group: {', '.join(sorted(unknown))}; --list shows them")
    return [
        case
        for case in cases
        if case.name in wanted
        or ((not wanted or case.group in wanted) and (options.full or options.list or not case.is_full_only))
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "benchmarks/run", description="Measure effectonce, its rivals and the raw limit."
    )
    add = parser.add_argument
    add("--only", metavar="A,B", help="cases or groups, such as memory,sqlite-new")
    add("--list", action="store_true", help="list the cases and end")
    add("--quick", action="store_true", help="shorter; finds blunders, decides nothing")
    add("--full", action="store_true", help="also growth to many keys and purging; some minutes more")
    add(
        "--keys",
        type=int,
        help="how far growth goes (default: 1 million, on servers 2 million)",
    )
    add("--repetitions", type=int, metavar="N", help="instead of 5, or 3 when quick")
    add("--pin", action="store_true", help="keep everything on one core: steadier ratios")
    add("--check", action="store_true", help="exit with 1 when a floor is missed")
    add("--no-rivals", action="store_true", help="only the raw limit and effectonce")
    add("--dir", type=Path, default=Path(tempfile.gettempdir()), help="where database files go; a real disk")
    add("--json", type=Path, metavar="FILE", help="write everything found")
    add("--chart", type=Path, metavar="FILE", help="draw the ratios as SVG")
    return parser


class _Progress:
    """One line that rewrites itself on a terminal; elsewhere one line per case."""

    def __init__(self, prefix: str, title: str) -> None:
        self._prefix, self._is_terminal = prefix, sys.stderr.isatty()
        if not self._is_terminal:
            print(f"{prefix} {title} ...", file=sys.stderr, flush=True)

    def show(self, text: str) -> None:
        if self._is_terminal:
            print(f"\r\x1b[K{self._prefix} {text} ...", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        # The workers end with their pipes, the temporary folders with the stack that holds them.
        sys.exit(130)
