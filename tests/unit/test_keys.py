"""What names an effect, and where the names come from."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from effectonce import Message, Receiver, keys
from effectonce.codec import Unencodable
from effectonce.errors import InvalidKey, UsageError
from effectonce.keys import Key

characters = st.characters(exclude_categories=["Cc", "Cs"])
parts = st.text(characters | st.sampled_from("|%:=&7C"), max_size=20)
names = parts.filter(str.strip)


# -- Keys -------------------------------------------------------------------------------------------------------


@given(parts, names, parts, names)
def test_text_and_key_are_exact_inverses(scope: str, operation: str, version: str, id: str) -> None:
    """Whatever separators the parts contain, the text names this key and no other."""
    key = Key.of(id, operation, scope, version)
    assert Key.parse(key.text) == key == Key.parse(str(key))
    assert keys.prefix(scope, operation, version) + id == key.text


@given(parts, names, parts, names, parts, names, parts, names)
def test_two_keys_never_share_a_text(a: str, b: str, c: str, d: str, e: str, f: str, g: str, h: str) -> None:
    """Moving a separator from one part to the next makes another key."""
    one, two = Key(a, b, c, d), Key(e, f, g, h)
    assert (one.text == two.text) == (one == two)


def test_the_text_is_readable() -> None:
    """It shows up in logs, so the ordinary case has no escapes, and the id never has."""
    assert Key.of("o-1|%", "pay", scope="acme", version=2).text == "acme|pay|2|o-1|%"


@pytest.mark.parametrize(
    "text", ["", "a", "|a|b", "||1|id", "|a|%7c|id", "|a%|1|id", "|a||", "|a|| ", "|a||b\n"]
)
def test_text_of_no_key_is_refused(text: str) -> None:
    """Also text that only a sloppy reader would take."""
    with pytest.raises(InvalidKey):
        Key.parse(text)


def test_a_version_may_be_a_number() -> None:
    """version=2 and version="2" are the same version; True is neither."""
    assert Key.of("a", "op", version=2) == Key.of("a", "op", version="2")
    assert keys.prefix("", "op", 1) == keys.prefix("", "op", "1")
    with pytest.raises(InvalidKey, match="version True is of type bool"):
        keys.prefix("", "op", True)


@pytest.mark.parametrize(
    "id",
    ["a", "x" * 255, "ключ", "a b", "\u00a0a", "👩\u200d💻", "a|b%", str(UUID(int=1)), "\ue000", "\u2028a"],
)
def test_ordinary_and_unusual_ids_are_fine(id: str) -> None:
    """Everything that can be printed and stored is a good id."""
    assert keys.check_id(id) is id


@pytest.mark.parametrize(
    ("id", "words"),
    [
        ("", "empty or blank"),
        ("   ", "empty or blank"),
        ("\u00a0\u2003", "empty or blank"),
        ("x" * 256, "256 characters, more than 255"),
        ("a\nb", r"'\\n' at position 1"),
        ("a\x00", r"'\\x00' at position 1"),
        ("\x85a", r"'\\x85' at position 0"),
        ("\ud800", r"'\\ud800' at position 0"),
        (5, r"of type int. Pass a string, such as str\(id\)"),
        (b"a", r"of type bytes.*id\.hex\(\)"),
        (None, r"of type NoneType.*keys\.uuid4\(\)"),
        (UUID(int=1), r"of type UUID.*str\(id\)"),
        ([], "of type list"),
    ],
)
def test_what_can_not_name_an_effect_is_refused_with_advice(id: Any, words: str) -> None:
    """The message says what was wrong and what to do, and shows no more than a glimpse of a long value."""
    with pytest.raises(InvalidKey, match=words) as caught:
        keys.check_id(id)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("bad", [None, 5, b"a", [], "a\n", "x" * 256])
@pytest.mark.parametrize("place", ["scope", "operation", "version"])
def test_the_other_parts_are_checked_too(place: str, bad: Any) -> None:
    """A wrong scope is as dangerous as a wrong id."""
    arguments = {"scope": "", "operation": "op", "version": ""} | {place: bad}
    if (place, bad) == ("version", 5):
        assert keys.prefix(**arguments) == "|op|5|"
    else:
        with pytest.raises(InvalidKey, match=f"The {place} "):
            keys.prefix(**arguments)


def test_only_the_operation_must_not_be_empty() -> None:
    """No scope is the global one, no version the first."""
    assert keys.prefix("", "op", "") == "|op||"
    with pytest.raises(InvalidKey, match="operation is empty"):
        keys.prefix("", " ", "")


class Caseless(str):
    """Text that is equal to any of the same letters."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self.lower() == other.lower()

    def __hash__(self) -> int:
        return hash(self.lower())


def test_a_key_does_not_depend_on_who_came_before() -> None:
    """Text whose class calls others equal counts as its characters: else each process would have keys of its own."""
    receiver = Receiver("memory://")
    for name in ("Acme", "ACME"):
        odd = Caseless(name)
        assert keys.prefix(odd, odd, odd) == f"{name}|{name}|{name}|"
        assert receiver.key_of(Message("1", source=odd), scope=odd) == f"{name}|message:::{name}||1"


def test_an_id_of_a_str_subclass_becomes_a_plain_one() -> None:
    """Whatever its own __str__ says, its characters count."""

    class Loud(str):
        __slots__ = ()

        def __str__(self) -> str:
            return "LOUD"

    assert (keys.check_id(Loud("a")), type(keys.check_id(Loud("a")))) == ("a", str)


# -- Made by the client -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "version"), [(keys.uuid4, 4), (keys.uuid7, 7)])
def test_uuids_follow_the_standard(make: Any, version: int) -> None:
    """Version and variant bits are right, and the text is the usual one."""
    ids = [make() for _ in range(1000)]
    assert all(UUID(id).version == version and UUID(id).variant == "specified in RFC 4122" for id in ids)
    assert all(str(UUID(id)) == id for id in ids)
    assert len(set(ids)) == 1000


def test_uuid7_starts_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first 48 bits are the milliseconds since 1970."""
    monkeypatch.setattr(keys, "_clock", keys._Clock())
    monkeypatch.setattr(keys, "time_ns", lambda: 0x0123_4567_89AB * 1_000_000 + 999_999)
    assert keys.uuid7().startswith("01234567-89ab-7")


def test_uuid7_grows_while_the_clock_stands_still_or_steps_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Order within a process does not depend on the time of day."""
    times = iter([5, 5, 5, 4, 1, 5, 6, 6, 2, 7])
    monkeypatch.setattr(keys, "_clock", keys._Clock())
    monkeypatch.setattr(keys, "time_ns", lambda: next(times) * 1_000_000)
    ids = [keys.uuid7() for _ in range(10)]
    assert all(one < two for one, two in pairwise(ids))
    assert ids[-1].startswith("00000000-0007-7")


def test_uuid7_grows_for_every_thread() -> None:
    """Each thread sees its own ids grow, and no two threads get the same one."""
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: [keys.uuid7() for _ in range(500)], range(8)))
    assert all(run == sorted(run) for run in runs)
    assert len({id for run in runs for id in run}) == 4000


def test_a_forked_child_makes_names_of_its_own() -> None:
    """Right after a fork neither owners nor ids repeat the parent's, also if the parent held the lock."""
    script = """
import os
from effectonce import keys
keys.uuid7(); keys.new_owner(); before = keys.uuid7()
keys._clock._lock.acquire()
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    made = [keys.uuid7() for _ in range(50)]
    assert before < made[0] and made == sorted(made)
    os.write(writer, " ".join(made + [keys.new_owner().hex() for _ in range(50)]).encode())
    os._exit(0)
keys._clock._lock.release()
assert os.waitpid(child, 0)[1] == 0
mine = {keys.uuid7() for _ in range(50)} | {keys.new_owner().hex() for _ in range(50)}
theirs = set(os.read(reader, 65536).decode().split())
assert len(mine) == len(theirs) == 100 and not mine & theirs
"""
    source = Path(keys.__file__).parents[1]
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env={"PYTHONPATH": str(source)})


def test_owners_are_unique_across_threads() -> None:
    """16 bytes, never the same twice."""
    with ThreadPoolExecutor(8) as pool:
        owners = [
            owner
            for run in pool.map(lambda _: [keys.new_owner() for _ in range(500)], range(8))
            for owner in run
        ]
    assert len(set(owners)) == 4000
    assert {len(owner) for owner in owners} == {16}


# -- Made of what is known --------------------------------------------------------------------------------------


def test_a_composite_reads_as_it_was_made() -> None:
    """Ordinary parts need no escapes."""
    assert keys.composite("order", 7, "refund") == "order:7:refund"
    assert keys.composite(UUID(int=1)) == str(UUID(int=1))


@given(st.lists(names, min_size=1, max_size=4), st.lists(names, min_size=1, max_size=4))
def test_composites_never_collide(one: list[str], two: list[str]) -> None:
    """A separator inside a part is not one between parts."""
    assume(all(sum(map(len, parts)) < 60 for parts in (one, two)))
    assert (keys.composite(*one) == keys.composite(*two)) == (one == two)


@pytest.mark.parametrize(
    "parts", [(), ("",), ("a", " "), ("a", None), ("a", True), (1.5,), (b"a",), ("x" * 300,), ("a\n",)]
)
def test_composites_of_nothing_are_refused(parts: Any) -> None:
    """An empty or odd part would make different effects look alike."""
    with pytest.raises(InvalidKey):
        keys.composite(*parts)


class Masked(int):
    """A number that hides itself from logs."""

    def __str__(self) -> str:
        return "***"

    __repr__ = __str__


class MaskedUUID(UUID):
    def __str__(self) -> str:
        return "***"


def test_a_number_counts_as_its_digits_whatever_it_shows_to_people() -> None:
    """Two customers whose ids are masked in logs are two customers."""
    assert keys.composite("a", Masked(1)) == keys.composite("a", 1) != keys.composite("a", Masked(2))
    one = UUID(int=1)
    assert keys.composite(MaskedUUID(int=1)) == keys.composite(one) == str(one)


def test_a_natural_key_is_made_of_named_fields() -> None:
    """From mappings and objects alike, however deep, and with types kept apart."""
    assert (
        keys.natural({"order": {"id": 7}, "kind": "refund"}, "order.id", "kind") == 'order.id=7&kind="refund"'
    )
    assert keys.natural(SimpleNamespace(order={"id": 7}), "order.id") == "order.id=7"
    assert (
        keys.natural({"id": "7"}, "id") != keys.natural({"id": 7}, "id") != keys.natural({"id": True}, "id")
    )


@given(
    st.dictionaries(st.sampled_from(["a", "b", "a=", "a&b"]), names | st.integers(), min_size=4), st.data()
)
def test_natural_keys_never_collide(payload: dict[str, Any], data: st.DataObject) -> None:
    """Other fields, another order or other values make another key."""
    choice = st.lists(st.sampled_from(sorted(payload)), min_size=1, max_size=3)
    one, two = data.draw(choice), data.draw(choice)
    assert (keys.natural(payload, *one) == keys.natural(payload, *two)) == (one == two)


@pytest.mark.parametrize(
    "payload", [{}, {"a": None}, {"a": {}}, {"a": {"b": None}}, {"a": "text"}, {"a": {"b": " "}}, None]
)
def test_a_missing_field_is_named(payload: Any) -> None:
    """Two payloads without the field are not the same effect."""
    with pytest.raises(InvalidKey, match=r"'a\.b'"):
        keys.natural(payload, "a.b")


def test_a_natural_key_needs_fields() -> None:
    """No fields would make one key of all payloads."""
    with pytest.raises(InvalidKey, match="at least one field"):
        keys.natural({"a": 1})


@pytest.mark.parametrize("value", ["x" * 300, "a\x85", "\ud800"])
def test_a_natural_key_that_no_id_can_be_becomes_a_hash(value: str) -> None:
    """It stays an id, and no plain key looks the same."""
    made = keys.natural({"a": value}, "a")
    assert re.fullmatch("sha256:[0-9a-f]{64}", made)
    assert made not in {keys.natural({"a": value + "x"}, "a"), keys.natural({"a": made}, "a")}
    assert keys.check_id(made) == made


def test_the_examples_in_the_module_are_true() -> None:
    """What the docstrings show is what happens."""
    results = doctest.testmod(keys)
    assert (results.failed, results.attempted) == (0, 2)


# -- Made of the content ----------------------------------------------------------------------------------------


def test_the_same_content_has_the_same_id_in_every_process() -> None:
    """Also in the next version of this library: stored ids have to match."""
    payload = {"b": [1, 2.5], "a": "ü"}
    id = "074ddf3f78e22ee82443379252f4702560889e6fb5271e3dca1e20df1de05986"
    assert keys.content_id(payload, "orders") == id
    assert keys.fingerprint(payload).hex() == "a1eb76858bacbcb95240a7427fae72cb"
    downstream = "stripe.charge-627ccf4dddbddae93832c695fce68a94f615265b"
    assert keys.derived("acme|pay|1|o-1", "stripe.charge") == downstream


def test_order_and_spacing_do_not_count() -> None:
    """A document and its value have one id, whatever the order of members."""
    value = {"a": 1, "b": [1.5, None]}
    ids = {keys.content_id(value), keys.content_id({"b": (1.5, None), "a": 1})}
    ids |= {
        keys.content_id_of_json(text)
        for text in ('{"b":[1.5,null],"a":1}', b' {"a" : 1, "b" : [1.50, null]}\n')
    }
    assert len(ids) == 1


def test_content_of_different_types_or_sources_differs() -> None:
    """Bytes are opaque, types are kept apart, and the border between source and content can't be moved."""
    ids = [keys.content_id(value) for value in (1, 1.0, True, "1", b"1", [1], {"1": 1}, None)]
    ids += [
        keys.content_id("1", "a"),
        keys.content_id("1", "b"),
        keys.content_id(b"v1"),
        keys.content_id(b'1"', "1:"),
    ]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("[0-9a-f]{64}", id) for id in ids)
    assert keys.content_id(bytearray(b"1")) == keys.content_id(memoryview(b"1")) == keys.content_id(b"1")


def test_content_without_one_meaning_has_no_id() -> None:
    """Duplicate members and live objects are refused by name."""
    with pytest.raises(UsageError, match="'a'"):
        keys.content_id_of_json('{"a": 1, "a": 1}')
    with pytest.raises(Unencodable, match=r"payload\.f"):
        keys.content_id({"f": len})


def test_fingerprints_tell_requests_apart() -> None:
    """Short, deterministic, empty when nothing was asked."""
    payloads: list[Any] = [0, False, "", b"", [], {}, "a", b"a", {"a": 1}, {"a": "1"}]
    prints = [keys.fingerprint(payload) for payload in payloads]
    assert len(set(prints)) == len(prints)
    assert {len(print) for print in prints} == {16}
    assert keys.fingerprint(None) == b""
    assert keys.fingerprint(bytearray(b"a")) == keys.fingerprint(memoryview(b"a")) == keys.fingerprint(b"a")
    assert keys.fingerprint(memoryview(b"a.b.c")[::2]) == keys.fingerprint(b"abc")


# -- Handed downstream ------------------------------------------------------------------------------------------


@given(st.text(), names, st.text(), names)
def test_derived_keys_are_stable_and_never_collide(one: str, name: str, two: str, other: str) -> None:
    """They depend on the two texts alone, and fit into a header."""
    made = keys.derived(one, name)
    assert made == keys.derived(one, name)
    assert (made == keys.derived(two, other)) == ((one, name) == (two, other))
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,64}", made)


def test_a_derived_key_can_be_read() -> None:
    """The provider's log shows what it was for."""
    assert keys.derived("|pay||o-1", "stripe.charge").startswith("stripe.charge-")


@pytest.mark.parametrize("name", ["", " ", None, 5])
def test_a_downstream_call_needs_a_name(name: Any) -> None:
    """Two calls without a name would share one key."""
    with pytest.raises(InvalidKey):
        keys.derived("|pay||o-1", name)
