"""Conditional writes in DynamoDB's two languages: requests of their own, which may share a transaction, and PartiQL."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

Item = dict[str, dict[str, Any]]
Where = Mapping[str, dict[str, Any] | None]
"""What attributes have to be; None: missing."""

KEY, EXPIRY = "k", "t"
"""The table's key, and its time-to-live attribute."""


class Put(NamedTuple):
    """Put an item where there is none."""

    item: Item

    @property
    def key(self) -> str:
        """The item concerned."""
        key: str = self.item[KEY]["S"]
        return key


class Change(NamedTuple):
    """Set and remove attributes of an item whose attributes are as ``where`` says."""

    key: str
    values: Item
    remove: tuple[str, ...]
    where: Where
    longer: str = ""
    """An attribute whose value has to be missing, or shorter than the one that it is set to."""


class Drop(NamedTuple):
    """Delete an item whose attributes are as ``where`` says; whatever it is, if that says nothing."""

    key: str
    where: Where


class Update(NamedTuple):
    """Change an item by expressions of its own."""

    key: str
    expression: str
    condition: str
    values: Item


Write = Put | Change | Drop
"""What goes into a batch; an ``Update`` goes alone, or into a transaction."""
OPERATIONS: Final = {"Put": "put_item", "Update": "update_item", "Delete": "delete_item"}
"""A write's name in a transaction, and alone."""
ALL_OLD: Final = {"ReturnValuesOnConditionCheckFailure": "ALL_OLD"}


def request_of(write: Write | Update) -> tuple[str, dict[str, Any]]:
    """A write's name and its request, which is the same in a transaction."""
    match write:
        case Put(item):
            return "Put", {"Item": item, "ConditionExpression": f"attribute_not_exists({KEY})", **ALL_OLD}
        case Change():
            return "Update", _update(write)
        case Drop(key, where):
            condition, values = _condition(where)
            request: dict[str, Any] = {"Key": {KEY: {"S": key}}}
            if condition:
                request |= {"ConditionExpression": condition, **ALL_OLD}
            if values:
                request["ExpressionAttributeValues"] = values
            return "Delete", request
        case Update(key, expression, condition, values):
            return "Update", _updated(key, expression, condition, values)


def statement_of(table: str, write: Write) -> dict[str, Any]:
    """A write in PartiQL."""
    if isinstance(write, Put):
        return {"Statement": _insert(table, tuple(write.item)), "Parameters": [*write.item.values()]}
    terms = tuple((name, is_ is None) for name, is_ in write.where.items())
    compared = [is_ for is_ in write.where.values() if is_ is not None]
    values, remove = (write.values, write.remove) if isinstance(write, Change) else ({}, ())
    return {
        "Statement": _change(table, tuple(values), remove, terms),
        "Parameters": [*values.values(), {"S": write.key}, *compared],
        **ALL_OLD,
    }


def _update(change: Change) -> dict[str, Any]:
    key, values, remove, where, longer = change
    condition, compared = _condition(where)
    if longer:
        condition += f" AND (attribute_not_exists({longer}) OR size({longer}) < :size)"
        compared[":size"] = {"N": str(len(values[longer]["B"]))}
    named = {f":{name}": value for name, value in values.items()}
    return _updated(key, _expression(tuple(values), remove), condition, named | compared)


def _updated(key: str, expression: str, condition: str, values: Item) -> dict[str, Any]:
    return {
        "Key": {KEY: {"S": key}},
        "UpdateExpression": expression,
        "ConditionExpression": condition,
        "ExpressionAttributeValues": values,
        **ALL_OLD,
    }


@lru_cache(256)
def _expression(values: tuple[str, ...], remove: tuple[str, ...]) -> str:
    removed = f" REMOVE {', '.join(remove)}" if remove else ""
    return "SET " + ", ".join(f"{name} = :{name}" for name in values) + removed


def _condition(where: Where) -> tuple[str, Item]:
    terms = [
        f"attribute_not_exists({name})" if is_ is None else f"{name} = :is_{name}"
        for name, is_ in where.items()
    ]
    return " AND ".join(terms), {f":is_{name}": is_ for name, is_ in where.items() if is_ is not None}


@lru_cache(256)
def _insert(table: str, names: tuple[str, ...]) -> str:
    return f'INSERT INTO "{table}" VALUE {{{", ".join(f"{name!r}: ?" for name in names)}}}'


@lru_cache(256)
def _change(
    table: str, values: tuple[str, ...], remove: tuple[str, ...], where: tuple[tuple[str, bool], ...]
) -> str:
    """What changes an item, or deletes it if nothing is to be changed."""
    clauses = [f'SET "{name}" = ?' for name in values] + [f'REMOVE "{name}"' for name in remove]
    terms = [f'"{KEY}" = ?'] + [
        f'"{name}" IS MISSING' if missing else f'"{name}" = ?' for name, missing in where
    ]
    verb = f'UPDATE "{table}"' if clauses else f'DELETE FROM "{table}"'  # noqa: S608 — a checked name
    return " ".join((verb, *clauses, "WHERE", " AND ".join(terms)))
