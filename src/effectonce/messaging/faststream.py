"""FastStream: a middleware that has each message's effect happen once, on RabbitMQ, Kafka and NATS JetStream.

::

    broker = RabbitBroker(url, middlewares=[Idempotent(receiver)])

    @broker.subscriber("orders", ack_policy=AckPolicy.NACK_ON_ERROR)
    @broker.publisher("invoices")
    async def bill(order: Order) -> Invoice: ...

A repetition returns the first result, so that publishers and replies go on with it; a crash between an effect and its
publication is made good by the next delivery. While another consumer is at it, the message is given back after a pause.
What can never be processed, a message without a stable id among them, is published to ``dead_letter`` with the reason,
and acknowledged. Subscribers must have ``NACK_ON_ERROR``: with any other policy a message may be gone before its effect
happened. Such a subscriber is stopped at its first message, which is given back, with an explanation in the log.

Groups of one Kafka topic, and durable consumers of one stream, get the same messages: each handles them once.

An id is looked for where the broker's own consumers look, not in FastStream's ``message_id``: see ``_faststream``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from .. import keys
from .._handlers import resolved_hint
from .._messages import Outcome
from ..errors import MissingExtra, UsageError
from ._delivery import DONE, Ack, DeadLetter, Delivery, Intake, Nack, explained
from ._faststream import Kind, give_back, kind_of, name_result
from ._judge import Judge
from ._tasks import DEFAULT_RETRY, Pauses, Task, Tasks, own

try:
    from faststream import AckPolicy, BaseMiddleware
    from faststream.exceptions import AckMessage, IgnoredException, NackMessage, StopConsume
    from faststream.message.source_type import SourceType
    from faststream.response import Response
except ImportError as error:
    raise MissingExtra("This needs the package faststream: pip install effectonce[faststream]") from error

if TYPE_CHECKING:
    from .._receiver import Receiver
    from ..policy import Policy

Next = Callable[[Any], Awaitable[Any]]
RESPONSE: Final = "effectonce.response"

log = logging.getLogger("effectonce.messaging")


class Idempotent:
    """The middleware: ``RabbitBroker(url, middlewares=[Idempotent(receiver)])``.

    policy        how messages are treated; by default the receiver's, with a week of memory at least
    retry         the first and the longest pause before another delivery
    id            where the sender's id is: the name of a header, or a function of FastStream's message. Then a message
                  without it is refused. By default the places that the broker has for it
    dead_letter   the queue, topic or subject for what can't be processed; by default its source's name with ``.dead``
                  (on JetStream with ``-dead``, if the subscriber is given that one). Who would get its own is stopped
    max_body      a larger message is refused
    """

    def __init__(
        self,
        receiver: Receiver,
        *,
        policy: Policy | None = None,
        retry: Pauses = DEFAULT_RETRY,
        id: str | Callable[[Any], object] | None = None,
        dead_letter: str = "",
        max_body: int = 1 << 20,
    ) -> None:
        self._receiver, self._id, self._dead_letter = receiver, id, dead_letter
        self._tasks = Tasks(receiver, policy, retry, _is_another_try, ended=(AckMessage,))
        self._judge = Judge(receiver, self._tasks.policy, self._tasks.pace)
        self._intake = Intake(lambda body: body, max_body)
        self._kinds: dict[type[Kind], Kind] = {}
        self._callers: dict[Any, Callable[..., Any]] = {}

    def __call__(self, message: Any, /, *, context: Any) -> _Scope:
        """Made for each message by FastStream."""
        scope = _Scope(message, context=context)
        scope.idempotent = self
        return scope

    async def consume(
        self, call_next: Next, message: Any, subscriber: Any, broker: Any, scope: _Scope
    ) -> Any:
        """Return what the handler returned, now or the first time, or raise what tells FastStream otherwise."""
        try:
            kind = self._kind(message, subscriber)
            delivery = kind.delivery(message, subscriber, self._id)
            where = await kind.place_apart(message, delivery, self._dead_letter)
        except UsageError as error:
            log.critical("a subscriber is stopped: %s", error)
            await give_back(message)
            raise _Refused(str(error)) from error
        outcome = await self._outcome(kind, call_next, message, subscriber, delivery, scope)
        verdict = self._judge.verdict(delivery, outcome)
        if isinstance(verdict, Ack) and verdict.error is not None and _passes_on(message, subscriber):
            verdict = self._judge.heard(delivery, DeadLetter("no_result", explained(verdict.error)))
        if isinstance(verdict, DeadLetter):
            letter = verdict._replace(consumer=verdict.consumer or await kind.group(message, subscriber))
            await kind.put_aside(broker, delivery, letter, where)
            raise AckMessage
        assert isinstance(outcome, Outcome)
        if isinstance(verdict, Nack):
            return await _given_back(kind, verdict, outcome)
        if outcome.status not in DONE or verdict.error is not None:
            raise AckMessage  # there is no value, and None would be published
        return _restored(verdict.value)

    def _kind(self, message: Any, subscriber: Any) -> Kind:
        kind = kind_of(message)
        if subscriber.ack_policy is not AckPolicy.NACK_ON_ERROR:
            raise UsageError(
                f"{subscriber.specification.call_name} has ack_policy={subscriber.ack_policy.name}, so a message may "
                "be gone before its effect happened. Subscribe with ack_policy=AckPolicy.NACK_ON_ERROR."
            )
        return self._kinds.setdefault(kind, kind())

    async def _outcome(
        self,
        kind: Kind,
        call_next: Next,
        message: Any,
        subscriber: Any,
        delivery: Delivery,
        scope: _Scope,
    ) -> Outcome[Any] | DeadLetter:
        admitted = self._intake.admit(delivery, self._receiver._clock())
        if isinstance(admitted, DeadLetter):
            return admitted
        try:
            await message.decode()  # FastStream keeps what it finds
        except Exception as error:
            return DeadLetter("undecodable", explained(error))
        try:
            async with kind.kept(message):
                caller = self._caller(subscriber)
                group = await kind.group(message, subscriber)
                scope.whose = (self._receiver.consumer or group, admitted.source, admitted.id)
                return await self._tasks.outcome(
                    Task(admitted, caller, (call_next, message), {}, delivery.times, group)
                )
        except UsageError as error:  # it could not be named
            return Outcome("failed", error=error)

    def _caller(self, subscriber: Any) -> Callable[..., Any]:
        """What calls the rest of the chain, with the annotation of the handler at its end."""
        known = self._callers.get(subscriber)
        if known is not None:
            return known

        async def call(call_next: Next, message: Any) -> Any:
            return _storable(await call_next(message))

        call.__annotations__ = {"return": _hint(subscriber)}
        self._callers[subscriber] = call
        return call


class _Scope(BaseMiddleware[Any, Any]):
    """The middleware of one message."""

    idempotent: Idempotent
    whose: tuple[str, ...] = ()
    """Consumer, source and id of the message: what is published of its result is named after it."""
    published = 0

    async def consume_scope(self, call_next: Next, msg: Any) -> Any:
        if msg.source_type is SourceType.RESPONSE:  # the answer to a request of ours
            return await call_next(msg)
        subscriber, broker = self.context.get_local("handler_"), self.context.get_local("broker")
        return await self.idempotent.consume(call_next, msg, subscriber, broker, self)

    async def publish_scope(self, call_next: Next, cmd: Any) -> Any:
        """Publish a result under an id that is the same on each delivery: the next consumer has to know it again."""
        if self.whose:
            self.published += 1
            where = json.dumps((*self.whose, cmd.destination))
            name_result(cmd, keys.derived(where, f"result-{self.published}"))
        return await call_next(cmd)


class _Refused(UsageError, StopConsume):
    """Stops a subscriber that would lose messages."""

    def __str__(self) -> str:
        return str(self.args[0])


def _is_another_try(error: BaseException) -> bool:
    """Whether a handler told FastStream to nack, reject or skip; AckMessage is an end like any other."""
    return isinstance(error, IgnoredException) and not isinstance(error, AckMessage)


async def _given_back(kind: Kind, verdict: Nack, outcome: Outcome[Any]) -> Any:
    """Raise what has the message delivered again, after a pause unless the handler itself said so."""
    error = outcome.error and own(outcome.error)
    if isinstance(error, IgnoredException):
        raise error
    if verdict.reason != "failed":
        log.info("a message comes later: %s", verdict.reason)
    options = await kind.put_off(verdict.delay)
    if error is not None and verdict.reason == "failed" and not options:
        raise error
    if error is not None and verdict.reason == "failed":
        log.error("a handler failed: %s", explained(error), exc_info=error)
    raise NackMessage(**options) from error


def _passes_on(message: Any, subscriber: Any) -> bool:
    """Whether somebody waits for the result."""
    return bool(message.reply_to) or any(call.handler._publishers for call in subscriber.calls)


def _hint(subscriber: Any) -> Any:
    """What the one handler of a subscriber returns, by its annotation. Of several, nobody knows which it will be."""
    hints = [resolved_hint(call.handler._original_call) for call in subscriber.calls]
    known = len(hints) == 1 and not (isinstance(hints[0], type) and issubclass(hints[0], Response))
    return hints[0] if known else Any


def _storable(value: Any) -> Any:
    """A handler's value as it can be remembered: a Response is remembered as what it is made of."""
    if not isinstance(value, Response):
        return value
    return {RESPONSE: f"{type(value).__module__}:{type(value).__qualname__}", **vars(value)}


def _restored(value: Any) -> Any:
    if not (isinstance(value, dict) and RESPONSE in value):
        return value
    name, state = value[RESPONSE], {key: each for key, each in value.items() if key != RESPONSE}
    pending: list[type[Response]] = [Response]
    while pending:
        kind = pending.pop()
        if f"{kind.__module__}:{kind.__qualname__}" == name:
            response = kind.__new__(kind)
            response.__dict__.update(state)
            return response
        pending += kind.__subclasses__()
    raise UsageError(f"The response {name} of the first delivery is no class that is loaded here.")


__all__ = ["Idempotent"]
