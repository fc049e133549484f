"""Tasks of a framework, each message's effect once: what Celery, Dramatiq, taskiq and FastStream have in common.

A framework has its own loop, its own acknowledgements and its own rules for another try. So nothing is consumed here: a
task's function is called through the flow, and the outcome becomes an ``Answer`` for the framework. Result and
remembered error are what they were the first time; whoever finds the effect running elsewhere is told to come later.

An exception may be the framework's word rather than the handler's. *Try this again* releases the claim, whatever the
policy remembers. *Time is up* is nobody's word on what happened: the claim stays, and its lease ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .. import _blocking
from .._attempt import surrounding
from .._durations import Duration, seconds
from .._handlers import hint_of
from .._messages import Message, Outcome
from ..errors import NotApplied, Unencodable
from ._delivery import Answer, Pace, Raise, answer, decide, message_policy

if TYPE_CHECKING:
    from .._answers import Call
    from .._colours import Colour
    from .._receiver import Receiver
    from ..policy import Policy

Pauses = tuple[Duration, Duration]
DEFAULT_RETRY: Final[Pauses] = ("1s", "5m")
"""The first and the longest pause before a message comes again that could be neither run nor answered."""
TIMES: Final = "effectonce_times"
"""The mark of a message that was told to come later: how often, so that pauses get longer."""

ExceptionTypes = tuple[type[BaseException], ...]


class Task(NamedTuple):
    """One delivery of a message that calls a function."""

    message: Message
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    times: int = 1
    """How often it has been here, this time included."""
    operation: str = ""
    """Who of several that get the same message."""


class Tasks:
    """Runs a framework's functions.

    policy    by default the receiver's, with a week of memory at least
    retry     the first and the longest pause before a message comes again
    again     tells the framework's exceptions that ask for another try
    ended     its exceptions that are an end like any other: repetitions get the same
    cut       its exceptions that say that time is up
    """

    def __init__(
        self,
        receiver: Receiver,
        policy: Policy | None,
        retry: Pauses,
        again: Callable[[BaseException], bool],
        ended: ExceptionTypes = (),
        cut: ExceptionTypes = (),
    ) -> None:
        self.receiver, self._again, self._cut = receiver, again, cut
        mine = message_policy(receiver.policy, policy)
        self.policy = mine.but(remember=(*mine.remember, *ended)) if ended else mine
        self.pace = Pace(seconds(retry[0], "retry"), seconds(retry[1], "retry"))

    def run(self, task: Task) -> Answer:
        """Call a plain function, or answer from what is remembered."""
        return self._answer(_blocking.run(self._outcome(self.receiver.blocking, task)), task)

    async def arun(self, task: Task) -> Answer:
        """The same for a coroutine function."""
        return self._answer(await self.outcome(task), task)

    async def outcome(self, task: Task) -> Outcome[Any]:
        """What became of a coroutine function's message."""
        return await self._outcome(self.receiver.asyncio, task)

    async def _outcome(self, colour: Colour, task: Task) -> Outcome[Any]:
        call = self._call(task)
        function = self._guarded(task.function, colour.awaits)
        if any(attempt.key == call.key for attempt in surrounding()):
            # A task that calls itself as a function: no message, so no effect of its own.
            value = task.function(*task.args, **task.kwargs)
            return Outcome("executed", await value if colour.awaits else value)
        try:
            return await self.receiver.flow.run(colour, call, function, task.args, task.kwargs)
        except _Cut as cut:
            assert cut.__cause__ is not None
            raise cut.__cause__ from None

    def _call(self, task: Task) -> Call:
        try:
            return self.receiver._call(
                task.message, hint_of(task.function), task.operation, "", None, self.policy
            )
        except Unencodable:  # then repetitions are known by their id alone
            message = task.message._replace(payload=None)
            return self.receiver._call(message, hint_of(task.function), task.operation, "", None, self.policy)

    def _answer(self, outcome: Outcome[Any], task: Task) -> Answer:
        found = answer(outcome, decide(outcome, self.policy, self.pace, task.times))
        return found._replace(error=own(found.error)) if isinstance(found, Raise) else found

    def _guarded(self, function: Callable[..., Any], awaits: bool) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._translated():
                return function(*args, **kwargs)

        async def arun(*args: Any, **kwargs: Any) -> Any:
            with self._translated():
                return await function(*args, **kwargs)

        return arun if awaits else run

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Say in the flow's words what the framework's exceptions mean."""
        try:
            yield
        except Exception as error:
            if self._again(error):
                raise _GivenBack from error
            if isinstance(error, self._cut) and not isinstance(error, self.policy.in_doubt):
                raise _Cut from error
            raise


class _GivenBack(NotApplied):
    """The framework was asked for another try."""


class _Cut(BaseException):
    """The framework ended the handler: no word of its own, so no ``Exception``."""


def own(error: BaseException) -> BaseException:
    """The exception that the handler raised, as the framework knows it."""
    return error.__cause__ or error if isinstance(error, _GivenBack) else error
