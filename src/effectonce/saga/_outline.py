"""The frozen data that sagas are made of: what they do, in which order, and how often each part is tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

Role = Literal["do", "undo"]
"""An action, or what takes it back."""


class Task(NamedTuple):
    """One step of a saga."""

    name: str
    action: Callable[..., Any]
    undo: Callable[..., Any] | None
    """What takes the action back; None: there is nothing to take back."""
    attempts: int | None
    """How often the action is tried; None: until it holds."""
    undo_attempts: int
    first_pause: float
    longest_pause: float
    timeout: float | None
    refused: tuple[type[BaseException], ...]
    is_pivot: bool

    def function(self, role: Role) -> Callable[..., Any] | None:
        """What is called."""
        return self.action if role == "do" else self.undo

    def limit(self, role: Role) -> int | None:
        """How often that is tried."""
        return self.attempts if role == "do" else self.undo_attempts


Group = tuple[Task, ...]
"""Steps that run side by side."""


class Outline(NamedTuple):
    """The groups of a saga, one after the other."""

    groups: tuple[Group, ...]
    timeout: float | None = None
    """How many seconds after its begin a saga may still begin a step before its pivot."""

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Every step, in order."""
        return tuple(task for group in self.groups for task in group)

    @property
    def names(self) -> list[list[str]]:
        """What a journal says of the definition that it was written by."""
        return [[task.name for task in group] for group in self.groups]

    @property
    def pivot(self) -> Task | None:
        """The step after which a saga only goes forward."""
        return next((task for task in self.tasks if task.is_pivot), None)
