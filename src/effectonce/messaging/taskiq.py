"""taskiq: a middleware, which is also the decorator of tasks whose messages have their effect once.

::

    idempotent = Idempotent(receiver)
    broker = RedisStreamBroker(url).with_middlewares(idempotent)

    @broker.task
    @idempotent
    async def charge(order): ...

Both are needed: taskiq has no hook around a task, so the decorator, *below* ``@broker.task``, runs it, and the
middleware tells the decorator which message it is for. A message is known by its task id, which taskiq keeps through
redeliveries and retries. A repetition returns the first result, which goes to the result backend as always. While
another worker runs it, the message is held back unacknowledged for a moment and then sent again; that counts as no
retry. Exceptions release the claim and are a retry middleware's to treat; one that the policy remembers is raised on
each repetition, and not retried.

A task called as a function, without a message, is just called.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import multiprocessing
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

from .._messages import Message
from ..errors import MissingExtra, UsageError
from ._delivery import Answer, Later, Raise
from ._tasks import DEFAULT_RETRY, TIMES, Pauses, Task, Tasks

try:
    from taskiq import AsyncTaskiqDecoratedTask, TaskiqMessage, TaskiqMiddleware, TaskiqResult
    from taskiq.exceptions import NoResultError
except ImportError as error:
    raise MissingExtra("This needs the package taskiq: pip install effectonce[taskiq]") from error

if TYPE_CHECKING:
    from .._receiver import Receiver
    from ..policy import Policy

F = TypeVar("F", bound=Callable[..., Any])
REQUEUED = "X-Taskiq-requeue"
"""The label that ``context.requeue()`` counts in."""


class _Ticket(NamedTuple):
    """The message that a task is run for, and what it asked before taskiq made types of it."""

    message: TaskiqMessage
    args: list[Any]
    kwargs: dict[str, Any]
    requeued: Any

    @property
    def times(self) -> int:
        return int(self.message.labels.get(TIMES, 1))


_TICKET: ContextVar[_Ticket | None] = ContextVar("effectonce_taskiq_ticket", default=None)


class Idempotent(TaskiqMiddleware):
    """Runs each message of the tasks that it decorates once.

    policy    how messages are treated; by default the receiver's, with a week of memory at least
    retry     the first and the longest pause before a message comes again that could be neither run nor answered
    """

    def __init__(
        self, receiver: Receiver, *, policy: Policy | None = None, retry: Pauses = DEFAULT_RETRY
    ) -> None:
        super().__init__()
        self._receiver, self._retry = receiver, retry
        self._tasks = self._tasks_under(policy)

    def _tasks_under(self, policy: Policy | None) -> Tasks:
        return Tasks(self._receiver, policy, self._retry, _is_another_try, ended=(NoResultError,))

    @overload
    def __call__(self, function: F, /) -> F: ...
    @overload
    def __call__(self, /, *, policy: Policy) -> Callable[[F], F]: ...
    def __call__(self, function: Any = None, /, *, policy: Policy | None = None) -> Any:
        """Decorate a task's function, plain or async; ``@idempotent(policy=...)`` gives it a policy of its own."""
        tasks = self._tasks if policy is None else self._tasks_under(policy)
        return (
            functools.partial(self._decorated, tasks)
            if function is None
            else self._decorated(tasks, function)
        )

    def _decorated(self, tasks: Tasks, function: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(function, AsyncTaskiqDecoratedTask):
            raise UsageError(
                f"{function.task_name} is a task already. Write @broker.task above this decorator."
            )

        @functools.wraps(function)
        def once(*args: Any, **kwargs: Any) -> Any:
            ticket = self._ticket(once)
            if ticket is None:
                return function(*args, **kwargs)
            return self._end(ticket, tasks.run(_task(ticket, function, args, kwargs)))

        @functools.wraps(function)
        async def aonce(*args: Any, **kwargs: Any) -> Any:
            ticket = self._ticket(aonce)
            if ticket is None:
                return await function(*args, **kwargs)
            return self._end(ticket, await tasks.arun(_task(ticket, function, args, kwargs)))

        return aonce if inspect.iscoroutinefunction(function) else once

    def _ticket(self, wrapper: Callable[..., Any]) -> _Ticket | None:
        """The message that this very function is run for; None when it is called as a function."""
        if self.broker is None:
            raise UsageError(
                "A task is decorated with an Idempotent that its broker does not know, so nothing would be remembered. "
                "Add it to the broker: broker.with_middlewares(idempotent)."
            )
        ticket = _TICKET.get()
        if ticket is None and _is_in_a_process_pool():
            raise UsageError(
                "A task in a pool of processes does not know its message, so nothing would be remembered. Use threads "
                "(no --use-process-pool), or make the task a coroutine function."
            )
        task = None if ticket is None else self.broker.find_task(ticket.message.task_name)
        return ticket if task is not None and task.original_func is wrapper else None

    def _end(self, ticket: _Ticket, found: Answer) -> Any:
        """Return or raise what taskiq is told."""
        if isinstance(found, Later):
            raise _ComeLater(self, ticket, found.delay) from found.error
        if isinstance(found, Raise):
            if found.final:
                ticket.message.labels["retry_on_error"] = False
            raise found.error
        return found.value

    # When messages come

    def pre_execute(self, message: TaskiqMessage) -> TaskiqMessage:
        """Tell the decorator which message comes."""
        requeued = message.labels.get(REQUEUED)
        _TICKET.set(_Ticket(message, [*message.args], {**message.kwargs}, requeued))
        return message

    def post_execute(self, message: TaskiqMessage, result: TaskiqResult[Any]) -> None:
        _TICKET.set(None)

    async def on_error(
        self, message: TaskiqMessage, result: TaskiqResult[Any], exception: BaseException
    ) -> None:
        """Send again what comes later, before taskiq acknowledges it. Few brokers can delay, so it is held here."""
        if not isinstance(exception, _ComeLater) or exception.sender is not self:
            return
        ticket = exception.ticket
        await asyncio.sleep(exception.delay)
        again = TaskiqMessage(
            task_id=message.task_id,
            task_name=message.task_name,
            labels={**message.labels, TIMES: str(ticket.times + 1)},
            labels_types=message.labels_types,
            args=ticket.args,
            kwargs=ticket.kwargs,
        )
        await self.broker.kick(self.broker.formatter.dumps(again))


class _ComeLater(NoResultError):
    """Neither done nor failed: nothing is stored, and retry middlewares leave it alone."""

    def __init__(self, sender: Idempotent, ticket: _Ticket, delay: float) -> None:
        super().__init__()
        self.sender, self.ticket, self.delay = sender, ticket, delay


def _task(ticket: _Ticket, function: Callable[..., Any], args: Any, kwargs: Any) -> Task:
    message = ticket.message
    named = Message(message.task_id, [ticket.args, ticket.kwargs], None, message.task_name)
    return Task(named, function, args, kwargs, ticket.times)


def _is_another_try(error: BaseException) -> bool:
    """Whether a task that wants no result was requeued; else it has ended without one."""
    ticket = _TICKET.get()
    return (
        isinstance(error, NoResultError)
        and ticket is not None
        and ticket.message.labels.get(REQUEUED) != ticket.requeued
    )


def _is_in_a_process_pool() -> bool:
    target = getattr(multiprocessing.current_process(), "_target", None)
    return getattr(target, "__name__", "") == "_process_worker"


__all__ = ["Idempotent"]
