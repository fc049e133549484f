"""What is left of a call in a transaction that was interrupted: nothing, or all of it; no effect without its record.

Ctrl-C, a time limit and a cancelled task come at any moment, also between two statements and in the middle of one. What
the handler did is undone to its savepoint then, with what was recorded of it, and the key is given back. Where nobody
can know whether that was done, the connection is closed: whatever its user does then, nothing of it is committed.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from .._records import Claim, Completion, State
from ..errors import EffectOnceError
from .base import Adapter, SavepointGone, code_of, is_lost

if TYPE_CHECKING:
    from ._stores import TransactionStore

T = TypeVar("T")


class OutOfStep(Exception):
    """A connection gives the answer to an earlier question: its driver was interrupted in the middle of that."""


async def to_its_end(awaits: bool, work: Coroutine[Any, Any, T]) -> T:
    """Have something done to its end; a cancellation that comes meanwhile is heard after it."""
    if not awaits:
        return await work
    from asyncio import CancelledError, ensure_future, wait

    task, cancelled = ensure_future(work), None
    while not task.done():
        try:
            await wait([task])
        except CancelledError as error:
            cancelled = error
    if cancelled is not None and task.exception() is None:
        raise cancelled
    return task.result()


async def undo(adapter: Adapter, name: str) -> None:
    """Undo what came after a mark. An answer counts only if it is to this question."""
    await in_step(adapter)
    await adapter.roll_back_to(name)


async def in_step(adapter: Adapter) -> None:
    """Raise if a connection's answers are to earlier questions."""
    if adapter.dialect == "mysql":  # whose drivers take any answer for the one to their last question
        name = adapter.new_name()
        rows = [[_text(value) for value in row] for row in (await adapter.execute(f"SELECT '{name}'")).rows]
        if rows != [[name]]:
            raise OutOfStep("the connection's answers are not to what it is asked")


async def give_back(
    store: TransactionStore, claims: Sequence[Claim], names: Sequence[str], error: BaseException
) -> None:
    """Give back what was claimed just when something interrupted it, if it was; before any handler began.

    What the engine itself refused was not claimed, and its word goes through as it is.
    """
    if isinstance(error, EffectOnceError) or code_of(error) is not None or is_lost(error):
        return
    try:
        for name in names:
            await store.adapter.let_go(name)
        for claim in claims:
            record = await store.get(claim.key)
            if record is not None and (record.state, record.owner) == (State.PENDING, claim.owner):
                await store.complete(
                    Completion(
                        claim.key, claim.owner, record.fence, State.ABSENT, None, claim.keep, began=False
                    )
                )
    except BaseException as second:
        await give_up(store.adapter, error, second)


async def give_up(
    adapter: Adapter, error: BaseException, second: BaseException, is_batch: bool = False
) -> None:
    """What was done can't be undone, or not be recorded. See to it that it is not committed, and say so.

    An engine that answers with an error has no effect left of one call: PostgreSQL lets nothing be committed after any
    error, and elsewhere a savepoint that is gone was released after the result had been recorded, or went with its
    transaction. A batch has effects before that savepoint, too.
    """
    aborted = adapter.dialect == "postgresql" and code_of(second) is not None
    answered = isinstance(second, SavepointGone) or code_of(second) is not None
    if not is_lost(second) and (aborted or (answered and not is_batch)):
        error.add_note(
            f"effectonce could not record this: {second!r}. The transaction has to be rolled back."
        )
        return
    with suppress(Exception):
        await adapter.hang_up()
    error.add_note(
        f"effectonce could neither record nor undo this: {second!r}. It has closed the connection, so that the "
        "transaction is rolled back. Run it again over another one."
    )


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value
