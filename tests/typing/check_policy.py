"""What type checkers say of policies: a prober may be a plain function or a coroutine function."""

from __future__ import annotations

from effectonce import Policy
from effectonce._records import Record
from effectonce.policy import Resolution


def ask(record: Record) -> Resolution | None:
    return Resolution.completed({"id": record.key}, hint=dict[str, str])


async def ask_later(record: Record) -> Resolution | None:
    return ask(record)


def is_sure(record: Record) -> Resolution:
    return Resolution.not_applied()


Policy(prober=ask)
Policy(prober=ask_later)
Policy(prober=is_sure)
Policy(prober=lambda record: Resolution.failed(ValueError(record.key)))
