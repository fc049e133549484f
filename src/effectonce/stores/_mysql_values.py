"""Steps as the values of statements to a MySQL or MariaDB server, each of them a literal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .._records import Claim, Record, State
from ._mysql_sql import binary, double, name_of
from ._steps import End, Hold, Save, Step, Swap

MOST_ALIKE: Final = 128
"""Ends of one statement without a table of them."""


def new_values(claim: Claim) -> tuple[str, ...]:
    """The values of ``new``."""
    key, owner, fingerprint, lease, keep, once, _, _ = claim
    name, whole = name_of(key), key.encode()
    return (
        binary(name), "NULL" if name == whole else binary(whole), str(int(once)), double(lease), double(keep),
        binary(owner), binary(fingerprint),
    )  # fmt: skip


def change_values(step: Step) -> tuple[str, ...]:
    """The statement that changes one row or none, and its values."""
    if type(step) is End:
        key, owner, fence, state, result, keep, _ = step.completion
        held = (place(key), binary(owner), str(fence))
        has_answer = state is State.COMPLETED or state is State.FAILED
        return ("end", str(int(state)), binary(result), double(keep), *held, str(int(has_answer)))
    if type(step) is Hold or type(step) is Save:
        key, owner, fence, lease, keep, journal = step.renewal
        held = (place(key), binary(owner), str(fence))
        times = (double(lease), double(lease), double(keep))
        if journal is None:
            return ("hold", *times, *held)
        return ("save", *times, binary(journal), *held, str(len(journal)))
    assert type(step) is Swap
    before, after = step
    return (
        "swap", str(int(after.state)), binary(after.owner or None), str(after.fence), binary(after.fingerprint),
        _lease(after), str(after.attempts), binary(after.result), double(after.expires_at), str(int(after.once)),
        place(before.key), str(int(before.state)), binary(before.owner or None), str(before.fence),
        str(before.attempts), _lease(before), double(before.expires_at),
    )  # fmt: skip


def alike_values(ends: list[tuple[str, ...]]) -> tuple[str, ...] | None:
    """The values of ``end_alike``, for ends that differ in nothing but whose they are and what they answer.

    None: they do, or two are about one key, or they are too many for a server to look each of them up in a list.
    """
    _, states, results, keeps, places, owners, fences, answers = zip(*ends, strict=True)
    alike = len(set(zip(states, keeps, answers, strict=True))) == 1 and len(set(places)) == len(places)
    if len(ends) > MOST_ALIKE or not alike:
        return None
    result, owner, fence = (_by_key(places, values) for values in (results, owners, fences))
    return states[0], result, keeps[0], ",".join(places), owner, fence, answers[0]


def _by_key(places: Sequence[str], values: Sequence[str]) -> str:
    """The value of each key, as an expression."""
    if len(set(values)) == 1:
        return values[0]
    return f"CASE `key` {' '.join(map('WHEN {} THEN {}'.format, places, values))} END"


def place(key: str) -> str:
    return binary(name_of(key))


def _lease(record: Record) -> str:
    return double(record.lease_until) if record.lease_until else "NULL"
