"""Steps as statements to a MySQL or MariaDB server, and results as their replies. No I/O here.

Steps of one kind are one statement, however many they are. A statement alone commits by itself; more are a transaction,
because a server takes longer over a commit than over everything else. Keys go in order, so that hardly anybody waits in
a circle for locks. Should the server find one, it has done nothing, and the packet is sent again. What it goes on
refusing is sent in parts, down to single steps, so that a failure is its own caller's only.

Claims don't wait for locks at all, or everybody in their packet and behind it would wait with them. A MariaDB is told
so with the statement; a MySQL, which can't wait for less than a second, by a look before it that does not wait.

Nobody asks for a purge, so it goes along: looking for what has expired with a claim now and then, forgetting it with a
later change, in the same commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import ceil
from typing import Any, Final

from .._protocol import is_expired
from .._records import Claim, Record
from ..errors import EffectOnceError, UsageError
from ._mysql_sql import (
    DEADLOCK,
    LOCKED,
    PREPARED,
    Language,
    Refusal,
    Result,
    Row,
    Server,
    Talk,
    binary,
    double,
    name_of,
    read_record,
)
from ._mysql_values import alike_values, change_values, new_values, place
from ._steps import DONE, HELD, KEPT, Add, Added, End, Found, Hold, Kept, Read, Save, Step, Swap, by_look

MOST_BYTES: Final = 1 << 20
"""Of a packet with more than one step."""
TRIES: Final = 8
"""How often a packet is sent that runs into deadlocks."""
PARTS: Final = 8
"""Of claims in one of which a record is held: few are, as a rule, and each part is a commit."""
CLAIMS: Final = (Add, Swap)
"""Steps that don't wait for locks."""
PURGE_EVERY, PURGE_OFTEN, PURGE_SHARE = 32, 8, 4
"""After 32 new keys the hand passes four times as many rows; after 8 while it finds what has expired, so that no caller
has much of that to do."""
PURGE_AT_ONCE: Final = 32
"""How many rows are passed before what has expired there is forgotten: others' commits wait behind that one."""
REFUSED: Final = object()
"""In place of a reply: the record is not what the step was to change."""

Packet = list[tuple[str, Callable[[Result], None]]]
"""Statements, and who hears their results."""


class Stepper:
    """Has steps done in one table."""

    def __init__(self, language: Language) -> None:
        self._language = language
        self._hand = Hand(language.sql)
        self.kept = Kept()

    def execute(self, server: Server, steps: Sequence[Step], patience: int) -> Talk[list[Any]]:
        """Have steps done: a reply for each, or the error that only its own caller is to hear.

        ``patience`` is for a step alone: how often, a second each, it may wait for a lock. A claim is HELD at once.
        """
        kept, asked = self.kept, steps
        if kept:
            steps = [Read(step.key) if type(step) in CLAIMS and step.key in kept else step for step in asked]
        if len(steps) > 1:
            replies: list[Any] = []
            for portion in _portions(steps):
                replies += yield from self._insist(server, portion, 1)
        else:
            replies = yield from self._insist(server, steps, patience)
        if steps is asked:
            return replies
        return [
            reply if step is sent else by_look(step, reply, KEPT)
            for step, sent, reply in zip(asked, steps, replies, strict=True)
        ]

    def _insist(self, server: Server, steps: Sequence[Step], patience: int) -> Talk[list[Any]]:
        claims = len(steps) == 1 and type(steps[0]) in CLAIMS
        tries = {DEADLOCK: TRIES, LOCKED: 1 if claims else patience}
        while True:
            exchange = _Exchange(self._language.sql, self._hand, server, steps)
            try:
                return (yield from exchange.talk())
            except Refusal as refusal:
                yield ["ROLLBACK"]
                if exchange.has_errands:  # perhaps that is to blame; it can wait
                    continue
                tries[refusal.code] = tries.get(refusal.code, 1) - 1
                if tries[refusal.code] > 0:
                    continue
                if claims and refusal.code == LOCKED:
                    return [(yield from self._look(server, steps[0]))]
                error = self._language.translated(refusal)
            except EffectOnceError as mistake:
                error = mistake
            except UnicodeEncodeError as mistake:
                error = UsageError(f"A key can't be written in UTF-8: {mistake}.")
            break
        if len(steps) == 1:
            return [error]
        replies: dict[int, Any] = {}
        for part in _apart(steps):
            heard = yield from self._insist(server, [steps[number] for number in part], 1)
            replies.update(zip(part, heard, strict=True))
        return [replies[number] for number in range(len(steps))]

    def _look(self, server: Server, step: Step) -> Talk[Any]:
        """What to reply to a claim whose record somebody's transaction has: a duplicate's is there all the same."""
        if type(step) is Swap:
            return HELD
        (found,) = yield from self._insist(server, (Read(step.key),), 1)
        return by_look(step, found, HELD)

    # A usual step, alone, to a MariaDB. Every call pays for each line that it goes through, so these are few.

    def at_once(self, step: Step) -> str | None:
        """The one statement that a step takes as a rule; None if there is more to say."""
        if type(step) is Add and not self._hand.is_due and not self.kept:
            return f"EXECUTE effectonce_add_one USING {','.join(new_values(step.claim))}"
        if type(step) is Hold or (type(step) is End and not self._hand.has_found):
            name, *values = change_values(step)
            return f"EXECUTE effectonce_{name} USING {','.join(values)}"
        return None

    def reply(self, step: Step, result: Result) -> Any:
        """What such a statement came to; None if that is not what it is as a rule."""
        if type(step) is Add:
            return self._hand.reply(step.claim, *read_record(result.rows[0]))
        return DONE if result.changed else None

    def purge(self, rows: int) -> Talk[int]:
        """Pass so many rows and forget what has expired there."""
        if rows < 1:
            return 0
        now = yield from self._language.now()
        results: list[Result] = []
        for start in range(0, rows, PURGE_AT_ONCE):
            yield from _say(self._hand.look(min(PURGE_AT_ONCE, rows - start), now))
            yield from _say(self._hand.forget(results.append))
        return sum(result.changed for result in results)


class Hand:
    """Passes through the keys and finds what has expired.

    It begins where the first new key fell, so that short-lived processes don't all look at the same keys.
    """

    def __init__(self, sql: dict[str, str]) -> None:
        self._sql = sql
        self._new = 0
        self._every = PURGE_EVERY
        self._now = 0.0
        self._place: bytes | None = None
        self._expired: list[tuple[float, list[bytes]]] = []

    def reply(self, claim: Claim, now: int, record: Record) -> Added | Found:
        """The reply to a claim by what is there then. New keys are counted.

        A record is new if it is this claim's own, and as old as the statement that would have added it.
        """
        if record.owner != claim.owner or record.fence != now:
            return Found(record, now / 1e6)
        self._new += 1
        self._now = now / 1e6
        if self._place is None:
            self._place = name_of(claim.key)
        return Added(now, self._now)

    @property
    def is_due(self) -> bool:
        """Whether to look for what has expired: after some new keys, unless something is to be forgotten first."""
        return self._new >= self._every and not self._expired

    @property
    def has_found(self) -> bool:
        """Whether there is something to be forgotten."""
        return bool(self._expired)

    def look_when_due(self) -> Packet:
        """Look for what has expired."""
        if not self.is_due:
            return []
        self._new = 0
        return self.look(self._every * PURGE_SHARE, self._now)

    def look(self, rows: int, now: float) -> Packet:
        """Look for what has expired in the next so many rows."""
        place = binary(self._place or b"")
        return [
            (self._sql["next_hand"] % (place, rows - 1), self._move),
            (self._sql["passed"] % (place, rows, double(now)), partial(self._find, now)),
        ]

    def forget(self, hear: Callable[[Result], None]) -> Packet:
        """Forget what was found, once."""
        try:
            now, names = self._expired.pop()
        except IndexError:
            return []
        return [(self._sql["forget"] % (",".join(map(binary, names)), double(now)), hear)]

    def _move(self, result: Result) -> None:
        self._place = result.rows[0][0] if result.rows else b""

    def _find(self, now: float, result: Result) -> None:
        names = [row[0] for row in result.rows if _is_gone(row, now)]
        self._every = PURGE_OFTEN if names else PURGE_EVERY
        if names:
            self._expired.append((now, names))


def _is_gone(row: Row, now: float) -> bool:
    _, state, once, lease, expiry = row
    _, record = read_record((b"0", state, once, b"0", b"0", lease, expiry, b"", b"", b"", None))
    return is_expired(record, now)


class _Exchange:
    """Some steps in one packet. Only what could not be changed is read with a second one."""

    def __init__(self, sql: dict[str, str], hand: Hand, server: Server, steps: Sequence[Step]) -> None:
        self._sql, self._hand, self._server, self._steps = sql, hand, server, steps
        self._replies: list[Any] = [REFUSED] * len(steps)
        self._when: dict[int, float] = {}  # when these steps were done, if they were
        self.has_errands = False
        """Whether the packet does something that none of the steps asks for."""

    def talk(self) -> Talk[list[Any]]:
        """Have the steps done."""
        numbers: dict[type[Step], list[int]] = {Add: [], End: [], Hold: [], Save: [], Swap: [], Read: []}
        for number, step in self._in_order():
            numbers[type(step)].append(number)
        adds, ends, holds, saves, swaps, reads = numbers.values()
        writing = self._adding(adds) + self._changing(ends) + self._changing(holds) + self._changing(saves)
        for number in swaps:
            writing += self._changing([number])
        writing = self._free([*adds, *swaps]) + writing
        forgetting = self._hand.forget(_ignore) if ends else []
        looking = self._hand.look_when_due() if adds else []
        self.has_errands = bool(forgetting or looking)
        writing += forgetting
        if len(writing) > 1:
            writing = [("BEGIN", _ignore), *writing, ("COMMIT", _ignore)]
        yield from self._told(writing + self._reading(reads) + looking)
        if refused := [number for number in (*ends, *holds, *saves) if self._replies[number] is REFUSED]:
            yield from self._told(self._reading(refused))
        return self._replies

    def _in_order(self) -> Iterable[tuple[int, Step]]:
        """By key, which is the order in which everybody takes locks."""
        numbered = enumerate(self._steps)
        return sorted(numbered, key=lambda pair: pair[1].key) if len(self._steps) > 1 else numbered

    def _told(self, packet: Packet) -> Talk[None]:
        size = sum(len(statement) + 1 for statement, _ in packet)
        if size > self._server.largest_packet:
            raise UsageError(
                f"{size} bytes are more than the server's max_allowed_packet ({self._server.largest_packet}). Raise "
                "that, or lower Policy(max_result=…), of which every byte counts twice."
            )
        return _say(packet)

    # What is said

    def _adding(self, adds: list[int]) -> Packet:
        if not adds:
            return []
        hear = partial(self._hear_adds, adds)
        news = [new_values(self._claim(number)) for number in adds]
        if self._server.is_mariadb and len(news) == 1:
            return [(self._statement("add_one", *news[0]), hear)]
        insert = self._sql["add"] % ",".join([self._sql["new"] % new for new in news])
        if self._server.is_mariadb:
            return [(f"{self._sql['at_once']} {insert} {self._sql['returning']}", hear)]
        return [(insert, _ignore), (self._sql["there"] % ",".join([new[0] for new in news]), hear)]

    def _free(self, claims: list[int]) -> Packet:
        """A look that fails if somebody has one of the records: for a MySQL, whose other statements wait for it."""
        if not claims or self._server.is_mariadb:
            return []
        places = sorted({place(self._steps[number].key) for number in claims})
        return [(self._sql["free"] % ",".join(places), _ignore)]

    def _changing(self, numbers: list[int]) -> Packet:
        """One statement for all changes of one kind."""
        if not numbers:
            return []
        changes = [change_values(self._steps[number]) for number in numbers]
        if len(changes) == 1:
            return [(self._statement(*changes[0]), partial(self._hear_change, numbers[0]))]
        if changes[0][0] == "end" and (alike := alike_values(changes)):
            return [(self._sql["end_alike"] % alike, partial(self._hear_changes, numbers))]
        rows = [",".join(values) for _, *values in changes]
        table = (
            f"VALUES ({'),('.join(rows)})"
            if self._server.is_mariadb
            else f"SELECT {' UNION ALL SELECT '.join(rows)}"
        )
        return [(self._sql[f"{changes[0][0]}_many"] % table, partial(self._hear_changes, numbers))]

    def _reading(self, reads: list[int]) -> Packet:
        places = [place(self._steps[number].key) for number in reads]
        return [(self._sql["read"] % ",".join(places), partial(self._hear_reads, reads))] if reads else []

    def _statement(self, name: str, *values: str) -> str:
        if self._server.is_mariadb and name in PREPARED:
            return f"EXECUTE effectonce_{name} USING {','.join(values)}"
        at_once = f"{self._sql['at_once']} " if self._server.is_mariadb and name == "swap" else ""
        return at_once + self._sql[name] % values

    def _claim(self, number: int) -> Claim:
        step = self._steps[number]
        assert type(step) is Add
        return step.claim

    # What is heard

    def _hear_adds(self, adds: list[int], result: Result) -> None:
        there = {record.key: (now, record) for now, record in map(read_record, result.rows)}
        for number in adds:
            claim = self._claim(number)
            self._replies[number] = self._hand.reply(claim, *there[claim.key])

    def _hear_change(self, number: int, result: Result) -> None:
        if type(self._steps[number]) is Swap:
            self._replies[number] = result.changed == 1
        elif result.changed:
            self._replies[number] = DONE

    def _hear_changes(self, numbers: list[int], result: Result) -> None:
        """The server counts those that were done. If it was not all of them, the records have to be looked at."""
        if result.changed == len(numbers):
            for number in numbers:
                self._replies[number] = DONE
        else:
            self._when.update(dict.fromkeys(numbers, result.clock / 1e6))

    def _hear_reads(self, reads: list[int], result: Result) -> None:
        there = {record.key: (now, record) for now, record in map(read_record, result.rows)}
        done: set[str] = set()  # the same step, asked for twice, is done once
        for number in reads:
            step = self._steps[number]
            now, record = there.get(step.key, (0, None))
            self._replies[number] = Found(record, now / 1e6)
            when = self._when.get(number)
            if when and record and step.key not in done and _did(step, record, when):
                self._replies[number] = DONE
                done.add(step.key)


def _did(step: Step, record: Record, now: float) -> bool:
    """Whether a record is what a step of that time has made of it."""
    if type(step) is End:
        _, _, fence, state, result, keep, _ = step.completion
        made = (fence, state, result, now + keep)
        return (record.fence, record.state, record.result, record.expires_at) == made
    assert type(step) is Hold or type(step) is Save
    _, owner, fence, lease, _, journal = step.renewal
    renewed = (record.fence, record.owner, record.lease_until) == (fence, owner, now + lease)
    return renewed and journal in (None, record.result)


def _say(packet: Packet) -> Talk[None]:
    if packet:
        results = yield [statement for statement, _ in packet]
        for (_, hear), result in zip(packet, results, strict=True):
            hear(result)


def _ignore(_: Result) -> None:
    """Nobody has to know."""


def _apart(steps: Sequence[Step]) -> Iterable[list[int]]:
    """Where the steps are that go together after all of them were refused together.

    Claims and others part first: claims are refused at once, others after a wait, which nobody is to wait for again.
    """
    claims = [number for number, step in enumerate(steps) if type(step) in CLAIMS]
    if 0 < len(claims) < len(steps):
        return claims, [number for number, step in enumerate(steps) if type(step) not in CLAIMS]
    size = ceil(len(claims) / PARTS) or 1
    return [list(range(len(steps)))[start : start + size] for start in range(0, len(steps), size)]


def _portions(steps: Sequence[Step]) -> Iterator[Sequence[Step]]:
    """Steps as they fit into packets."""
    start = size = 0
    for number, step in enumerate(steps):
        weight = _weight(step)
        if size and size + weight > MOST_BYTES:
            yield steps[start:number]
            start, size = number, 0
        size += weight
    yield steps[start:]


def _weight(step: Step) -> int:
    """About how many bytes a step takes."""
    result = b""
    if type(step) is End:
        result = step.completion.result or b""
    elif type(step) is Save:
        result = step.renewal.progress or b""
    elif type(step) is Swap:
        result = step.after.result or b""
    return 512 + 2 * len(result)
