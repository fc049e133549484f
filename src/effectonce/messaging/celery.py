"""Celery: a base class for tasks whose messages have their effect once, however often they are delivered.

::

    @app.task(base=IdempotentTask, receiver=receiver)
    def charge(order): ...

A message is known by its task id, which Celery keeps through redeliveries and retries. A repetition returns the first
result, so that chains, chords and callbacks go on with it. While another worker runs the task, the message is sent
again with a countdown before it is acknowledged; that counts as no retry. ``self.retry`` and ``autoretry_for`` release
the claim. An exception is Celery's to treat as always; one that the policy remembers is raised on each repetition.

Steps of a chain have ids from the beginning. Callbacks (``link=``) get theirs when they are sent, other ones with each
delivery of their task; so they are given ids here that are made of the task's own.

A task called as a function, without a message, is just called.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn

from .. import keys
from .._messages import Message
from .._receiver import Receiver
from ..errors import MissingExtra, UsageError
from ._delivery import Later, Raise
from ._tasks import DEFAULT_RETRY, TIMES, Pauses, Task, Tasks

try:
    from celery.app.task import Task as CeleryTask  # type: ignore[import-untyped]
    from celery.exceptions import (  # type: ignore[import-untyped]
        Ignore,
        Reject,
        Retry,
        SoftTimeLimitExceeded,
    )
except ImportError as error:
    raise MissingExtra("This needs the package celery: pip install effectonce[celery]") from error

if TYPE_CHECKING:
    from ..policy import Policy


CALLBACKS: Final = uuid.UUID("5b0c7b0e-6f0b-5d3e-9f53-0c9f3c0d6a51")


def _is_another_try(error: BaseException) -> bool:
    return isinstance(error, Retry | Reject)


def _id_of(request: Any) -> str:
    """The task id. What ``self.replace`` has put in a task's place inherits it, and is another message."""
    nesting = request.get("replaced_task_nesting")
    return keys.composite("replaced", request.id, int(nesting)) if nesting else str(request.id)


def _name_callbacks(request: Any) -> None:
    """Give callbacks without an id one that is the same whenever this message is delivered.

    What a callback is asked for is a part of it: who sends a task again with another callback asks for another one.
    Not so those of errors (``link_error=``): a task that fails again has failed twice.
    """
    for place, signature in enumerate(request.callbacks):
        for step, task in enumerate(_tasks_of(signature)):
            asked = json.dumps([task.get(part) for part in ("task", "args", "kwargs")], default=repr)
            name = "/".join((_id_of(request), str(place), str(step), asked))
            task.setdefault("options", {}).setdefault("task_id", str(uuid.uuid5(CALLBACKS, name)))


def _tasks_of(signature: Any) -> Iterator[Any]:
    """The tasks of a signature: itself, or those of a chain, a group or a chord."""
    if not signature.get("subtask_type"):
        yield signature
        return
    inner = signature.get("kwargs", {})
    header = inner.get("header", ())
    for each in (*inner.get("tasks", ()), *([header] if isinstance(header, dict) else header)):
        yield from _tasks_of(each)
    if inner.get("body"):
        yield from _tasks_of(inner["body"])


class IdempotentTask(CeleryTask):  # type: ignore[misc]
    """The base of tasks: ``@app.task(base=IdempotentTask, receiver=receiver)``, or a class of yours that sets these.

    receiver       who remembers
    policy         how messages are treated; by default the receiver's, with a week of memory at least
    retry_pauses   the first and the longest pause before a message comes again that could be neither run nor answered
    """

    abstract = True
    receiver: ClassVar[Receiver | None] = None
    policy: ClassVar[Policy | None] = None
    retry_pauses: ClassVar[Pauses] = DEFAULT_RETRY
    acks_late = True
    reject_on_worker_lost = True
    _tasks: ClassVar[Tasks]

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Check the settings when the task becomes an app's, before anything is sent or run."""
        super().on_bound(app)
        if not isinstance(cls.receiver, Receiver):
            raise UsageError(
                f"The task {cls.name} has no receiver to remember by. Write @app.task(base=IdempotentTask, "
                "receiver=receiver), or set it in a base class of your own."
            )
        if not (cls.acks_late and cls.reject_on_worker_lost):
            raise UsageError(
                f"The task {cls.name} has acks_late={cls.acks_late}, reject_on_worker_lost="
                f"{cls.reject_on_worker_lost}. Both must be True, as they are unless you say otherwise: a message "
                "that is acknowledged before its effect is recorded is lost with its worker."
            )
        ended, cut = (Ignore,), (SoftTimeLimitExceeded,)
        cls._tasks = Tasks(cls.receiver, cls.policy, cls.retry_pauses, _is_another_try, ended, cut)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run once, or return what the first run returned."""
        request = self.request
        if request.called_directly:
            return super().__call__(*args, **kwargs)
        if request.callbacks:
            _name_callbacks(request)
        # Arguments are not compared: self.retry(args=...) may change them under the same id.
        message = Message(_id_of(request), None, None, str(self.name))
        times = int(request.get(TIMES) or 1)
        found = self._tasks.run(Task(message, self.run, args, kwargs, times))
        if isinstance(found, Later):
            self._come_later(found, times)
        if isinstance(found, Raise):
            raise found.error
        return found.value

    def _come_later(self, found: Later, times: int) -> NoReturn:
        """Send the message again, then have this one acknowledged."""
        request = self.request
        if request.is_eager:
            raise found.error
        headers = {**(request.headers or {}), TIMES: times + 1}
        again: Any = self.signature_from_request(
            request, countdown=found.delay, retries=request.retries, headers=headers
        )
        try:
            again.apply_async()
        except Exception as error:  # then it stays the broker's
            raise Reject(error, requeue=True) from error
        raise Retry(exc=found.error, when=found.delay, sig=again) from found.error


__all__ = ["IdempotentTask"]
