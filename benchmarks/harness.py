"""Runs a case: opens its contenders, lets them take turns, and pairs their ratios per repetition."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cases import Case, Row
from benchmarks.contenders import Worker, WorkerError
from benchmarks.servers import NoServer, Servers

# A tenth of a ratio between two ratios is noise on a shared machine.
GROWTH_SLACK = 0.9


@dataclass(frozen=True)
class Effort:
    """How long to measure. The quick one finds blunders; decide on the normal one."""

    repetitions: int = 5
    slices_share: float = 1.0
    budget_share: float = 1.0
    operations_share: float = 1.0


QUICK = Effort(repetitions=3, slices_share=0.5, budget_share=0.3, operations_share=0.2)


@dataclass
class Result:
    """One row's figures: a value and a ratio per repetition, their medians, and the verdict."""

    label: str
    contender: str
    note: str = ""
    version: str = ""
    error: str = ""
    values: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    baseline: str = ""
    floor: float | None = None
    limit: float | None = None
    operations: int = 0
    extra: dict[str, list[float]] = field(default_factory=dict)

    @property
    def median(self) -> float | None:
        """The median cost of one operation."""
        return statistics.median(self.values) if self.values else None

    @property
    def ratio(self) -> float | None:
        """The median of the ratios paired per repetition."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def verdict(self) -> str:
        """`ok`, `MISSED`, or nothing where no floor is set."""
        if self.floor is None and self.limit is None:
            return ""
        if self.error or self.median is None:
            return "MISSED"
        floor_held = self.floor is None or (self.ratio is not None and self.ratio >= self.floor)
        limit_held = self.limit is None or self.median <= self.limit
        return "ok" if floor_held and limit_held else "MISSED"

    def as_dict(self) -> dict[str, Any]:
        """Everything, for the JSON report."""
        return {**asdict(self), "median": self.median, "ratio": self.ratio, "verdict": self.verdict}


@dataclass
class _Running:
    """A row while it is measured."""

    row: Row
    worker: Worker
    operations: int
    result: Result


Progress = Callable[[str], None]


def run_case(
    case: Case,
    effort: Effort,
    pythons: dict[str, Path],
    servers: Servers,
    folder: Path,
    progress: Progress,
) -> list[Result]:
    """Measure every row of the case, interleaved. A contender that fails is reported, and the others go on."""
    with ExitStack() as stack:
        scratch = Path(
            stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix="effectonce-bench-"))
        )
        results, running = [], []
        for number, row in enumerate(case.rows):
            result = Result(row.label, row.contender, row.note, floor=row.floor, limit=row.limit)
            results.append(result)
            progress(f"{case.title}: opening {row.label}")
            try:
                room = servers.room(case.server, is_timed=not case.gauge) if case.server else nullcontext("")
                url = stack.enter_context(room)
                running.append(_open(case, row, result, effort, pythons, url, scratch / str(number), stack))
            except (NoServer, WorkerError) as error:
                result.error = str(error)
        repetitions = case.repetitions or effort.repetitions
        for repetition in range(repetitions):
            progress(f"{case.title}: repetition {repetition + 1} of {repetitions}")
            _repeat(case, effort, running, repetition)
    _pair(case, results)
    return results


def _open(
    case: Case,
    row: Row,
    result: Result,
    effort: Effort,
    pythons: dict[str, Path],
    url: str,
    folder: Path,
    stack: ExitStack,
) -> _Running:
    """Start the row's worker, fill its store, and find out how many operations make a slice."""
    if row.contender not in pythons:
        raise WorkerError("not installed")
    folder.mkdir()
    budget = case.budget_seconds * effort.budget_share
    worker = stack.enter_context(Worker(row.contender, pythons[row.contender]))
    prefill = case.prefill if row.prefill is None else row.prefill
    opened = worker.ask(
        "open",
        store=case.store,
        op=case.op,
        folder=str(folder),
        variant=row.variant,
        threads=case.threads,
        slice_seconds=budget if case.is_timed else 0.0,
        prefill=prefill,
        url=url,
        tasks=case.tasks,
        gauge=case.gauge,
    )
    result.version = opened["version"]
    most = row.operations or case.operations
    if case.is_fixed:
        return _Running(row, worker, case.whole_steps(most * effort.operations_share, most), result)
    if case.threads > 1:
        worker.ask("slice", operations=most if case.is_timed else case.threads * 2)
        return _Running(row, worker, most, result)
    # These slices warm up and are thrown away. Each is closer to the budget than the one before, because a short one
    # shows mostly what surrounds it.
    operations = case.whole_steps(5, most)
    for _ in range(4):
        # Its own time, without the collection of garbage before it, which takes long in a process of millions of keys.
        cost = worker.ask("slice", operations=operations)["seconds"] / operations
        operations = case.whole_steps(budget / cost, most)
    return _Running(row, worker, operations, result)


def _repeat(case: Case, effort: Effort, running: list[_Running], repetition: int) -> None:
    """One repetition: the rows in turns, slice by slice; who begins moves on with each repetition."""
    first = repetition % len(running) if running else 0
    turns = running[first:] + running[:first]
    sums: dict[str, list[float]] = {one.row.label: [] for one in turns}
    for _ in range(max(1, int(case.slices * effort.slices_share))):
        for one in turns:
            if one.result.error:
                continue
            try:
                figure = one.worker.ask("slice", operations=one.operations)
            except WorkerError as error:
                one.result.error = str(error)
                continue
            sums[one.row.label].append(figure.pop("value"))
            one.result.operations += figure.pop("operations")
            for name in figure.keys() - {"ok", "seconds"}:
                one.result.extra.setdefault(name, []).append(figure[name])
    for one in turns:
        if not one.result.error:
            # Slices of a row are of one size, so the mean is the repetition's cost per operation.
            one.result.values.append(statistics.fmean(sums[one.row.label]))


def _pair(case: Case, results: list[Result]) -> None:
    """Ratios per repetition, then the floors that depend on another row's ratio."""
    by_label = {result.label: result for result in results}
    for row, result in zip(case.rows, results, strict=True):
        baseline = by_label.get(row.baseline)
        if baseline is None or result.error:
            continue
        result.baseline = row.baseline
        result.ratios = [
            raw / value
            for raw, value in zip(baseline.values, result.values, strict=False)
            if raw > 0 and value > 0
        ]
    for row, result in zip(case.rows, results, strict=True):
        if row.floor_from is not None:
            reference = by_label[row.floor_from].ratio
            # Above 1 it is luck: nobody gets faster as it grows, and nobody has to.
            floors = [row.floor, reference and min(reference, 1.0) * GROWTH_SLACK]
            result.floor = max(filter(None, floors), default=None)
