"""What a replay gives back, and what ids are made of."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, Flag, IntEnum, StrEnum
from functools import cached_property
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    Optional,
    Self,
    TypedDict,
    TypeVar,
    Union,
)
from unittest import mock
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effectonce import codec
from effectonce._records import ATOMIC
from effectonce.codec import (
    Unencodable,
    _hints,
    _json,
    canonical,
    canonical_json,
    decode,
    decode_error,
    encode,
    encode_error,
)
from effectonce.codec._json import Writer, read_json
from effectonce.errors import InvalidKey, MissingExtra, RememberedError, ResultUnavailable, UsageError

if TYPE_CHECKING:
    from nowhere import Imaginary

T = TypeVar("T")


# -- Values -----------------------------------------------------------------------------------------------------

text = st.text(st.characters(), max_size=8) | st.sampled_from(["$", "as", "dict", "\ud800", "\ud83d\ude00"])
zones = st.sampled_from(
    [None, UTC, timezone(timedelta(hours=-3, seconds=7)), ZoneInfo("Europe/Berlin"), ZoneInfo("UTC")]
)
plain = st.none() | st.booleans() | st.integers() | st.floats() | text
hashable = (
    plain
    | st.binary(max_size=8)
    | st.integers(min_value=10**599, max_value=10**605)
    | st.decimals(allow_nan=False)
    | st.uuids()
    | st.dates()
    | st.times(timezones=zones)
    | st.datetimes(timezones=zones, allow_imaginary=True)
    | st.timedeltas()
    | st.complex_numbers()
)
values = st.recursive(
    hashable | st.binary(max_size=8).map(bytearray) | st.sets(hashable, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.frozensets(hashable, max_size=3)
        | st.dictionaries(text, inner, max_size=4)
        | st.dictionaries(hashable | st.tuples(hashable), inner, max_size=3)
    ),
    max_leaves=12,
)


def shape(value: Any) -> Any:
    """A value with its types, such that two shapes are equal only if nothing at all differs."""
    kind = type(value)
    if kind is dict:
        return kind, [(shape(key), shape(item)) for key, item in value.items()]
    if kind in (list, tuple):
        return kind, [shape(item) for item in value]
    if kind in (set, frozenset):
        return kind, sorted(repr(shape(item)) for item in value)
    if kind in (datetime, time):
        return kind, value.isoformat(), value.fold, type(value.tzinfo), str(value.tzinfo)
    return kind, repr(value)


@given(values)
def test_any_data_comes_back_with_value_and_type(value: Any) -> None:
    """Everything that describes itself survives, alone or nested, without a hint."""
    assert shape(decode(encode(value))) == shape(value)


@pytest.mark.parametrize(
    "value", [None, False, 0, 0.0, -0.0, "", [], {}, (), set(), b"", -math.inf, math.nan, Decimal("sNaN1")]
)
def test_falsy_and_extreme_values_are_themselves(value: object) -> None:
    """Nothing that looks empty is mistaken for nothing."""
    assert shape(decode(encode(value))) == shape(value)


def test_plain_data_is_plain_json() -> None:
    """Other tools can read what needs no tag."""
    assert json.loads(encode({"a": [1, 2.5, None, True, "ü"]})) == {"a": [1, 2.5, None, True, "ü"]}


@pytest.mark.parametrize(
    "value", [{"$": 1}, {"$": ["bytes", "AA=="]}, {"$": 1, "b": 2}, {1: "a", "1": "b"}, {None: 0}]
)
def test_a_dict_that_looks_like_a_tag_stays_a_dict(value: object) -> None:
    """A user's own "$" member is no way to smuggle in a tag, and keys keep their type."""
    assert shape(decode(encode(value))) == shape(value)


def test_integers_beyond_the_interpreters_limit_survive() -> None:
    """Python refuses to print or parse very long integers; a result may have one."""
    value = {"n": 7**9000, "m": -(7**9000)}
    assert decode(encode(value)) == value


def test_times_keep_zone_fold_and_offset() -> None:
    """The hour that comes twice in autumn is still the same one of the two."""
    late = datetime(2025, 10, 26, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1)
    back = decode(encode(late))
    assert (back.tzinfo, back.fold, back.utcoffset()) == (late.tzinfo, 1, timedelta(hours=1))


def test_a_zone_that_is_unknown_here_leaves_the_offset() -> None:
    """Reading on a machine without zone data keeps the instant."""
    data = encode(datetime(2025, 7, 1, tzinfo=ZoneInfo("Europe/Berlin"))).replace(
        b"Europe/Berlin", b"Mars/Olympus"
    )
    assert decode(data) == datetime(2025, 7, 1, tzinfo=timezone(timedelta(hours=2)))


def test_a_zone_of_no_fixed_offset_and_no_name_is_refused() -> None:
    """A time of day in a home-made zone has nothing to be rebuilt from."""

    class Local(tzinfo):
        def utcoffset(self, when: datetime | None) -> timedelta | None:
            return None

    with pytest.raises(Unencodable, match="neither an IANA name nor a fixed offset"):
        encode(time(12, tzinfo=Local()))


def test_an_interpreter_without_the_c_accelerator_writes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored results and ids don't depend on which interpreter made them."""
    tree = {"b": [1, -2.5, None, True, 10**30], "a": "ü\n\u2028\ud800", "c": {}}
    fast = [Writer(canonical).write(tree) for canonical in (False, True)]
    monkeypatch.setattr(json.encoder, "c_make_encoder", None)
    assert [Writer(canonical).write(tree) for canonical in (False, True)] == fast


def test_what_is_rarely_stored_is_loaded_when_it_is() -> None:
    """The modules of rare values would cost every program its start-up time."""
    script = "import sys, effectonce.codec; sys.exit('decimal' in sys.modules or 'zoneinfo' in sys.modules)"
    source = Path(codec.__file__).parents[2]
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env={"PYTHONPATH": str(source)})


def test_the_package_exports_exactly_this() -> None:
    """What isn't here is free to change."""
    public = {name for name in vars(codec) if not name.startswith("_")} - {"annotations"}
    assert sorted(public) == sorted(codec.__all__) == codec.__all__


# -- Classes by hint --------------------------------------------------------------------------------------------


class Colour(Enum):
    RED = "red"
    PAIR = (1, 2)


class Level(IntEnum):
    LOW = 1


class Word(StrEnum):
    YES = "yes"


class Bits(Flag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: int
    colour: Colour = Colour.RED


Bare = namedtuple("Bare", "a b")  # noqa: PYI024


@dataclass
class Line:
    sku: str
    price: Decimal
    colours: list[Colour] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    id: UUID
    when: datetime
    lines: tuple[Line, ...] = ()
    parent: Receipt | None = None
    by_point: dict[Point, Line] = field(default_factory=dict)
    checked: bool = field(default=False, init=False)


@dataclass
class Page(Generic[T]):
    items: list[T]
    first: T | None = None


@dataclass
class Careful:
    seed: InitVar[int]
    total: int = field(init=False)
    runs = 0

    def __post_init__(self, seed: int) -> None:
        type(self).runs += 1
        self.total = seed * 2
        self.note = f"from {seed}"

    @cached_property
    def lazily(self) -> object:
        return object()


@dataclass
class Partly:
    line: Line
    other: Imaginary | None = None


class Order(TypedDict):
    line: Line
    colour: NotRequired[Colour]


class Name(str):
    __slots__ = ()


class Amount(int):
    pass


class Lines(list[Line]):
    pass


class Index(dict[str, Line]):
    pass


OrderId = NewType("OrderId", Name)
line = Line("a", Decimal("1.10"), [Colour.RED])
receipt = Receipt(
    id=UUID(int=7), when=datetime(2025, 1, 1, tzinfo=UTC), lines=(line,), by_point={Point(1): line}
)

HINTED = [
    (Colour.RED, Colour),
    (Colour.PAIR, Colour),
    (Level.LOW, Level),
    (Word.YES, Word | None),
    (Bits.A | Bits.B, Bits),
    (Colour.RED, Literal[Colour.RED, 5]),
    (Point(1, Colour.PAIR), Point),
    (Bare(1, (2,)), Bare),
    (line, Line),
    (receipt, Receipt),
    (Receipt(id=UUID(int=1), when=datetime(2025, 1, 1), parent=receipt), Receipt),  # noqa: DTZ001
    ([line, None], list[Optional[Line]]),  # noqa: UP045
    ((line, Colour.RED), tuple[Line, Colour]),
    ((line, line), tuple[Line, ...]),
    ({Colour.RED}, set[Colour]),
    (frozenset({Point(1)}), frozenset[Point]),
    ({"a": [line]}, dict[str, list[Line]]),
    ({Colour.RED: line}, Mapping[Colour, Line]),
    ([line], Sequence[Line]),
    ([Colour.RED, line], Iterable[Union[Line, Colour]]),  # noqa: UP007
    (line, Annotated[Line, "a note"]),
    ({"line": line, "colour": Colour.RED}, Order),
    (Page([line], line), Page[Line]),
    (Page([Colour.RED]), Page[Colour] | Line),
    (Partly(line), Partly),
    (Name("ann"), OrderId),
    (Amount(5), Amount),
    (Lines([line]), Lines),
    (Index(a=line), Index),
    ([line, Colour.RED], list[Line] | list[Colour]),
]


@pytest.mark.parametrize(("value", "hint"), HINTED, ids=lambda part: str(part)[:30])
def test_a_hinted_class_comes_back_as_itself(value: Any, hint: Any) -> None:
    """Wherever the hint leads to the class, the replayed value is equal and of the same types."""
    back = decode(encode(value, hint), hint)
    assert (back, type(back), repr(back)) == (value, type(value), repr(value))


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (Colour.RED, Any),
        (Word.YES, str),
        (Level.LOW, int),
        (Name("x"), str),
        (Amount(1), Any),
        (Lines(), list),
        (Point(1), tuple),
        (line, Receipt),
        (OrderedDict(a=1), OrderedDict),
        (defaultdict(list), Any),
        (object(), object),
        (len, Any),
        (range(3), Any),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_nothing_silently_becomes_another_type(value: Any, hint: Any) -> None:
    """Without a hint that leads to the exact class there is no result, rather than a wrong one."""
    with pytest.raises(Unencodable):
        encode(value, hint)


def test_a_subclass_of_the_hinted_class_is_refused() -> None:
    """Replaying it as its base class would lose what it added."""

    class Special(Line):
        pass

    with pytest.raises(Unencodable, match="exactly this class"):
        encode(Special("a", Decimal(1)), Line)


def test_attributes_on_a_subclass_of_str_are_not_dropped() -> None:
    """What can't be kept is refused."""

    class Tagged(str):
        pass

    value = Tagged("a")
    value.extra = 1
    with pytest.raises(Unencodable, match="attributes of its own"):
        encode(value, Tagged)


def test_a_dataclass_is_rebuilt_without_running_its_code() -> None:
    """Neither __init__ nor __post_init__ runs again, and what they left behind is there; caches are not."""
    value = Careful(21)
    assert value.lazily
    runs = Careful.runs
    back = decode(encode(value, Careful), Careful)
    assert (back.total, back.note, "lazily" in vars(back), Careful.runs) == (42, "from 21", False, runs)


def test_a_field_added_since_takes_its_default() -> None:
    """A result stored by yesterday's class can still be read if the new fields have defaults."""
    assert decode(b'{"$":["as","Line",{"sku":"a","price":1}]}', Line) == Line("a", 1, [])


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        (b'{"$":["as","Line",{"sku":"a"}]}', Line),
        (b'{"$":["as","Line",{"sku":"a"}]}', Colour),
        (b'{"$":["as","Colour",{"value":"blue"}]}', Colour),
        (b'{"$":["as","os:system",{"value":"true"}]}', Any),
        (b'{"$":["unheard-of",1]}', Any),
        (b'{"$":5}', Any),
        (b'{"a":1}]', Any),
        (b"", Any),
        (b"\xff", Any),
        (b"[" * 100_000, Any),
    ],
)
def test_data_that_no_longer_fits_is_an_error_of_the_tree(data: bytes, hint: Any) -> None:
    """A changed type or damaged data is told, never guessed around, and no class comes from the data."""
    with pytest.raises(ResultUnavailable, match="new version"):
        decode(data, hint)


def same_named(module: str) -> Any:
    @dataclass
    class Same:
        value: int = 0

    Same.__module__ = module
    return Same


def test_two_classes_of_one_name_in_a_union_are_told_apart() -> None:
    """Names in the data only choose among the hint's classes: by their modules, where these share a name."""
    one, two = same_named("shop.v1"), same_named("shop.v2")
    for cls in (one, two):
        assert type(decode(encode(cls(), one | two), one | two)) is cls


def test_the_order_of_a_union_means_nothing() -> None:
    """Python itself takes both orders for one hint, and gives back the one that it met first."""
    one, two = same_named("shop.v1"), same_named("shop.v2")
    stored = encode(one(), Union[one, two])  # noqa: UP007 - which keeps its order
    _hints._cached_plan.cache_clear()
    assert type(decode(stored, Union[two, one])) is one  # noqa: UP007


def test_classes_that_nothing_tells_apart_are_refused() -> None:
    """Else one would come back as the other."""
    one, two = same_named("shop"), same_named("shop")
    with pytest.raises(Unencodable, match="same name and module"):
        encode(two(), one | two)


@dataclass
class Boxed(Generic[T]):
    """A generic class."""

    content: T


def test_a_generic_class_may_stand_in_a_union_with_several_arguments() -> None:
    """What each of them allows is allowed."""
    hint = Boxed[Line] | Boxed[Colour]
    for content in (line, Colour.RED):
        assert decode(encode(Boxed(content), hint), hint) == Boxed(content)


@pytest.mark.parametrize("base", [Decimal, deque, OrderedDict, date, frozenset, complex])
def test_a_dataclass_that_is_also_a_value_is_no_data(base: Any) -> None:
    """Its content is not among its fields: two amounts would have one id, and come back empty."""

    @dataclass(init=False, eq=False)
    class Both(base):  # type: ignore[misc]
        """Without a docstring, dataclass would ask for a signature, which not all of these have on Python 3.11.2."""

        currency: str = "EUR"

    value = Both(2026, 1, 2) if base is date else Both()
    with pytest.raises(Unencodable):
        encode(value, Both)
    with pytest.raises(Unencodable):
        canonical(value)


class Amount:
    """A class that keeps its content in slots, as fractions and UUIDs do."""

    __slots__ = ("__hidden", "cents")

    def __init__(self, cents: int) -> None:
        self.cents, self.__hidden = cents, -cents

    def hidden(self) -> int:
        return self.__hidden


@dataclass(init=False, eq=False)
class Price(Amount):
    currency: str = "EUR"


def test_what_bases_keep_in_slots_counts_and_comes_back() -> None:
    """It is content as fields are."""
    assert canonical(Price(1)) != canonical(Price(2))
    back = decode(encode(Price(2), Price), Price)
    assert (type(back), back.cents, back.hidden(), back.currency) == (Price, 2, -2, "EUR")


class Slotted(str):
    __slots__ = ("extra",)


def test_slots_on_a_subclass_of_str_are_not_dropped() -> None:
    """What can't be kept is refused."""
    value = Slotted("a")
    assert decode(encode(value, Slotted), Slotted) == "a"
    value.extra = 1
    with pytest.raises(Unencodable, match="attributes of its own"):
        encode(value, Slotted)


class Odd(Enum):
    """Members that are not found by their values, or not by what they say of them."""

    NOTHING = math.nan
    LOUD = "loud"

    @property
    def value(self) -> str:
        return str(self._value_).upper()


def test_a_member_comes_back_by_its_value_or_is_refused() -> None:
    """A repeat gets the same one, whatever its class makes of its value for others."""
    assert decode(encode(Odd.LOUD, Odd), Odd) is Odd.LOUD
    with pytest.raises(Unencodable, match="another value"):
        encode(Odd.NOTHING, Odd)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the type statement is new in 3.12")
def test_type_aliases_are_followed() -> None:
    """The type statement, also recursive, leads to the classes behind it."""
    scope: dict[str, Any] = {"Line": Line}
    exec("type Tree = Line | list[Tree]\ntype Box[X] = dict[str, X]", scope)
    assert decode(encode([line, [line]], scope["Tree"]), scope["Tree"]) == [line, [line]]
    assert decode(encode({"a": line}, scope["Box"][Line]), scope["Box"][Line]) == {"a": line}


def test_unhashable_hints_are_tolerated() -> None:
    """Annotated may carry anything."""
    hint = Annotated[Line, ["unhashable"]]
    assert decode(encode(line, hint), hint) == line


@pytest.mark.parametrize(
    "hint",
    [
        "Line",
        None,
        5,
        T,
        Callable[..., Line],
        type[Line],
        Generic[T],
        Page,
        tuple[()],
        ...,
        [1],
        Awaitable[int],
    ],
)
def test_hints_that_say_nothing_do_no_harm(hint: Any) -> None:
    """Plain data needs no hint, and a class without one is refused in the usual way."""
    assert decode(encode({"a": (1, b"2")}, hint), hint) == {"a": (1, b"2")}
    with pytest.raises(Unencodable):
        encode({"a": line}, hint)


def test_pydantic_models_come_back_without_validation() -> None:
    """Fields, extra and private attributes and the set of given fields survive; validators don't run."""
    pydantic = pytest.importorskip("pydantic")
    runs = []

    class Model(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="allow", frozen=True)
        line: Line
        when: date | None = None
        _secret: int = pydantic.PrivateAttr(default=1)

        def model_post_init(self, context: object) -> None:
            super().model_post_init(context)
            runs.append(1)

    value = Model(line=line, more=3)
    value._secret = 9
    back = decode(encode(value, Model), Model)
    assert (back, type(back), back._secret, back.model_fields_set) == (value, Model, 9, {"line", "more"})
    assert len(runs) == 1
    assert canonical(value) != canonical(Model(line=line, more=4))


def test_pydantic_root_models_come_back() -> None:
    """A model that is one value, alone, in another model and with models in it."""
    pydantic = pytest.importorskip("pydantic")

    class Line(pydantic.BaseModel):
        cents: Decimal

    class Lines(pydantic.RootModel[list[Line]]): ...

    class Bill(pydantic.BaseModel):
        lines: Lines

    lines = Lines([Line(cents=Decimal("1.50"))])
    for value in (lines, Bill(lines=lines), pydantic.RootModel[dict[str, int]]({"a": 1})):
        back = decode(encode(value, type(value)), type(value))
        assert (back, type(back), back.model_fields_set) == (value, type(value), value.model_fields_set)
        assert back.model_dump() == value.model_dump()


def test_plain_nested_and_generic_pydantic_models_come_back() -> None:
    """Equal in everything, also where the model's own types lead deeper; what is computed doesn't count."""
    pydantic = pytest.importorskip("pydantic")

    class Inner(pydantic.BaseModel):
        at: datetime

        @cached_property
        def lazily(self) -> object:
            return object()

    class Outer(pydantic.BaseModel, Generic[T]):
        inner: list[T]

    inner = Inner(at=datetime(2025, 1, 1, tzinfo=UTC))
    before = canonical(inner)
    assert inner.lazily
    assert canonical(inner) == before
    hint = Outer[Inner]
    assert decode(encode(hint(inner=[inner]), hint), hint) == hint(inner=[Inner(at=inner.at)])


def test_msgspec_structs_come_back() -> None:
    """A struct is made again of its fields."""
    msgspec = pytest.importorskip("msgspec")
    struct = msgspec.defstruct("Struct", [("line", Line), ("n", int, 3)], frozen=True)
    assert decode(encode(struct(line), struct), struct) == struct(line)
    assert canonical(struct(line)) != canonical(struct(line, 4))


def test_what_a_struct_does_to_its_fields_is_not_done_again() -> None:
    """A struct of msgspec is made with __post_init__: fields come back as they were stored, also lists in them."""
    msgspec = pytest.importorskip("msgspec")

    def mark(self: Any) -> None:
        self.n += 1
        self.marks.append(self.n)

    struct = msgspec.defstruct(
        "Struct", [("n", int), ("marks", list[int])], namespace={"__post_init__": mark}
    )
    value = struct(1, [])
    back = decode(encode(value, struct), struct)
    assert (back.n, back.marks) == (value.n, value.marks) == (2, [2])


def test_a_struct_with_attributes_beside_its_fields_is_refused() -> None:
    """They would be missing from every replay."""
    msgspec = pytest.importorskip("msgspec")
    struct = msgspec.defstruct("Struct", [("n", int)], dict=True)
    value = struct(1)
    assert decode(encode(value, struct), struct) == value
    value.more = 2
    with pytest.raises(Unencodable, match="attributes of its own"):
        encode(value, struct)


# -- What can't be encoded --------------------------------------------------------------------------------------


def test_the_path_names_the_spot() -> None:
    """The one bad value in a large result can be found."""

    @dataclass
    class Bad:
        items: list[Any]

    with pytest.raises(Unencodable) as caught:
        encode(Bad([1, 2, {"when": {"odd key": [len]}}]), Bad)
    assert caught.value.path == "result.items[2].when['odd key'][0]"
    assert (caught.value.type, str(caught.value).startswith(caught.value.path)) == (type(len), True)


@pytest.mark.parametrize("write", [encode, canonical])
def test_what_contains_itself_is_refused(write: Any) -> None:
    """A loop ends in a clear error and not in a RecursionError."""
    loop: dict[str, Any] = {}
    loop["a"] = [loop]
    with pytest.raises(Unencodable, match="contains itself"):
        write(loop)


@pytest.mark.parametrize("write", [encode, canonical])
@pytest.mark.parametrize("leaf", [1, 1.5, "a", None])
@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: {"a": v}, lambda v: {1: v}, lambda v: (v,)])
def test_the_limit_of_depth_is_the_same_for_all_containers(write: Any, leaf: Any, wrap: Any) -> None:
    """Plain data takes a short way, but no other limit holds there."""
    value = leaf
    for _ in range(101):
        value = wrap(value)
    assert write(value)
    with pytest.raises(Unencodable, match="levels deep"):
        write(wrap(value))


@pytest.mark.parametrize("write", [encode, canonical])
def test_failing_user_code_is_told_as_unencodable(write: Any) -> None:
    """Encode raises nothing but Unencodable, so that a completion is never lost to a surprise."""

    @dataclass
    class Unset:
        never: int = field(init=False)

    with pytest.raises(Unencodable, match="never"):
        write(Unset(), Unset) if write is encode else write(Unset())


def test_unencodable_is_a_type_error_of_the_tree() -> None:
    """It can be caught as what it is in Python and as what it is here."""
    assert issubclass(Unencodable, TypeError)
    assert issubclass(Unencodable, UsageError)


# -- Errors -----------------------------------------------------------------------------------------------------


class CardDeclined(Exception):
    """An exception whose signature has little to do with its args."""

    made = 0

    def __init__(self, *, code: int, amount: Decimal) -> None:
        super().__init__(f"declined with {code}")
        type(self).made += 1
        self.code, self.amount = code, amount


class Stolen(CardDeclined):
    pass


def test_a_known_error_keeps_type_args_text_and_attributes() -> None:
    """The replayed error is caught by the same except clause, and its __init__ does not run again."""
    error = Stolen(code=5, amount=Decimal("1.10"))
    error.add_note("call the bank")
    made = CardDeclined.made, Stolen.made
    back = decode_error(encode_error(error), (ValueError, CardDeclined))
    assert (type(back), back.args, str(back), vars(back)) == (Stolen, error.args, str(error), vars(error))
    assert (CardDeclined.made, Stolen.made) == made


@pytest.mark.parametrize(
    "error",
    [
        ValueError(),
        KeyError("a", 1),
        FileNotFoundError(2, "no such file", "a.txt"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        ImportError("no", name="n", path="p"),
        MissingExtra("install it", key="k"),
        InvalidKey("bad", key="|a||b"),
        StopIteration(5),
        SystemExit(3),
        json.JSONDecodeError("bad", "{", 1),
    ],
    ids=repr,
)
def test_errors_of_python_and_of_this_library_survive(error: BaseException) -> None:
    """Also those that keep their state where only C code can reach it."""
    back = decode_error(encode_error(error), (BaseException,))
    attributes = ("filename", "errno", "object", "name", "path", "value", "code", "key", "pos")
    assert [getattr(back, name, None) for name in attributes] == [
        getattr(error, name, None) for name in attributes
    ]
    assert (type(back), back.args, str(back), vars(back)) == (
        type(error),
        error.args,
        str(error),
        vars(error),
    )


def test_an_unknown_error_becomes_a_remembered_one() -> None:
    """No class is looked up by name beyond those that the policy names."""
    back = decode_error(encode_error(Stolen(code=5, amount=Decimal(1))), (OSError,))
    assert isinstance(back, RememberedError)
    assert (str(back), back.error_type) == ("declined with 5", f"{__name__}:Stolen")


class Several(ExceptionGroup[Exception]):
    """A group whose arguments are its own."""

    def __new__(cls, code: int, errors: list[Exception]) -> Self:
        group = super().__new__(cls, f"code {code}", errors)
        group.code = code  # type: ignore[attr-defined]
        return group


def test_a_group_keeps_its_members() -> None:
    """``except*`` finds them again; those that the policy does not name are told by their text."""
    inner = Several(5, [ValueError("a"), Stolen(code=5, amount=Decimal(1))])
    stored = encode_error(ExceptionGroup("all", [OSError(2, "no"), inner]))
    assert isinstance(decode_error(stored, (Several, CardDeclined)), RememberedError)
    back = decode_error(stored, (ExceptionGroup, ValueError, CardDeclined))
    assert isinstance(back, ExceptionGroup) and str(back) == "all (2 sub-exceptions)"
    missing, several = back.exceptions
    assert isinstance(missing, RememberedError) and missing.error_type == "builtins:FileNotFoundError"
    assert isinstance(several, Several) and (several.message, vars(several)) == ("code 5", {"code": 5})
    assert [(type(each), str(each)) for each in several.exceptions] == [
        (ValueError, "a"), (Stolen, "declined with 5")
    ]  # fmt: skip


def test_an_error_that_can_not_be_rebuilt_becomes_a_remembered_one() -> None:
    """Groups in groups without end are told by their text."""
    group = ExceptionGroup("several", [ValueError("a")])
    for _ in range(500):
        group = ExceptionGroup("several", [group])
    back: BaseException = decode_error(encode_error(group), (Exception,))
    while isinstance(back, ExceptionGroup):
        (back,) = back.exceptions
    assert isinstance(back, RememberedError)


class Refusal(Exception):
    """An error that says why, by an enum and a date."""

    until: date | None = None

    def __init__(self, why: Colour) -> None:
        super().__init__(why)
        self.why = why


def test_what_an_error_carries_keeps_its_type_by_annotations() -> None:
    """Of its class and of its __init__: a caller who asks ``error.why is Colour.RED`` gets the same answer again."""
    error = Refusal(Colour.RED)
    error.until = date(2026, 11, 17)
    back = decode_error(encode_error(error), (Refusal,))
    assert isinstance(back, Refusal)
    assert (back.args, back.why, back.until) == ((Colour.RED,), Colour.RED, date(2026, 11, 17))


@dataclass(slots=True, frozen=True)
class Short(Exception):
    """An error whose state is in slots, and part of its text."""

    missing: int

    def __str__(self) -> str:
        return f"{self.missing} are missing"


def test_an_error_keeps_what_is_in_its_slots() -> None:
    """They are attributes as others are."""
    back = decode_error(encode_error(Short(5)), (Short,))
    assert isinstance(back, Short)
    assert (back.missing, str(back)) == (5, "5 are missing")


def test_what_an_error_carries_and_can_not_be_stored_is_kept_as_text() -> None:
    """An error with a live object inside is still remembered, even if that object can't be printed."""

    class Mute:
        def __str__(self) -> str:
            raise RuntimeError

    error = ValueError("a", Mute())
    error.sock = len
    back = decode_error(encode_error(error), (ValueError,))
    assert back.args[0] == "a"
    assert "Mute" in back.args[1]
    assert vars(back) == {"sock": str(len)}


# -- The canonical form -----------------------------------------------------------------------------------------


def logical(value: Any) -> Any:
    """What a value means, as documented: equal exactly where the canonical form has to be."""
    kind = type(value)
    if kind is dict:
        return "dict", frozenset((logical(key), logical(item)) for key, item in value.items())
    if kind in (list, tuple):
        return "list", tuple(map(logical, value))
    if kind in (set, frozenset):
        return "set", frozenset(map(logical, value))
    if kind in (bytes, bytearray):
        return "bytes", bytes(value)
    if kind is float:
        return "float", repr(value + 0.0)
    if kind is complex:
        return "complex", logical(value.real), logical(value.imag)
    if kind is Decimal:
        return "decimal", value if value.is_finite() else str(value)
    if kind is datetime:
        return "datetime", value.isoformat()
    if kind is time:
        return "time", value.isoformat(), getattr(value.tzinfo, "key", None)
    return kind.__name__, value


few = st.sampled_from(
    [
        *(0, 1, True, False, None, 0.0, -0.0, 1.0, "1", "", "$", b"1", bytearray(b"1"), math.nan, math.inf),
        *(
            Decimal("1.0"),
            Decimal("1.00"),
            Decimal("-0"),
            Decimal("1e3"),
            Decimal(1000),
            Decimal("NaN"),
            1j,
            1 + 0j,
        ),
        *(date(2025, 1, 1), datetime(2025, 1, 1), datetime(2025, 1, 1, tzinfo=UTC), time(1)),  # noqa: DTZ001
        *(
            datetime(2025, 1, 1, tzinfo=ZoneInfo("UTC")),
            timedelta(1),
            UUID(int=1),
            str(UUID(int=1)),
            10**600,
            "-0.0",
        ),
    ]
)
few_hashable = few.filter(lambda value: not isinstance(value, bytearray))
small = st.recursive(
    few,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.lists(inner, max_size=2).map(tuple)
        | st.sets(few_hashable, max_size=3)
        | st.dictionaries(few_hashable, inner, max_size=2)
        | st.dictionaries(st.sampled_from(["a", "b", "$"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(small, small)
def test_canonical_forms_are_equal_exactly_for_equal_meanings(one: Any, two: Any) -> None:
    """No two different values collide, and no value has two forms."""
    assert (canonical(one) == canonical(two)) == (logical(one) == logical(two))


@given(values, values)
def test_large_values_do_not_collide_either(one: Any, two: Any) -> None:
    """The same over everything that can be generated."""
    assert (canonical(one) == canonical(two)) == (logical(one) == logical(two))


@given(st.dictionaries(hashable, plain, max_size=6), st.randoms())
def test_order_never_matters(value: dict[Any, Any], random: Any) -> None:
    """Dicts and sets have one form whatever the order they were made in."""
    items = list(value.items())
    random.shuffle(items)
    assert canonical(dict(items)) == canonical(value)
    assert canonical({key for key, _ in items}) == canonical(set(value))


@given(values)
def test_a_value_is_the_same_inside_and_outside_of_a_larger_one(value: Any) -> None:
    """Short cuts for plain data write what the long way writes."""
    assert canonical([value, b""]) == b"[" + canonical(value) + b"," + canonical(b"") + b"]"


def test_classes_count_by_name_and_fields() -> None:
    """Two classes with the same content are two meanings."""
    values = [
        line,
        Line("b", Decimal(1)),
        Point(1),
        Bare(1, "red"),
        [1, "red"],
        (1, Colour.RED),
        Colour.RED,
        "red",
        Level.LOW,
        1,
        Word.YES,
        "yes",
        receipt,
        {"value": "red"},
    ]
    assert len({canonical(value) for value in values}) == len(values)
    assert canonical(Line("b", Decimal("1.0"))) == canonical(Line("b", Decimal("1.00")))


def test_an_object_may_say_what_counts() -> None:
    """__effect_key__ takes precedence over fields."""

    @dataclass
    class Session:
        user: str
        socket: object = None

        def __effect_key__(self) -> object:
            return self.user

    assert canonical(Session("ann", len)) == canonical(Session("ann"))
    assert canonical([Session("ann")]) != canonical([Session("bob")])
    assert canonical(Session("ann")) != canonical("ann")


@pytest.mark.parametrize(
    "value",
    [len, object(), Name("a"), OrderedDict(), range(2), ValueError()],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_data_has_no_canonical_form(value: object) -> None:
    """A connection or function in a payload is told by its place, and never enters an id by its address."""
    with pytest.raises(Unencodable, match=r"payload\.call\[1\]"):
        canonical({"call": [1, value]})


# -- JSON documents ---------------------------------------------------------------------------------------------

documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)


@given(documents, st.sampled_from([None, 2]), st.booleans())
def test_a_document_has_the_form_of_its_value(value: Any, indent: int | None, ascii: bool) -> None:
    """Spacing and escapes don't count; the id is that of the parsed value."""
    document = json.dumps(value, indent=indent, ensure_ascii=ascii)
    assert canonical_json(document) == canonical(json.loads(document))


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ("0.1", "0.10000000000000000001", False),
        ("0.1", "0.10", True),
        ("1e2", "100.0", True),
        ("15e-1", "1.50", True),
        ("-0.0", "0.0", True),
        ("0e9", "0.0", True),
        ("1", "1.0", False),
        ("-0", "0", True),
        ("9007199254740993", "9007199254740992", False),
        ("9007199254740993.0", "9007199254740992.0", False),
        ("1" + "0" * 5000, "1" + "0" * 4999 + "1", False),
        ("1e400", "1e401", False),
        ("1e400", "10e399", True),
        ("1e-400", "0.0", False),
        ('{"$":["number","1e400"]}', "1e400", False),
        ('"\\u00fc"', '"ü"', True),
        ('"\\ud83d\\ude00"', '"😀"', True),
        ('{"a":1,"b":2}', '{ "b": 2, "a": 1 }', True),
    ],
)
def test_numbers_and_strings_count_by_what_is_written(one: str, two: str, same: bool) -> None:
    """No digit is lost on the way through a float, and no spelling makes a difference."""
    assert (canonical_json(one) == canonical_json(two.encode())) == same


@pytest.mark.parametrize("zeros", [18, 19, 700, 4299, 4300, 5000])
def test_a_long_integer_has_one_form_as_text_and_as_value(zeros: int) -> None:
    """Whether it came as JSON or as a Python number, alone or beside what takes the long way."""
    document, value = "-1" + "0" * zeros, -(10**zeros)
    assert canonical_json(document) == canonical(value)
    assert canonical([value, b""]) == b"[" + canonical(value) + b"," + canonical(b"") + b"]"
    assert decode(encode([value])) == [value]


def test_duplicate_members_are_refused_by_name() -> None:
    """Readers disagree on which one counts, so a document with two has no single meaning."""
    with pytest.raises(UsageError, match=r"member called 'a', 'b'"):
        canonical_json('{"x": {"a": 1, "b": 1, "a": 1, "b": 2, "c": 3}}')


@pytest.mark.parametrize(
    "document",
    [
        "NaN",
        "[Infinity]",
        "-Infinity",
        "",
        "{",
        "[1,]",
        "{'a':1}",
        b"\xff\xfe",
        "[" * 100_000,
        "1 2",
        "1e" + "9" * 5000,
    ],
    ids=lambda document: repr(document)[:12],
)
def test_what_is_not_json_is_refused(document: str | bytes) -> None:
    """Also what Python's parser lets through or fails on in its own way."""
    with pytest.raises(UsageError):
        canonical_json(document)


# -- With and without msgspec ------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@pytest.mark.parametrize("canonical", [False, True])
@given(value=JSON)
def test_msgspec_writes_the_same_bytes(canonical: bool, value: Any) -> None:
    """With the extra and without it a payload has the same fingerprint, and a result the same form."""
    pytest.importorskip("msgspec")
    quick, plain = Writer(canonical), Writer(canonical)
    plain._looked_for_quick = True
    assert quick.write_plain(value) == plain.write_plain(value)


@given(value=JSON)
def test_msgspec_reads_the_same_values(value: Any) -> None:
    """The same value and the same types, whoever reads."""
    pytest.importorskip("msgspec")
    data = encode(value)
    with_msgspec = decode(data)
    with mock.patch.object(_json, "_quick_decoder", lambda: None):
        assert repr(decode(data)) == repr(with_msgspec)
        assert repr(decode(ATOMIC + data)) == repr(with_msgspec)


def test_a_mark_before_a_result_is_no_part_of_it() -> None:
    """Nor where msgspec can't read what follows."""
    for value in ("\ud800", {"a": [1]}, 1.5, None):
        assert decode(ATOMIC + encode(value)) == value


@pytest.mark.parametrize(
    "document",
    [
        "1e400", "NaN", "-Infinity", '{"a": 1, "a": 2}', "-0", "-0.0", "1E5", '"\\ud800"', '"\\ud83d\\ude00"', "5e-324",
        "9007199254740993.0", "123456789012345678901234567890", "\ufeff{}", ' {"a": [1.10, true, null]} ',
        "1" + "0" * 5000, "[1,]", "01", '"\t"', "", "[" * 300 + "]" * 300, '{"ä": "\x7f"}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32-le", "latin-1", None])
def test_a_document_is_read_as_the_standard_library_reads_it(document: str, encoding: str | None) -> None:
    """Whoever reads it: the same value, of the same types, and an error for what is no JSON."""
    if encoding == "latin-1" and "\ufeff" in document:
        return
    text = document if encoding is None else document.encode(encoding)
    assert _read(read_json, text) == _read(json.loads, text)


@given(value=JSON)
def test_documents_are_read_alike(value: Any) -> None:
    """The same for any value that the standard library can write."""
    text = json.dumps(value).encode()
    assert _read(read_json, text) == _read(json.loads, text)


def _read(reader: Callable[[bytes | str], Any], text: bytes | str) -> str:
    try:
        return repr(reader(text))
    except ValueError:
        return "no JSON"
