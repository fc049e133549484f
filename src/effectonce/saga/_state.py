"""Where a saga is, for people and dashboards: read from its record alone, by any process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .._protocol import is_abandoned
from .._records import State
from ._decisions import BEGIN, Entry, Moment, Run, Stuck, Trail
from ._outline import Role, Task

if TYPE_CHECKING:
    from .._records import Record
    from ._saga import Saga

SagaStatus = Literal[
    "running", "abandoned", "completed", "compensating", "compensated", "in_doubt", "stopped"
]
StepStatus = Literal["waiting", "next", "failing", "done", "undoing", "undone", "failed", "skipped", "stuck"]


@dataclass(frozen=True, slots=True)
class Failure:
    """A try that failed."""

    role: Role
    error: str
    at: float
    seconds: float
    attempt: int
    """Of the saga: which process it was, so to speak."""


@dataclass(frozen=True, slots=True)
class StepState:
    """One step.

    waiting   its turn has not come               undoing  its compensation runs, or is about to
    next      it runs, or is about to             undone   its compensation has happened
    failing   it has failed and is tried again    failed   it was given up, and left nothing to undo
    done      it has happened                     skipped  the saga turned back before it
    stuck     it needs a person
    """

    name: str
    status: StepStatus
    is_pivot: bool
    result: Any = None
    at: float | None = None
    """When its result was recorded, in seconds since 1970."""
    seconds: float | None = None
    """How long the try took that held."""
    undone_at: float | None = None
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class SagaState:
    """A saga as its journal has it. Nobody has to hold it up to be read."""

    name: str
    key: str
    status: SagaStatus
    """running, compensating (it runs, backwards), abandoned (its lease is over), stopped (given back), or its end."""
    input: Any
    attempt: int
    fence: int
    began: float | None
    turned_at: float | None
    reason: str
    """Why it was, or is being, undone; or why it is in doubt."""
    steps: tuple[StepState, ...]

    @property
    def step(self) -> StepState | None:
        """The step that is under way, or that needs a person; the first of them if there are several."""
        return next(
            (step for step in self.steps if step.status in ("next", "failing", "undoing", "stuck")), None
        )


def state_of(saga: Saga, record: Record, trail: Trail, now: float) -> SagaState:
    """Read a saga's state."""
    moment = Moment(saga.outline, trail, record.attempts, saga.clock())
    begun, turn = trail.entries.get(BEGIN, {}), trail.turn
    move = moment.decide() if begun else None
    reason = turn["reason"] if turn is not None else move.reason if isinstance(move, Stuck) else ""
    return SagaState(
        name=saga.name,
        key=record.key,
        status=_status(record, trail, now),
        input=begun.get("input"),
        attempt=record.attempts,
        fence=record.fence,
        began=begun.get("at"),
        turned_at=None if turn is None else turn["at"],
        reason=reason,
        steps=tuple(_step(task, moment, move) for task in saga.outline.tasks),
    )


def _status(record: Record, trail: Trail, now: float) -> SagaStatus:
    if record.state is State.COMPLETED:
        return "completed"
    if record.state is State.FAILED:
        return "compensated"
    if record.state is State.IN_DOUBT:
        return "in_doubt"
    if record.state is State.ABSENT:
        return "stopped"
    if is_abandoned(record, now):
        return "abandoned"
    return "running" if trail.turn is None else "compensating"


def _step(task: Task, moment: Moment, move: Any) -> StepState:
    trail = moment.trail
    done, undone = (trail.entries.get(f"{role}:{task.name}", {}) for role in ("do", "undo"))
    roles: tuple[Role, Role] = ("do", "undo")
    failures = [_failure(role, entry) for role in roles for entry in trail.tries(role, task)]
    return StepState(
        name=task.name,
        status=_step_status(task, moment, move),
        is_pivot=task.is_pivot,
        result=done.get("value"),
        at=done.get("at"),
        seconds=_took(done) if done else None,
        undone_at=undone.get("at"),
        failures=tuple(failures),
    )


def _step_status(task: Task, moment: Moment, move: Any) -> StepStatus:
    trail = moment.trail
    if isinstance(move, Stuck) and move.step == task.name:
        return "stuck"
    if isinstance(move, Run) and task in move.tasks:
        if move.role == "undo":
            return "undoing"
        return "failing" if trail.failures("do", task) else "next"
    if trail.holds("undo", task):
        return "undone"
    if trail.holds("do", task):
        return "done"
    if trail.turn is None:
        return "waiting"
    return "failed" if trail.tries("do", task) else "skipped"


def _failure(role: Role, entry: Entry) -> Failure:
    return Failure(role, entry["error"], entry["at"], _took(entry), entry["n"])


def _took(entry: Entry) -> float:
    return max(0.0, float(entry["at"] - entry.get("began", entry["at"])))
