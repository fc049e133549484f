"""Decorated functions: which calls are one call, what a repeat returns, and what stays as it was."""

from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Any, NamedTuple, TypedDict
from uuid import UUID

import pytest
from pydantic import BaseModel
from tests.unit.receiving import Colour, Counted, coroutine_function

from effectonce import InDoubt, KeyReused, Policy, Receiver, current
from effectonce.errors import InvalidKey, ResultUnavailable, StoreClosed, UsageError
from effectonce.stores.base import Store
from effectonce.stores.memory import MemoryStore
from effectonce.testing.clocks import ManualClock


@pytest.fixture
def memory(clock: ManualClock) -> Receiver:
    """A receiver, where the store makes no difference."""
    return Receiver(MemoryStore(clock=clock), monotonic=clock)


class Effects(list[Any]):
    """What really happened."""


@pytest.fixture
def effects() -> Effects:
    return Effects()


# One run per key


def test_a_repeated_call_returns_the_first_result(
    receiver: Receiver, colour: Colour, effects: Effects
) -> None:
    """The function runs once per key; every repeat gets the same value."""

    def charge(order_id: str, cents: int) -> str:
        effects.append(order_id)
        return f"{order_id}:{cents}"

    charge = colour.idempotent(receiver, charge, key="order_id")
    assert [colour.call(charge, "o-1", 500) for _ in range(3)] == ["o-1:500"] * 3
    assert colour.call(charge, "o-2", 500) == "o-2:500"
    assert effects == ["o-1", "o-2"]


def test_an_outcome_says_what_happened(memory: Receiver, colour: Colour) -> None:
    """.outcome() is the same call, answered with how it went."""
    charge = colour.idempotent(memory, lambda order_id: order_id, key="order_id")
    first, second = (colour.call(charge.outcome, "o-1") for _ in range(2))
    assert (first.status, first.replayed, first.value) == ("executed", False, "o-1")
    assert (second.status, second.replayed, second.value) == ("replayed", True, "o-1")


def test_an_outcome_raises_nothing(memory: Receiver, colour: Colour) -> None:
    """A failure, a reused key and a missing store are statuses there; the call itself raises them."""
    fail = colour.idempotent(memory, Counted(ValueError("no")), key=lambda *_: "k", operation="fail")
    failed = colour.call(fail.outcome)
    assert (failed.status, str(failed.error)) == ("failed", "no")
    with pytest.raises(ValueError, match="no"):
        colour.call(fail)

    charge = colour.idempotent(memory, lambda order_id, cents: cents, key="order_id")
    colour.call(charge, "o-1", 500)
    reused = colour.call(charge.outcome, "o-1", 900)
    assert (reused.status, type(reused.error)) == ("mismatch", KeyReused)
    with pytest.raises(KeyReused):
        colour.call(charge, "o-1", 900)

    memory.close()
    gone = colour.call(charge.outcome, "o-1", 500)
    assert (gone.status, type(gone.error)) == ("store_error", StoreClosed)


def test_bare_decoration(memory: Receiver, effects: Effects) -> None:
    """@receiver.idempotent needs no parentheses."""

    @memory.idempotent
    def greet(name: str) -> str:
        effects.append(name)
        return f"Hello {name}"

    assert [greet("Ada"), greet("Ada")] == ["Hello Ada"] * 2
    assert effects == ["Ada"]


# Which calls are one call


def test_by_default_the_arguments_are_the_key(memory: Receiver) -> None:
    """However a call is written, with defaults filled in, it is the same call; other values are another."""

    @memory.idempotent
    def pay(order_id: int, cents: int = 100, *, currency: str = "EUR") -> None: ...

    written = [
        pay.key(1), pay.key(order_id=1), pay.key(1, 100), pay.key(cents=100, order_id=1), pay.key(1, currency="EUR")
    ]  # fmt: skip
    assert len(set(written)) == 1
    others = [
        pay.key(2),
        pay.key(1, 200),
        pay.key(1, currency="USD"),
        pay.key("1"),
        pay.key(1.0),
        pay.key(True),
    ]
    assert len({*written, *others}) == 1 + len(others)


def test_open_ended_arguments_are_part_of_the_key(memory: Receiver) -> None:
    """*args and **kwargs count: their order does for the first and does not for the second."""

    @memory.idempotent
    def pay(*orders: int, **options: int) -> None: ...

    assert pay.key(1, 2, a=1, b=2) == pay.key(1, 2, b=2, a=1)
    assert len({pay.key(1, 2), pay.key(2, 1), pay.key(1), pay.key(), pay.key(a=1), pay.key(b=1)}) == 6


KEYS: dict[str, tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = {
    "a parameter": ("order", ("o-1", 5), ("o-2", 5)),
    "a number": ("order", (1, 5), (2, 5)),
    "a dotted path into a mapping": ("order.id", ({"id": "o-1"}, 5), ({"id": "o-2"}, 5)),
    "a dotted path into an object": ("order.year", (date(2024, 1, 2), 5), (date(2025, 1, 2), 5)),
    "several parameters": (("order", "cents"), ("o-1", 5), ("o-1", 6)),
    "a path among several": (("order.id", "cents"), ({"id": 1}, 5), ({"id": 2}, 5)),
    "a function": (lambda order, cents: order.upper(), ("o-1", 5), ("o-2", 5)),
    "a structured value": ("order", ({"a": 1, "b": 2}, 5), ({"a": 1, "b": 3}, 5)),
    "a date": ("order", (date(2024, 1, 2), 5), (date(2024, 1, 3), 5)),
}


@pytest.mark.parametrize("how", KEYS)
def test_ways_to_name_the_key(memory: Receiver, how: str) -> None:
    """A key is a parameter, a path into one, several of them, or a function of the arguments."""
    key, one, another = KEYS[how]
    handler = Counted("ran")

    @memory.idempotent(key=key)
    def pay(order: Any, cents: int) -> str:
        return handler()

    assert pay(*one) == pay(*one) == "ran"
    assert handler.runs == 1
    assert pay.key(*one) != pay.key(*another)


def test_parts_of_a_key_do_not_run_together(memory: Receiver) -> None:
    """("a:b", "c") and ("a", "b:c") are different keys."""

    @memory.idempotent(key=("first", "second"))
    def pay(first: str, second: str) -> None: ...

    assert pay.key("a:b", "c") != pay.key("a", "b:c")


def test_what_the_key_does_not_name_has_to_be_the_same(memory: Receiver) -> None:
    """The other arguments are what is asked: another amount under the same order is a reused key."""

    @memory.idempotent(key="order_id")
    def pay(order_id: str, cents: int) -> int:
        return cents

    pay("o-1", 500)
    with pytest.raises(KeyReused):
        pay("o-1", 900)


@pytest.mark.parametrize("choices", [{"key": "order_id"}, {}], ids=["with a key", "by all arguments"])
def test_tools_may_be_ignored(memory: Receiver, choices: dict[str, Any]) -> None:
    """A session or a client is no content: it is left out of the key and of what is compared."""

    @memory.idempotent(ignore=("session",), **choices)
    def pay(order_id: str, session: object) -> str:
        return order_id

    assert pay("o-1", object()) == pay("o-1", object()) == "o-1"
    assert pay.key("o-1", object()) == pay.key("o-1", object())


def test_an_argument_without_a_stored_form_says_what_to_do(memory: Receiver) -> None:
    """An object that has no content is refused before anything is claimed, with the way out."""

    @memory.idempotent
    def pay(order_id: str, session: object) -> None: ...

    with pytest.raises(UsageError, match=r"ignore="):
        pay("o-1", object())


@pytest.mark.parametrize("value", [None, "", "  ", "a\nb", "x" * 256], ids=repr)
def test_a_key_that_names_nothing_is_refused(memory: Receiver, colour: Colour, value: Any) -> None:
    """No key, an empty one, or one that can't be stored: the call is refused, and nothing runs."""
    handler = Counted()

    def pay(order_id: Any) -> Any:
        return handler()

    with pytest.raises(InvalidKey):
        colour.call(colour.idempotent(memory, pay, key="order_id"), value)
    assert handler.runs == 0


def test_a_scope_may_depend_on_the_call(memory: Receiver) -> None:
    """Two tenants with the same order each have their own effect."""

    @memory.idempotent(key="order_id", scope=lambda tenant, order_id: tenant)
    def pay(tenant: str, order_id: str) -> str:
        return tenant

    assert [pay("a", "o-1"), pay("b", "o-1")] == ["a", "b"]


def test_a_scope_is_no_parameters_name(memory: Receiver) -> None:
    """A key names a parameter, a scope does not: whoever thinks so would let all tenants share."""
    with pytest.raises(UsageError, match="scope=lambda tenant, order_id: tenant"):

        @memory.idempotent(key="order_id", scope="tenant")
        def ship(tenant: str, order_id: str) -> None: ...


def test_the_advice_about_a_scope_can_be_followed(memory: Receiver) -> None:
    """It has the defaults that the function has, or calls that rely on them would fail."""
    with pytest.raises(UsageError, match=r"scope=lambda order_id, tenant='main': tenant\."):

        @memory.idempotent(key="order_id", scope="tenant")
        def ship(order_id: str, tenant: str = "main") -> None: ...


def test_a_parameter_may_be_called_like_an_object_of_a_call(memory: Receiver) -> None:
    """Only where it stands first is ``self`` or ``cls`` no part of what is asked."""

    @memory.idempotent(key="booking")
    def book(booking: str, cls: str) -> str:
        return cls

    assert book("b-1", "economy") == "economy"
    with pytest.raises(KeyReused):
        book("b-1", "business")


def test_an_abstract_method_stays_abstract(memory: Receiver) -> None:
    """The class can't be made without the method, whichever decorator is above the other."""

    class Dutiful(ABC):
        @memory.idempotent(key="order_id")
        @abstractmethod
        def pay(self, order_id: str) -> None: ...

        @memory.idempotent(key="order_id")
        @classmethod
        @abstractmethod
        def refund(cls, order_id: str) -> None: ...

    assert Dutiful.__abstractmethods__ == {"pay", "refund"}


def test_a_receivers_scope_may_be_called_like_a_parameter(memory: Receiver) -> None:
    """The receiver's own scope can't have been meant as a parameter."""
    receiver = Receiver(memory.store, scope="orders")

    @receiver.idempotent
    def ship(orders: list[str]) -> None: ...

    assert ship.key(["o-1"]).startswith("orders|")


@pytest.mark.parametrize("scope", ["", None, 0])
def test_a_scope_that_is_empty_is_refused(memory: Receiver, scope: Any) -> None:
    """A function that finds no tenant must not put its caller among everybody's keys."""

    @memory.idempotent(key="order_id", scope=lambda order_id: scope)
    def pay(order_id: str) -> None:
        raise AssertionError("it ran")

    with pytest.raises(InvalidKey, match="scope"):
        pay("o-1")


def test_a_version_is_another_meaning(memory: Receiver) -> None:
    """A function whose meaning changed does not replay old results."""

    def pay(order_id: str) -> str:
        return "ran"

    old, new = (memory.idempotent(key="order_id", version=number)(pay) for number in (1, 2))
    assert old.key("o-1") != new.key("o-1")


def test_an_operation_is_named_by_its_place(memory: Receiver) -> None:
    """By default the module and the qualified name, so that a name used in two places is two operations."""

    class Shop:
        @staticmethod
        @memory.idempotent(key="order_id")
        def pay(order_id: str) -> None: ...

    class Kiosk:
        @staticmethod
        @memory.idempotent(key="order_id")
        def pay(order_id: str) -> None: ...

    assert __name__ in Shop.pay.key("o-1")
    assert "Shop.pay" in Shop.pay.key("o-1")
    assert Shop.pay.key("o-1") != Kiosk.pay.key("o-1")


def test_an_operation_may_be_named(memory: Receiver) -> None:
    """A function that moves keeps its keys when it has a name of its own."""

    @memory.idempotent(key="order_id", operation="payments.charge")
    def pay(order_id: str) -> None: ...

    assert pay.key("o-1") == "|payments.charge||o-1"


def test_two_functions_of_one_name_are_refused(memory: Receiver) -> None:
    """They would share keys, so the second has to be given another operation."""

    @memory.idempotent(key="order_id")
    def pay(order_id: str) -> str:
        return "first"

    def redefine() -> Any:
        def pay(order_id: str) -> str:
            return "second"

        pay.__qualname__ = first.__qualname__
        return pay

    first = pay
    with pytest.raises(UsageError, match="operation="):
        memory.idempotent(key="order_id")(redefine())
    assert memory.idempotent(key="order_id", operation="other")(redefine())("o-1") == "second"


def test_two_lambdas_never_share_keys(memory: Receiver) -> None:
    """Not even on one line: the second is refused, or has keys of its own."""
    add, times = lambda n: n + 10, lambda n: n * 10
    memory.idempotent(add)(1)
    with pytest.raises(UsageError, match="operation="):
        memory.idempotent(times)


def test_decorating_a_function_twice_is_one_function(memory: Receiver, effects: Effects) -> None:
    """The same function, decorated again (a module that is imported twice), has the same keys."""

    def pay(order_id: str) -> None:
        effects.append(order_id)

    memory.idempotent(pay)("o-1")
    memory.idempotent(pay)("o-1")
    assert effects == ["o-1"]


@pytest.mark.parametrize("choices", [{"key": "nobody"}, {"key": "nobody.id"}, {"key": ("n", "nobody")},
                                     {"ignore": ("nobody",)}], ids=repr)  # fmt: skip
def test_an_unknown_parameter_is_refused_at_once(memory: Receiver, choices: dict[str, Any]) -> None:
    """A misspelt name shows when the function is decorated, and the error lists the real ones."""
    with pytest.raises(UsageError, match="no parameter 'nobody'; it has n"):
        memory.idempotent(**choices)(lambda n: n)


# Arguments


@dataclass
class Call:
    """How a function is called wrongly."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


WRONG = {
    "too few": Call(),
    "too many": Call((1, 2, 3)),
    "unknown name": Call((1,), {"nobody": 2}),
    "twice": Call((1,), {"n": 2}),
    "a keyword-only one by position": Call((1, 2)),
}


@pytest.mark.parametrize("how", WRONG)
def test_wrong_arguments_are_a_type_error(memory: Receiver, colour: Colour, how: str) -> None:
    """As the function itself would say, before anything is claimed."""

    def pay(n: int, *, fast: bool = False) -> None: ...

    told: list[Any] = []
    memory.events.hooks = (told.append,)
    pay = colour.idempotent(memory, pay, key="n")
    with pytest.raises(TypeError):
        colour.call(pay, *WRONG[how].args, **WRONG[how].kwargs)
    assert told == []


def test_arguments_arrive_as_they_were_given(memory: Receiver, colour: Colour) -> None:
    """The function gets the very objects, by position and by name."""
    given = {"a": [1]}
    seen = []

    def pay(order: Any, *rest: Any, flag: bool = False, **more: Any) -> None:
        seen.append((order, rest, flag, more))

    colour.call(colour.idempotent(memory, pay), given, 1, 2, flag=True, z=3)
    assert seen == [(given, (1, 2), True, {"z": 3})]
    assert seen[0][0] is given


# Methods


class Till:
    """A class with decorated methods of all kinds."""

    def __init__(self, number: int) -> None:
        self.number = number


def tills(receiver: Receiver, colour: Colour) -> type[Any]:
    """The class, in a colour."""

    def take(self: Any, order_id: str) -> tuple[int, str]:
        """Take the money."""
        return self.number, order_id

    def found(cls: type, order_id: str) -> tuple[str, str]:
        return cls.__name__, order_id

    def check(order_id: str) -> str:
        return order_id

    methods = {
        "take": colour.idempotent(receiver, take, key="order_id"),
        "found": classmethod(colour.idempotent(receiver, found, key="order_id")),
        "check": staticmethod(colour.idempotent(receiver, check, key="order_id")),
    }
    return type("DecoratedTill", (Till,), methods)


def test_methods_are_functions_of_their_object(memory: Receiver, colour: Colour) -> None:
    """A method sees its object, and the object is no part of the key: the effect is the order's."""
    till = tills(memory, colour)
    assert colour.call(till(1).take, "o-1") == (1, "o-1")
    assert colour.call(till(2).take, "o-1") == (1, "o-1")
    assert colour.call(till(2).take, order_id="o-2") == (2, "o-2")


@pytest.mark.parametrize("name", ["take", "check"])
def test_methods_have_outcomes_and_keys(memory: Receiver, colour: Colour, name: str) -> None:
    """.outcome() and .key() of a method need no object either, for static methods too."""
    method = getattr(tills(memory, colour)(1), name)
    first = colour.call(method, "o-1")
    assert colour.call(method.outcome, "o-1").value == first
    assert method.key("o-1").endswith("|o-1")


def test_class_methods_are_decorated_from_above(memory: Receiver) -> None:
    """Above @classmethod the decorator knows the class, also for .outcome() and .key()."""

    class Office:
        @memory.idempotent(key="order_id")
        @classmethod
        def found(cls, order_id: str) -> tuple[str, str]:
            return cls.__name__, order_id

        @memory.idempotent(key="order_id")
        @staticmethod
        def check(order_id: str) -> str:
            return order_id

    for method in (Office.found, Office().found):
        assert method("o-1") == method.outcome("o-1").value == ("Office", "o-1")
        assert method.key("o-1").endswith("|o-1")
    assert Office.check("o-1") == Office().check("o-1") == "o-1"


def test_a_class_method_never_takes_an_argument_for_its_class(memory: Receiver, colour: Colour) -> None:
    """Below @classmethod, .outcome() may not know the class; it says so rather than shift arguments by one."""
    outcome = tills(memory, colour).found.outcome
    try:
        assert colour.call(outcome, "o-1").value == ("DecoratedTill", "o-1")
    except UsageError as error:
        assert "above @classmethod" in str(error)


def test_class_methods_are_called_on_the_class(memory: Receiver, colour: Colour) -> None:
    """A classmethod and a staticmethod work on the class as on an object."""
    till = tills(memory, colour)
    assert colour.call(till.found, "o-1") == ("DecoratedTill", "o-1")
    assert colour.call(till.check, "o-1") == colour.call(till(1).check, "o-1") == "o-1"


def test_a_method_taken_from_its_class(memory: Receiver, colour: Colour) -> None:
    """Class.method(object, …) is the same call."""
    till = tills(memory, colour)
    assert colour.call(till.take, till(1), "o-1") == colour.call(till(2).take, "o-1")


def test_a_bound_method_shows_itself(memory: Receiver, colour: Colour) -> None:
    """Looked up on an object it has its name and its documentation, and its signature lacks self."""
    method = tills(memory, colour)(1).take
    assert (method.__name__, method.__doc__) == ("take", "Take the money.")
    assert list(inspect.signature(method).parameters) == ["order_id"]


def test_a_bound_coroutine_method_is_known_as_one(memory: Receiver) -> None:
    """Frameworks ask before they call; blocking calls do so, too."""

    class Office:
        @memory.idempotent(key="order_id")
        async def take(self, order_id: str) -> None: ...

    assert is_coroutine_function(Office().take)


# Nesting


def test_decorated_functions_may_call_each_other(
    receiver: Receiver, colour: Colour, effects: Effects
) -> None:
    """Each has its own key and its own attempt, on one store; after the inner one the outer's is current again."""

    def reserve(order_id: str) -> str:
        effects.append(("reserve", current().key))
        return "reserved"

    inner = receiver.idempotent(key="order_id")(reserve)

    def order(order_id: str) -> str:
        before = current().key
        result = inner(order_id)
        assert current().key == before
        effects.append(("order", before))
        return result

    outer = colour.idempotent(receiver, order, key="order_id")
    assert [colour.call(outer, "o-1") for _ in range(2)] == ["reserved"] * 2
    assert [name for name, _ in effects] == ["reserve", "order"]
    assert len({key for _, key in effects}) == 2


def test_an_inner_result_survives_the_outer_failure(receiver: Receiver, effects: Effects) -> None:
    """The retry of the outer function runs it again, but not the inner one that had finished."""

    @receiver.idempotent(key="order_id")
    def reserve(order_id: str) -> None:
        effects.append("reserve")

    @receiver.idempotent(key="order_id")
    def order(order_id: str) -> None:
        reserve(order_id)
        effects.append("order")
        if effects.count("order") == 1:
            raise ValueError("try again")

    with pytest.raises(ValueError):
        order("o-1")
    order("o-1")
    assert effects == ["reserve", "order", "order"]


def test_one_receiver_around_another(memory: Receiver, clock: ManualClock, effects: Effects) -> None:
    """A function may be decorated by two receivers: each keeps its own record."""
    other = Receiver(MemoryStore(clock=clock), monotonic=clock)

    @memory.idempotent(key="order_id", operation="outer")
    @other.idempotent(key="order_id", operation="inner")
    def pay(order_id: str) -> None:
        effects.append(order_id)

    pay("o-1")
    assert memory.get("|outer||o-1") is not None
    assert other.get("|inner||o-1") is not None


# What a repeat returns


class Size(Enum):
    """A plain enumeration."""

    SMALL = "s"


class Grade(IntEnum):
    """One whose members are numbers."""

    GOOD = 1


class Point(NamedTuple):
    """A named tuple."""

    x: int
    y: Decimal


class Form(TypedDict):
    """A dictionary with known keys."""

    name: str
    when: datetime


@dataclass(frozen=True)
class Receipt:
    """A dataclass with others inside."""

    number: UUID
    lines: tuple[Point, ...]
    size: Size
    paid: dict[str, Decimal] = field(default_factory=dict)


class Invoice(BaseModel):
    """A pydantic model."""

    number: int
    due: date
    receipt: Receipt | None = None


NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
RECEIPT = Receipt(UUID(int=7), (Point(1, Decimal("2.50")),), Size.SMALL, {"EUR": Decimal("1.10")})


def as_receipt() -> Receipt:
    return RECEIPT


def as_optional() -> Receipt | None:
    return RECEIPT


def as_list() -> list[Receipt]:
    return [RECEIPT]


def as_named_tuple() -> Point:
    return Point(1, Decimal("2.50"))


def as_typed_dict() -> Form:
    return {"name": "x", "when": NOON}


def as_enum() -> Size:
    return Size.SMALL


def as_int_enum() -> Grade:
    return Grade.GOOD


def as_model() -> Invoice:
    return Invoice(number=1, due=date(2024, 5, 1), receipt=RECEIPT)


def as_mixture() -> tuple[
    datetime, date, timedelta, Decimal, UUID, bytes, set[int], frozenset[str], tuple[int]
]:
    return (
        NOON,
        date(2024, 5, 1),
        timedelta(1, 2, 3),
        Decimal("1.10"),
        UUID(int=7),
        b"\0\xff",
        {1},
        frozenset("a"),
        (1,),
    )


def as_unannotated():  # type: ignore[no-untyped-def]
    return {"at": NOON, "parts": (1, b"x", {2})}


def of_one_type(one: Any, other: Any) -> bool:
    """Whether two values are equal and of the same types, all the way down."""
    if type(one) is not type(other) or one != other:
        return False
    if isinstance(one, Enum):
        return one is other
    if isinstance(one, dict):
        return all(of_one_type(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return all(map(of_one_type, one, other))
    return all(
        of_one_type(value, getattr(other, name)) for name, value in getattr(one, "__dict__", {}).items()
    )


RETURNING = [as_receipt, as_optional, as_list, as_named_tuple, as_typed_dict, as_enum, as_int_enum, as_model,
             as_mixture, as_unannotated]  # fmt: skip


@pytest.mark.parametrize("function", RETURNING, ids=lambda function: function.__name__)
def test_a_repeat_has_the_same_type(receiver: Receiver, colour: Colour, function: Callable[[], Any]) -> None:
    """A replay returns an equal value of the same type, by the return annotation, in both colours."""
    decorated = colour.idempotent(receiver, function)
    first, second = (colour.call(decorated) for _ in range(2))
    assert colour.call(decorated.outcome).replayed
    assert of_one_type(first, second)


@pytest.mark.parametrize("value", [0, False, "", [], {}, None], ids=repr)
def test_a_falsy_result_is_returned_again(memory: Receiver, colour: Colour, value: Any) -> None:
    """Nothing about a result's truth matters."""
    handler = Counted(value)

    def pay() -> Any:
        return handler()

    decorated = colour.idempotent(memory, pay)
    assert [colour.call(decorated) for _ in range(2)] == [value, value]
    assert handler.runs == 1


def test_a_result_without_a_stored_form_never_runs_again(memory: Receiver, colour: Colour) -> None:
    """The first call returns it, a repeat says that it was done."""
    handler = Counted(object())

    def pay() -> object:
        return handler()

    decorated = colour.idempotent(memory, pay)
    assert colour.call(decorated) is handler.result
    with pytest.raises(ResultUnavailable):
        colour.call(decorated)
    assert handler.runs == 1


def test_a_policy_of_its_own(memory: Receiver, colour: Colour) -> None:
    """A function's policy goes before the receiver's."""

    def pay() -> None:
        raise TimeoutError

    decorated = colour.idempotent(memory, pay, policy=Policy(in_doubt=TimeoutError))
    with pytest.raises(TimeoutError):
        colour.call(decorated)
    with pytest.raises(InDoubt):
        colour.call(decorated)


# What stays as it was


def is_coroutine_function(function: Any) -> bool:
    if sys.version_info >= (3, 12):
        return inspect.iscoroutinefunction(function)
    return asyncio.iscoroutinefunction(function)


def test_a_decorated_function_looks_like_itself(memory: Receiver, colour: Colour) -> None:
    """Name, module, documentation, signature and the function itself can be asked for."""

    def pay(order_id: str, *, cents: int = 5) -> int:
        """Pay an order."""
        return cents

    decorated = colour.idempotent(memory, pay, key="order_id")
    assert decorated.__name__ == "pay"
    assert decorated.__qualname__ == pay.__qualname__
    assert decorated.__doc__ == "Pay an order."
    assert decorated.__module__ == __name__
    assert inspect.signature(decorated) == inspect.signature(pay)
    assert inspect.unwrap(decorated) is pay


def test_a_coroutine_function_stays_one(memory: Receiver) -> None:
    """Frameworks that ask whether to await get the right answer, in both colours, whomever they ask."""

    class Till:
        @memory.idempotent(key="cents")
        async def pay(self, cents: int, currency: str = "EUR", *, tip: int = 0) -> int:
            return cents + tip

    for ask in (inspect.iscoroutinefunction, is_coroutine_function):
        assert ask(memory.idempotent(coroutine_function(as_enum)))
        assert ask(Till().pay)
        assert not ask(memory.idempotent(operation="blocking")(as_enum))
    assert list(inspect.signature(Till().pay).parameters) == ["cents", "currency", "tip"]
    assert asyncio.run(Till().pay(5, tip=1)) == 6


def test_a_function_made_anew_with_other_things_bound_is_refused(memory: Receiver) -> None:
    """Two tenants' closures of one function would share keys, and each other's results."""

    def charge_for(tenant: str) -> Any:
        @memory.idempotent(key="order_id")
        def charge(order_id: str) -> str:
            return tenant + order_id

        return charge

    assert charge_for("acme")("1") == "acme1"
    with pytest.raises(UsageError, match="operation="):
        charge_for("globex")


def test_generators_are_refused(memory: Receiver) -> None:
    """What they yield can't be replayed; the error says what to write instead."""

    def numbers() -> Any:
        yield 1

    async def later() -> Any:
        yield 1

    for function in (numbers, later):
        with pytest.raises(UsageError, match="generator"):
            memory.idempotent(function)


def test_any_callable_may_be_decorated(memory: Receiver, colour: Colour) -> None:
    """An object with __call__ and a partial function work when they are given an operation."""
    import functools

    def pay(cents: int, order_id: str) -> tuple[str, int]:
        return order_id, cents

    half = functools.partial(pay, 5)
    decorated = memory.idempotent(operation="half", key="order_id")(half)
    assert decorated("o-1") == decorated(order_id="o-1") == ("o-1", 5)


def test_a_coroutine_function_may_be_an_object(memory: Receiver) -> None:
    """An object whose __call__ is a coroutine function is awaited, like a partial coroutine function."""

    class Pay:
        async def __call__(self, order_id: str) -> str:
            return f"{order_id} is paid"

    decorated: Any = memory.idempotent(operation="pay", key="order_id")(Pay())

    async def twice() -> list[str]:
        return [await decorated("o-1"), await decorated("o-1")]

    assert is_coroutine_function(decorated)
    assert asyncio.run(twice()) == ["o-1 is paid"] * 2


def test_a_callable_without_a_name_needs_an_operation(memory: Receiver) -> None:
    """An error of the tree says so when it is decorated."""
    import functools

    with pytest.raises(UsageError, match="operation="):
        memory.idempotent(functools.partial(print, 1))


def test_functions_share_a_file_between_receivers(store: Store) -> None:
    """A second process that decorates the same function gets the first one's results."""
    handler = Counted("one")

    def pay(order_id: str) -> str:
        return handler()

    for _ in range(2):
        assert Receiver(store).idempotent(key="order_id")(pay)("o-1") == "one"
    assert handler.runs == 1


def test_what_the_key_names_is_not_asked_twice() -> None:
    """An order is one order however its number is written; what the key does not name is what is asked under it."""
    receiver = Receiver("memory://")

    @receiver.idempotent(key="order")
    def cancel(order: object) -> str:
        return f"cancelled {order}"

    @receiver.idempotent(key=("shop", "order"))
    def pay(shop: str, order: object, cents: int) -> int:
        return cents

    assert cancel(7) == cancel("7") == "cancelled 7"
    record = receiver.get(cancel.key(7))
    assert record is not None and record.fingerprint == b""
    assert pay("s", 7, 500) == pay("s", "7", 500) == 500
    with pytest.raises(KeyReused):
        pay("s", 7, 900)


def test_a_key_needs_its_word(memory: Receiver) -> None:
    """What stands where the function should be says how it was meant."""
    with pytest.raises(UsageError, match=r"idempotent\(key='order_id'\)"):
        memory.idempotent("order_id")  # type: ignore[call-overload]


HERE = Receiver("memory://")


@HERE.idempotent(key="order_id")
def ship(order_id: str) -> str:
    return f"shipped {order_id}"


@HERE.idempotent(key="order_id")
async def ship_later(order_id: str) -> str:
    return f"shipped {order_id}"


@dataclass
class Dock:
    """Something that has decorated methods."""

    name: str

    @HERE.idempotent(key="order_id")
    def load(self, order_id: str) -> str:
        return f"{order_id} at {self.name}"

    @HERE.idempotent(key="order_id")
    @classmethod
    def count(cls, order_id: str) -> str:
        return f"{order_id} in {cls.__name__}"


def test_a_decorated_function_may_be_sent_to_a_pool_of_processes() -> None:
    """It is pickled by its name, as any function is; a method together with its object."""
    for function in (ship, ship_later):
        assert pickle.loads(pickle.dumps(function)) is copy.deepcopy(function) is function
    assert pickle.loads(pickle.dumps(Dock("east").load))("o-1") == "o-1 at east"
    assert pickle.loads(pickle.dumps(Dock.count))("o-2") == "o-2 in Dock"
    local = HERE.idempotent(key="order_id", operation="local")(lambda order_id: order_id)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(local)
