"""Steps in Redis's own terms: one EVALSHA takes a step on any number of keys.

A script costs a server about as much to begin as its step does, so steps of one kind that go to the same server at the
same moment travel in one ``Bundle``. Each has an answer of its own: the server's clock if it could do its work, the
clock and what is there if it could not, or an error. In a cluster, where a command may name keys of one slot only,
every step travels alone, by the same scripts.

What a step is about stands for it here (an ``Order``): a Claim for Add, a Completion for End, a Renewal for Hold or
Save, a Swap for itself, and a key for Read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from hashlib import sha1
from itertools import count, islice
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, cast

from .._records import Claim, Completion, Record, Renewal, State, make
from ._redis_records import (
    BARE,
    ENDED_HEADS,
    FENCE,
    FULL,
    PLAIN,
    SHORT,
    SHORT_FENCES,
    TRAITS,
    Head,
    last_of,
    packed,
    short,
    told,
)
from ._steps import DONE, Added, Found, Step, Swap

W = TypeVar("W")

Order = Claim | Completion | Renewal | Swap | str
Answer = int | bytes | Exception
"""The clock; or the clock, when what is there will be forgotten, and what is there; or what went wrong."""

MOST: Final = 128
"""Steps of a bundle: a server does nothing else meanwhile."""
LARGEST: Final = 16_384
"""Bytes of a step that is not sent alone."""

NO_FENCE: Final = bytes(SHORT)

ARGUMENT: Final = b"$%d\r\n%b\r\n"
ALONE: Final = b"%b$%d\r\n%b\r\n%b%b%b%b"
OWNER: Final = b"$%d\r\n%c"
HOLDER: Final = b"$%d\r\n%b%c%b\r\n"
ENDING: Final = HOLDER + b"$%d\r\n%b%b\r\n"

SCRIPTS: Final = {
    "add": (), "end": ("held",), "hold": ("held",), "save": ("held",), "swap": (), "read": (), "watch": ("held",),
}  # fmt: skip
"""The files in ``lua`` that are scripts, and what stands before each, after what stands before all."""


class Shape:
    """What the commands of steps have in common that may travel together: the script, and arguments for all keys.

    ``each`` is how many arguments a step has of its own. A step that has one, of a size that is the same for all, may
    leave to the shape what stands ``around`` it.
    """

    __slots__ = ("_after", "_alone", "_arguments", "_before", "_common", "_script")

    def __init__(
        self, script: bytes, each: int, *common: bytes, around: tuple[bytes, bytes] = (b"", b"")
    ) -> None:
        self._script, self._arguments = script, (len(common), each)
        self._common = arguments(*common)
        self._before, self._after = around
        self._alone = self._start(1)

    def _start(self, count: int) -> bytes:
        common, each = self._arguments
        total, keys = 3 + count + common + each * count, b"%d" % count
        return b"*%d\r\n$7\r\nEVALSHA\r\n$40\r\n%b\r\n$%d\r\n%b\r\n" % (total, self._script, len(keys), keys)

    def command(self, name: bytes, argument: bytes) -> bytes:
        """The command for one key."""
        return ALONE % (self._alone, len(name), name, self._common, self._before, argument, self._after)

    def commands(self, names: list[bytes], each: list[bytes]) -> bytes:
        """The command for many keys."""
        between = self._after + self._before
        start = self._start(len(names))
        return b"".join(
            [start, arguments(*names), self._common, self._before, between.join(each), self._after]
        )


Parts = tuple[Shape, bytes, bytes]
"""A step in pieces: what it shares with others, the name of its key, and its arguments as they are sent."""


class Bundle(Generic[W]):
    """Steps that travel together, and who waits for the answer to each."""

    __slots__ = ("_shape", "arguments", "names", "whose")

    def __init__(self, shape: Shape, names: list[bytes], arguments: list[bytes], whose: list[W]) -> None:
        self._shape, self.names, self.arguments, self.whose = shape, names, arguments, whose

    @property
    def command(self) -> bytes:
        """The command for all of them."""
        return self._shape.commands(self.names, self.arguments)


def bundled(steps: Sequence[Parts], whose: Iterable[W]) -> list[Bundle[W]]:
    """Put steps into as few bundles as there can be."""
    shapes, names, arguments = map(list, zip(*steps, strict=True))
    if len(steps) <= MOST and shapes.count(shapes[0]) == len(steps) and max(map(len, arguments)) <= LARGEST:
        return [Bundle(shapes[0], names, arguments, list(islice(whose, len(steps))))]  # as nearly always
    bundles: list[Bundle[W]] = []
    unfilled: dict[Shape, Bundle[W]] = {}
    for (shape, name, argument), who in zip(steps, whose, strict=False):
        bundle = unfilled.get(shape)
        if bundle is None or len(argument) > LARGEST or len(bundle.whose) >= MOST:
            bundle = Bundle(shape, [], [], [])
            bundles.append(bundle)
            if len(argument) <= LARGEST:
                unfilled[shape] = bundle
        bundle.names.append(name)
        bundle.arguments.append(argument)
        bundle.whose.append(who)
    return bundles


class Commands:
    """Steps as commands to a server. ``prefix`` begins the name of every key."""

    def __init__(self, prefix: str, waits_for_replicas: bool) -> None:
        self._prefix = prefix
        start = ("opening", "telling", *(("rewriting",) if waits_for_replicas else ()))
        scripts = {name: _lua(*start, *parts, name, "closing") for name, parts in SCRIPTS.items()}
        self.load = [command(b"SCRIPT", b"LOAD", text) for text in scripts.values()]
        names = {
            name: sha1(text, usedforsecurity=False).hexdigest().encode() for name, text in scripts.items()
        }
        # Few policies make many claims, so that most shapes are known.
        self._add = lru_cache(maxsize=256)(partial(_adding, names["add"]))
        self._end = lru_cache(maxsize=256)(partial(_ending, names["end"]))
        self._hold = lru_cache(maxsize=256)(partial(_holding, names["hold"], 1))
        self._save = lru_cache(maxsize=256)(partial(_holding, names["save"], 2))
        self._swap, self._read = Shape(names["swap"], 3), Shape(names["read"], 0)
        self._watch = Shape(names["watch"], 1)
        self.kinds: dict[type, Callable[[Any], Parts]] = {
            Claim: self.claim, Completion: self.completion, Renewal: self._renewal, Swap: self._swapping,
            str: self._reading,
        }  # fmt: skip
        """What takes a step to pieces, by what it is about."""

    def name(self, key: str) -> bytes:
        """What a record's key is called in Redis."""
        return (self._prefix + key).encode()

    def parts(self, order: Order) -> Parts:
        """A step in pieces, to be put into a bundle."""
        return self.kinds[type(order)](order)

    def of(self, order: Order) -> bytes:
        """The command that takes a step alone."""
        shape, name, argument = self.kinds[type(order)](order)
        return shape.command(name, argument)

    def bundled(self, orders: Iterable[Order]) -> list[Bundle[int]]:
        """The commands that take many steps; each of them belongs to who has its number."""
        kinds = self.kinds
        return bundled([kinds[type(order)](order) for order in orders], count())

    def watching(self, record: Record) -> bytes:
        """The command that asks to be told when a held record changes."""
        return self._watch.command(self.name(record.key), _holder(record.owner, record.fence))

    def claim(self, claim: Claim) -> Parts:
        key, owner, fingerprint, lease, keep, once, _, _ = claim
        shape = self._add(once, len(owner), len(fingerprint), lease, keep)
        return shape, (self._prefix + key).encode(), owner + fingerprint

    def completion(self, completion: Completion) -> Parts:
        key, owner, fence, state, result, keep, _ = completion
        length, body = len(owner), result or b""
        is_short, holder, rest = _fence_parts(fence)
        argument = ENDING % (9 + length, holder, length, owner, SHORT + len(body), rest, body)
        shape = self._end(state, result is not None, keep, is_short)
        return shape, (self._prefix + key).encode(), argument

    def _renewal(self, renewal: Renewal) -> Parts:
        key, owner, fence, lease, keep, journal = renewal
        name, holder = self.name(key), _holder(owner, fence)
        if journal is None:
            return self._hold(lease, keep), name, holder
        return self._save(lease, keep), name, holder + arguments(journal)

    def _swapping(self, swap: Swap) -> Parts:
        last = last_of(swap.after)
        texts = (packed(swap.before), packed(swap.after), b"" if last is None else b"%d" % last)
        return self._swap, self.name(swap.key), arguments(*texts)

    def _reading(self, key: str) -> Parts:
        return self._read, self.name(key), b""


def order_of(step: Step) -> Order:
    """What a step is about."""
    return step if type(step) is Swap else cast("Order", step[0])


def key_of(order: Order) -> str:
    """The key of the record that a step is about."""
    return order if type(order) is str else cast("Claim", order).key


def answers(reply: Any, count: int) -> list[Answer]:
    """The answer to each step of a bundle, from the server's reply to its command."""
    return reply if type(reply) is list else [reply] * count


def understood(order: Order, answer: Any) -> Any:
    """The reply to a step, from the answer to it."""
    if type(answer) is int:
        if type(order) is Claim:
            return make(Added, (answer // 1000, answer / 1_000_000))
        return True if type(order) is Swap else DONE
    if type(order) is Swap:
        return False
    return found(key_of(order), answer)


def found(key: str, answer: bytes) -> Found:
    """What is there instead of what a step expected."""
    return Found(*told(key, answer))


def command(*texts: bytes) -> bytes:
    """A command as a server wants it."""
    return b"*%d\r\n%b" % (len(texts), arguments(*texts))


def arguments(*texts: bytes) -> bytes:
    """Parts of a command."""
    sizes = set(map(len, texts))
    if len(sizes) == 1:  # as most people's keys are
        start = b"$%d\r\n" % sizes.pop()
        return b"%b%b\r\n" % (start, (b"\r\n" + start).join(texts))
    return b"".join([ARGUMENT % (len(text), text) for text in texts])


@lru_cache(maxsize=64)
def _fence_parts(fence: int) -> tuple[bool, bytes, bytes]:
    """Whether a fence is of these years, and how it is written; all claims of a moment have the same one."""
    is_short = fence in SHORT_FENCES
    return is_short, FENCE.pack(fence), short(fence) if is_short else NO_FENCE


def _holder(owner: bytes, fence: int) -> bytes:
    return HOLDER % (9 + len(owner), FENCE.pack(fence), len(owner), owner)


def _adding(script: bytes, once: bool, length: int, size: int, lease: float, keep: float) -> Shape:
    """All claims of a policy whose owners have one length and whose fingerprints one size."""
    around = (OWNER % (1 + length + size, length), b"\r\n")
    return Shape(script, 1, _seconds(lease), _seconds(keep), TRAITS.pack(once, 1, size), around=around)


def _ending(script: bytes, state: State, has_result: bool, keep: float, is_short: bool) -> Shape:
    """All ends of one kind."""
    forms = (FULL, PLAIN, BARE) if is_short and state is not State.IN_DOUBT else (FULL,)
    heads = bytes([ENDED_HEADS[Head(state, has_result, form)] for form in forms])
    return Shape(script, 2, _seconds(keep), heads)


def _holding(script: bytes, each: int, lease: float, keep: float) -> Shape:
    """All renewals of a policy."""
    return Shape(script, each, _seconds(lease), _seconds(keep))


def _seconds(seconds: float) -> bytes:
    return repr(seconds).encode()


def _lua(*parts: str) -> bytes:
    folder = Path(__file__).parent / "lua"
    return b"\n".join([(folder / f"{part}.lua").read_bytes() for part in parts])
