"""Dramatiq: a middleware that has each message's effect happen once, however often an actor gets it.

::

    broker.add_middleware(Idempotent(receiver))

    @dramatiq.actor(idempotent=Policy(...))     # a policy of its own; False leaves an actor alone
    def charge(order): ...

It puts itself around the function of every actor, plain or async. A message is known by its message id, which Dramatiq
keeps through redeliveries and retries. A repetition returns the first result, so that pipelines, callbacks and stored
results go on with it. While another worker runs it, a copy is sent with a delay before the message is acknowledged;
that counts as no retry. ``dramatiq.Retry`` and other exceptions release the claim and are the ``Retries`` middleware's
to treat; one that the policy remembers, and used-up attempts, put the message into the dead-letter queue at once.

An actor called as a function, without a message, is just called.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

from .._messages import Message
from ..errors import MissingExtra, UsageError
from ..policy import Policy
from ._delivery import Later, Raise, Return
from ._tasks import DEFAULT_RETRY, TIMES, Pauses, Task, Tasks

try:
    from dramatiq.errors import RateLimitExceeded, Retry
    from dramatiq.middleware import Middleware, MiddlewareError, SkipMessage
except ImportError as error:
    raise MissingExtra("This needs the package dramatiq: pip install effectonce[dramatiq]") from error

if TYPE_CHECKING:
    from dramatiq import Actor, Broker, MessageProxy

    from .._receiver import Receiver

OPTION = "idempotent"
_MESSAGE: ContextVar[MessageProxy | None] = ContextVar("effectonce_dramatiq_message", default=None)


class Idempotent(Middleware):
    """Runs each message once.

    policy    how messages are treated; by default the receiver's, with a week of memory at least
    retry     the first and the longest pause before a message comes again that could be neither run nor answered
    """

    def __init__(
        self, receiver: Receiver, *, policy: Policy | None = None, retry: Pauses = DEFAULT_RETRY
    ) -> None:
        self._receiver, self._retry = receiver, retry
        self._tasks = self._tasks_under(policy)
        self._wrapped: WeakSet[Actor[Any, Any]] = WeakSet()

    @property
    def actor_options(self) -> set[str]:
        """What actors may say: ``idempotent=False``, or a policy."""
        return {OPTION}

    def _tasks_under(self, policy: Policy | None) -> Tasks:
        return Tasks(self._receiver, policy, self._retry, _is_another_try, ended=(SkipMessage,))

    # When actors are made

    def before_declare_actor(self, broker: Broker, actor: Actor[Any, Any]) -> None:
        self._wrap(broker, actor)

    def after_declare_actor(self, broker: Broker, actor: Actor[Any, Any]) -> None:
        """Those that were declared before this middleware was added."""
        self._wrap(broker, actor)

    def _wrap(self, broker: Broker, actor: Actor[Any, Any]) -> None:
        wanted = actor.options.get(OPTION, True)
        if wanted is False or actor in self._wrapped:
            return
        if not (wanted is True or isinstance(wanted, Policy)):
            raise _Refused(
                f"{OPTION}={wanted!r} of the actor {actor.actor_name} is no Policy, True or False."
            )
        self._wrapped.add(actor)
        tasks = self._tasks if wanted is True else self._tasks_under(wanted)
        function = actor.fn

        @functools.wraps(function)
        def once(*args: Any, **kwargs: Any) -> Any:
            message = _MESSAGE.get()
            if message is None or message.actor_name != actor.actor_name:
                return function(*args, **kwargs)
            asked = [list(message.args), message.kwargs]
            named = Message(message.message_id, asked, None, actor.actor_name)
            times = int(message.options.get(TIMES, 1))
            found = tasks.run(Task(named, function, args, kwargs, times))
            return found.value if isinstance(found, Return) else _end(broker, message, found, times)

        actor.fn = once

    # When messages come

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        _MESSAGE.set(message)

    def after_process_message(
        self, broker: Broker, message: MessageProxy, *, result: Any = None, exception: Any = None
    ) -> None:
        _MESSAGE.set(None)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        _MESSAGE.set(None)


def _is_another_try(error: BaseException) -> bool:
    return isinstance(error, Retry | RateLimitExceeded)


class _Refused(UsageError, MiddlewareError):
    """An actor that can't be protected. A broker would swallow any other error, and leave it unprotected."""


def _end(broker: Broker, message: MessageProxy, found: Raise | Later, times: int) -> NoReturn:
    """End a message that has no result, now or for good."""
    if isinstance(found, Later):
        try:
            broker.enqueue(message.copy(options={TIMES: times + 1}), delay=max(int(found.delay * 1000), 1))
        except Exception:
            message.fail()  # else it would be acknowledged with nothing in its place
            raise
        message.options["store_results"] = False  # or None would be stored as the result
        raise SkipMessage(str(found.error)) from found.error
    if found.final and not isinstance(found.error, SkipMessage):
        message.options["max_retries"] = 0
        message.fail()
    raise found.error


__all__ = ["Idempotent"]
