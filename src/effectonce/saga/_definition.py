"""How a saga is written down, and what is checked before it ever runs: a saga must not find out half-way.

``step``, ``pivot`` and ``together`` say what is done. A function's first parameter is what the saga was asked for;
every other one is the name of a step before it, and gets that step's result. A compensation may name its own step, too:
it gets None where the step's result is not known, because it failed or its process died.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

from .._durations import Duration, seconds
from .._handlers import is_awaited
from ..codec import module_of
from ..errors import UsageError
from ._outline import Group, Outline, Task

ATTEMPTS, UNDO_ATTEMPTS = 5, 10
BACKOFF: Final = ("1s", "1m")

Types = tuple[type[BaseException], ...]
Backoff = tuple[Duration, Duration]


def unsaid(asked: object) -> None:
    """In place of a compensation that was not spoken of: whether there is none is for people to say."""


def step(
    action: Callable[..., Any],
    undo: Callable[..., Any] | None = unsaid,
    *,
    name: str = "",
    attempts: int | None = None,
    undo_attempts: int = UNDO_ATTEMPTS,
    backoff: Backoff = BACKOFF,
    timeout: Duration | None = None,
    refused: Types = (),
) -> Group:
    """A step of a saga.

    action         a function, or a coroutine function; ``current().key_for(…)`` in it is the same on every try
    undo           what takes it back; None says that there is nothing to take back. Steps after the pivot have none
    name           what the step is called; by default as its function
    attempts       how often it is tried before the saga is undone (5)
    undo_attempts  how often its compensation is tried before a person has to look (10)
    backoff        the first and the longest pause between two tries
    timeout        how long one try may take; for coroutine functions, since nothing else can be stopped
    refused        exception types that mean: it has not happened and never will. They are not tried again; from a
                   compensation they mean that a person has to look
    """
    return (_task(action, undo, name, attempts, undo_attempts, backoff, timeout, refused),)


def pivot(
    action: Callable[..., Any],
    *,
    name: str = "",
    attempts: int | None = None,
    backoff: Backoff = BACKOFF,
    timeout: Duration | None = None,
    refused: Types = (),
) -> Group:
    """The step that decides: when it has happened the saga only goes forward, and every step after it is tried until it
    holds. If it says that nothing happened (a type of ``refused``, or NotApplied at each of its attempts), all before
    it is undone. While nobody knows whether it happened it is tried again.
    """
    task = _task(action, None, name, attempts, UNDO_ATTEMPTS, backoff, timeout, refused)
    return (task._replace(is_pivot=True),)


def together(*steps: Group) -> Group:
    """Steps that run side by side: on threads, or as tasks of the event loop. The next step waits for all of them."""
    if len(steps) < 2:
        raise UsageError("together(…) takes two steps or more; a single one needs no company.")
    members = tuple(_only(each) for each in steps)
    if any(task.is_pivot for task in members):
        raise UsageError("A pivot stands alone, since what runs beside it could neither be undone nor go on.")
    return members


def outline_of(steps: tuple[Any, ...], timeout: Duration | None) -> Outline:
    """The definition of a saga, checked. Raises ``UsageError`` with what is wrong and what to write instead."""
    if not steps or not all(isinstance(group, tuple) and isinstance(group[0], Task) for group in steps):
        raise UsageError(
            "A saga is made of steps: Saga(receiver, 'name', step(…), pivot(…), together(…), …)."
        )
    outline = Outline(steps, None if timeout is None else seconds(timeout, "timeout"))
    _check_names(outline)
    _check_pivot(outline)
    _check_parameters(outline)
    is_over = False
    groups = list[Group]()
    for group in outline.groups:
        groups.append(tuple(_placed(task, is_over) for task in group))
        is_over = is_over or group[0].is_pivot
    return outline._replace(groups=tuple(groups))


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a step's function."""
    return list(inspect.signature(function).parameters.values())


def _task(
    action: Any,
    undo: Any,
    name: Any,
    attempts: Any,
    undo_attempts: Any,
    backoff: Any,
    timeout: Any,
    refused: Any,
) -> Task:
    for function in (action, undo):
        if function is not None:
            _check_function(function)
    called = name or getattr(action, "__name__", "")
    if not called.isidentifier():
        raise UsageError(f"A step can't be called {called!r}. Give it name=, a word such as 'reserve'.")
    for option, number in (("attempts", attempts), ("undo_attempts", undo_attempts)):
        if number is not None and (type(number) is not int or number < 1):
            raise UsageError(f"{called}: {option}={number!r} must be a whole number, 1 or more.")
    types = (refused,) if isinstance(refused, type) else tuple(refused)
    if not all(isinstance(each, type) and issubclass(each, Exception) for each in types):
        raise UsageError(f"{called}: refused={refused!r} must be exception types, such as (CardDeclined,).")
    limit = None if timeout is None else seconds(timeout, "timeout")
    if limit is not None and not all(
        is_awaited(each) for each in (action, undo) if each not in (None, unsaid)
    ):
        raise UsageError(
            f"{called}: timeout= needs coroutine functions, because nothing else can be stopped. Give the client that "
            "the function calls a time-out of its own."
        )
    first, longest = (seconds(pause, "backoff") for pause in backoff)
    return Task(called, action, undo, attempts, undo_attempts, first, longest, limit, types, False)


def _check_function(function: Any) -> None:
    if not callable(function):
        raise UsageError(f"{function!r} can't be called, so it can't be a step.")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UsageError(f"{function!r} is a generator: calling it runs nothing. Return a list instead.")


def _only(group: Any) -> Task:
    if not isinstance(group, tuple) or len(group) != 1 or not isinstance(group[0], Task):
        raise UsageError(f"together(…) takes steps: together(step(…), step(…)), not {group!r}.")
    task: Task = group[0]
    return task


def _check_names(outline: Outline) -> None:
    names = [task.name for task in outline.tasks]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"Two steps are called {name!r}. Give one of them name=: results go by names.")


def _check_pivot(outline: Outline) -> None:
    pivots = [task.name for task in outline.tasks if task.is_pivot]
    if len(pivots) > 1:
        raise UsageError(
            f"{' and '.join(pivots)} are pivots, and a saga has one at most: after the first there is no way back. "
            "Make those after it steps."
        )


def _check_parameters(outline: Outline) -> None:
    known, names = set[str](), {task.name for task in outline.tasks}
    for group in outline.groups:
        own = {task.name for task in group}
        for task in group:
            _check_function_of(task.name, task.action, known, names)
            if task.undo is not None:
                _check_function_of(task.name, task.undo, known | {task.name}, names)
        known |= own


def _check_function_of(step: str, function: Callable[..., Any], known: set[str], names: set[str]) -> None:
    parameters = parameters_of(function)
    called = f"{module_of(function)}.{getattr(function, '__qualname__', function)}"
    if not parameters or parameters[0].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        raise UsageError(f"{step}: the first parameter of {called} has to be what the saga is asked for.")
    for parameter in parameters[1:]:
        if parameter.name in known:
            continue
        if parameter.default is not parameter.empty and parameter.name not in names:
            continue
        raise UsageError(
            f"{step}: {called} has a parameter {parameter.name!r}, which is no step before it. Parameters after the "
            f"first get the results of earlier steps by name: {', '.join(sorted(known)) or 'there are none yet'}."
        )


def _placed(task: Task, is_after_pivot: bool) -> Task:
    """A step as its place in the saga makes it."""
    if is_after_pivot:
        given = {
            "undo": task.undo is not unsaid,
            "attempts": task.attempts is not None,
            "refused": task.refused,
        }
        for option in (option for option, value in given.items() if value):
            raise UsageError(
                f"{task.name} comes after the pivot, where nothing is undone and every step is tried until it "
                f"holds: leave out {option}=, or put the step before the pivot."
            )
        return task._replace(undo=None)
    if task.undo is unsaid:
        raise UsageError(
            f"{task.name} has no undo=, and what comes after it may fail. Give it a compensation; or undo=None if "
            "there is nothing to take back; or put it behind the pivot."
        )
    return task._replace(attempts=task.attempts or ATTEMPTS)
