"""Runs a case: opens its contenders, lets them take turns, and pairs their ratios per repetition."""

from __future__ import annotations

import random
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
    result: Result
    folder: Path
    url: str | None = None
    worker: Worker | None = None
    operations: int = 0


Progress = Callable[[str], None]


def run_case(
    case: Case,
    effort: Effort,
    pythons: dict[str, Path],
    servers: Servers,
    folder: Path,
    progress: Progress,
) -> list[Result]:
    """Measure every row of the case, interleaved. A contender that fails is reported, and the others go on.

    No two processes of a program are equally fast: where its memory lies is luck, and good for some hundredths; on
    which core the server is woken that it talks to is luck too, and good for a third. So each repetition has new ones,
    where that does not mean to fill a store with millions of keys again.
    """
    with ExitStack() as stack:
        scratch = Path(
            stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix="effectonce-bench-"))
        )
        results: list[Result] = []
        running: list[_Running] = []
        for number, row in enumerate(case.rows):
            result = Result(row.label, row.contender, row.note, floor=row.floor, limit=row.limit)
            results.append(result)
            running.append(_Running(row, result, scratch / str(number)))
        repetitions = case.repetitions or effort.repetitions
        workers = stack.enter_context(ExitStack())
        for repetition in range(repetitions):
            progress(f"{case.title}: repetition {repetition + 1} of {repetitions}")
            if repetition == 0 or case.is_renewed:
                workers.close()
                for one in running:
                    _open(
                        case,
                        one,
                        repetition,
                        effort,
                        pythons,
                        servers,
                        workers,
                        stack if case.is_kept else workers,
                    )
            _repeat(case, effort, running, repetition)
    _pair(case, results)
    return results


def _open(
    case: Case,
    one: _Running,
    repetition: int,
    effort: Effort,
    pythons: dict[str, Path],
    servers: Servers,
    stack: ExitStack,
    rooms: ExitStack,
) -> None:
    """Start the row's worker and fill its store; at first, find out how many operations make a slice."""
    if one.result.error:
        return
    try:
        if one.url is None or not case.is_kept:
            room = servers.room(case.server, is_timed=not case.gauge) if case.server else nullcontext("")
            one.url = rooms.enter_context(room)
        one.worker = stack.enter_context(_worker(one.row, pythons))
        folder = one.folder / ("kept" if case.is_kept else str(repetition))
        folder.mkdir(parents=True, exist_ok=case.is_kept)
        one.result.version = _fill(case, one, effort, one.url, folder)
        if case.is_fixed:
            most = one.row.operations or case.operations
            one.operations = case.whole_steps(most * effort.operations_share, most)
        else:
            one.operations = one.operations or _slice_of(case, one, effort)
            one.worker.ask("slice", operations=max(one.operations, case.warm_up))
    except (NoServer, WorkerError) as error:
        one.result.error = str(error)


def _worker(row: Row, pythons: dict[str, Path]) -> Worker:
    if row.contender not in pythons:
        raise WorkerError("not installed")
    return Worker(row.contender, pythons[row.contender])


def _fill(case: Case, one: _Running, effort: Effort, url: str, folder: Path) -> str:
    """Open what the row measures, in a room or a folder that is empty; its version."""
    assert one.worker is not None
    opened = one.worker.ask(
        "open",
        store=case.store,
        op=case.op,
        folder=str(folder),
        variant=one.row.variant,
        threads=case.threads,
        slice_seconds=case.budget_seconds * effort.budget_share if case.is_timed else 0.0,
        prefill=case.prefill if one.row.prefill is None else one.row.prefill,
        url=url,
        tasks=case.tasks,
        gauge=case.gauge,
    )
    return str(opened["version"])


def _slice_of(case: Case, one: _Running, effort: Effort) -> int:
    """How many operations take as long as a slice may. What is measured for that warms up, and is thrown away."""
    assert one.worker is not None
    most = one.row.operations or case.operations
    if case.threads > 1:
        one.worker.ask("slice", operations=most if case.is_timed else case.threads * 2)
        return most
    # Each is closer to the budget than the one before, because a short one shows mostly what surrounds it.
    operations = case.whole_steps(5, most)
    for _ in range(4):
        # Its own time, without the collection of garbage before it, which takes long in a process of millions of keys.
        cost = one.worker.ask("slice", operations=operations)["seconds"] / operations
        operations = case.whole_steps(case.budget_seconds * effort.budget_share / cost, most)
    return operations


def _repeat(case: Case, effort: Effort, running: list[_Running], repetition: int) -> None:
    """One repetition: the rows in turns, slice by slice, in another order each time.

    Who comes after whom may not be the same to everybody: where the system puts a process may depend on who ran before.
    """
    turns, chance = list(running), random.Random(repetition)
    sums: dict[str, list[float]] = {one.row.label: [] for one in turns}
    for _ in range(max(1, int(case.slices * effort.slices_share))):
        chance.shuffle(turns)
        for one in turns:
            if one.result.error or one.worker is None:
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
