"""Client sessions in DynamoDB: the real code of several servers, in every order of their requests to one table.

The servers' clocks are hours apart. The table is a dictionary that understands the conditions which DynamoDB is sent.
What several callers do at once is cut where each of them waits for the table, and every way to put the pieces together
is gone through; after each piece the invariants have to hold. The seeded bugs show what happens when they don't.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from functools import cache
from itertools import combinations_with_replacement, count
from types import CodeType
from typing import Any

import pytest

from effectonce._records import Completion, Ending, State, Verdict, make
from effectonce.errors import Fenced, SessionExpired, StaleRequest
from effectonce.sessions import _dynamodb, _dynamodb_shelf
from effectonce.sessions._dynamodb import DynamoDBDesk, DynamoDBSessions
from effectonce.sessions._dynamodb_shelf import Shelf, name_of, until_of
from effectonce.sessions._rules import Contact, SessionClaim, key_of, place_of
from effectonce.stores._dynamodb_items import Watches
from effectonce.stores._dynamodb_writes import Item, Put, Update, request_of

SESSION = "5" * 32
HOME = name_of(SESSION)
LEASE = 60.0
OWNERS = count()


class Broken(AssertionError):
    """An invariant does not hold."""


def check(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


# A table


class Missing:
    """An attribute that is not there: nothing is true of it."""

    def __eq__(self, other: object) -> bool:
        return False

    __lt__ = __le__ = __gt__ = __ge__ = __ne__ = __eq__  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


def value_of(attribute: dict[str, Any] | None) -> Any:
    if attribute is None:
        return Missing()
    ((kind, value),) = attribute.items()
    return {"N": float, "NS": lambda numbers: {*map(float, numbers)}}.get(kind, lambda same: same)(value)


def holds(condition: str, item: Item, values: Item) -> bool:
    """Whether a condition is true of an item, which may be empty."""
    known: dict[str, Any] = {
        "_exists": lambda name: name in item,
        "_contains": lambda numbers, number: isinstance(numbers, set) and number in numbers,
        "_size": lambda numbers: Missing() if isinstance(numbers, Missing) else len(numbers),
        "_value": lambda name: value_of(item.get(name)),
        "_given": lambda name: value_of(values[name]),
    }
    return bool(eval(compiled(condition), known))


@cache
def compiled(condition: str) -> CodeType:
    """A condition in Python."""
    text = re.sub(r"attribute_not_exists\((\w)\)", r"(not _exists('\1'))", condition)
    text = re.sub(r"attribute_exists\((\w)\)", r"_exists('\1')", text)
    text = re.sub(r"\b(contains|size)\(", r"_\1(", text)
    text = re.sub(r"(:\w+)", r"_given('\1')", text)
    text = re.sub(r"(?<!['\w:])([a-zA-Z])(?![\w'(])", r"_value('\1')", text)
    text = text.replace("<>", "!=").replace(" = ", " == ")
    for word in ("AND", "OR", "NOT"):
        text = text.replace(f"{word} ", f"{word.lower()} ")
    return compile(text, condition, "eval")


def updated(expression: str, item: Item, values: Item) -> Item:
    """An item after an update."""
    after, clauses = dict(item), re.split(r"\b(SET|REMOVE|ADD|DELETE) ", expression)[1:]
    for verb, text in zip(clauses[::2], clauses[1::2], strict=True):
        for term in text.strip().split(", "):
            if verb == "SET":
                name, _, right = term.partition(" = ")
                terms = [values[part] if part[0] == ":" else item[part] for part in right.split(" + ")]
                after[name] = terms[0] if len(terms) == 1 else {"N": repr(sum(map(value_of, terms)))}
            elif verb == "REMOVE":
                after.pop(term, None)
            else:
                name, given = term.split(" ")
                before = {*after.get(name, {"NS": ()})["NS"]}
                change = {*values[given]["NS"]}
                left = before | change if verb == "ADD" else before - change
                after[name] = {"NS": sorted(left)}
                if not left:
                    del after[name]
    return after


class Table:
    """What is in the table, as one of the servers sees it."""

    def __init__(self, items: dict[str, Item]) -> None:
        self.items = items
        self.owner: Server

    def read_many(self, keys: Sequence[str], *, as_now: bool = True) -> dict[str, Item]:
        return {key: self.items[key] for key in keys if key in self.items}

    def pages(self, start: Any, **choices: Any) -> Iterator[tuple[list[Item], None]]:
        yield list(self.items.values()), None

    def write(self, write: Any) -> Item | None:
        refused = self.transact([write])
        return None if refused is None else refused[write.key]

    def write_many(self, writes: Sequence[Any]) -> list[Item | None]:
        return [self.write(write) for write in writes]

    def transact(self, writes: Sequence[Any]) -> dict[str, Item] | None:
        requests = [(write, *request_of(write)) for write in writes]
        refused = {}
        for write, _, request in requests:
            item, condition = self.items.get(write.key, {}), request.get("ConditionExpression", "")
            if condition and not holds(condition, item, request.get("ExpressionAttributeValues", {})):
                refused[write.key] = item
        if refused:
            return refused
        for write, verb, request in requests:
            item = self.items.get(write.key, {})
            if verb == "Delete":
                self.owner.deletes(self.items.pop(write.key, {}))
            elif isinstance(write, Put):
                self.items[write.key] = write.item
            else:
                values = request["ExpressionAttributeValues"]
                self.items[write.key] = updated(request["UpdateExpression"], item, values)
        if requests[0][1] != "Delete" and "DELETE q" not in str(requests[0]):  # that is tidied up
            self.owner.world.notes_a_change()
        return None


# Servers and what is asked of them


class Turn:
    """Where a caller waits for the table, and others may go on."""

    def __await__(self) -> Generator[None]:
        yield


class Server:
    """The real session store, over a table and a clock that stands still."""

    def __init__(self, world: World, ahead: float, skew: float) -> None:
        self.world, self.ahead, self._skew = world, ahead, skew
        self._table = Table(world.items)
        self._table.owner = self
        self._watches = Watches(self.clock)
        self._last = 0
        shelf = Shelf(self)  # type: ignore[arg-type]
        self.store = DynamoDBSessions(shelf, self)

    def clock(self) -> float:
        return 1_000_000.0 + self.ahead

    def _stamp(self, now: float) -> int:
        self._last += 1
        return self._last

    async def errand(self, job: Callable[[], Any]) -> Any:
        await Turn()
        return job()

    async def rest(self, seconds: float) -> None:
        """Nobody is told to hurry."""

    def deletes(self, item: Item) -> None:
        """A session leaves when its client says so, or when its lease is over for who ends it."""
        if item and item["k"]["S"] == HOME and not self.world.is_ended:
            over = until_of(item) + self._skew <= self.clock()
            check(over, "a session was ended whose lease lives")


class World:
    """A session with two requests that are done, and what its callers were told."""

    def __init__(self, items: dict[str, Item] | None = None) -> None:
        self.items = dict(begun() if items is None else items)
        self.told_over = self.is_ended = False
        self.granted = [1, 2]
        self.slow, self.fast = Server(self, 0.0, 0.0), Server(self, 2 * LEASE, 0.0)
        self.patient = Server(self, 2 * LEASE, 10 * LEASE)
        self.caller = 0
        self.changed: dict[int, tuple[bool, Item]] = {}

    def notes_a_change(self) -> None:
        """What a caller has written is done from now on, whatever it waits for after that."""
        self.changed[self.caller] = self.told_over, self.items.get(HOME, {})

    def as_it_was(self) -> tuple[bool, Item]:
        """Whether the session was told to be over, and what it was, when this caller was heard."""
        return self.changed.pop(self.caller, (self.told_over, self.items.get(HOME, {})))

    async def claims(self, server: Server, number: int, acked: int) -> None:
        """A client sends a request, and it is executed if that is granted."""
        key, owner = key_of("", SESSION, number), b"%d" % next(OWNERS)
        claim: Any = make(SessionClaim, (key, owner, b"", 30.0, 1e9, False, None, True))
        claim.place = place_of(SESSION, number, acked, 1, 512)
        try:
            decision = await server.store.claim(claim)
        except SessionExpired:
            self.hears_that_it_is_over()
            return
        except (Fenced, StaleRequest):
            return
        was_over, home = self.as_it_was()
        check(not was_over, "a session that was told to be over gave an answer")
        if decision.verdict is Verdict.CLAIMED:
            check(number not in self.granted, "a request is executed again")
            check(bool(home), "a request is executed in a session that is not there")
            check(int(float(home["w"]["N"])) <= number, "a request below the mark is executed")
            check(home["e"]["N"] == "1", "a client that is fenced out had a request executed")
            self.granted.append(number)
            assert decision.record is not None
            ending = Completion(claim.key, claim.owner, decision.record.fence, State.COMPLETED, b"1", 1e9)
            done = await server.store.complete(ending)
            check(done is Ending.DONE or HOME not in self.items, "an answer was lost")

    async def contacts(self, server: Server, kind: str, acked: int = 0) -> None:
        """A client wants something of its session itself."""
        self.is_ended |= kind == "end"
        try:
            await server.store.contact(Contact(kind, SESSION, 1, acked + 1))
        except SessionExpired:
            self.hears_that_it_is_over()
            return
        except Fenced:
            return
        was_over, _ = self.as_it_was()
        check(not was_over or kind == "end", "a session that was told to be over came to life again")

    async def collects(self, server: Server) -> None:
        await server.store.purge(100)

    def hears_that_it_is_over(self) -> None:
        check(HOME not in self.items, "a session was told to be over that is there")
        self.told_over = True

    def at_last(self) -> None:
        """What a client may still ask for is there."""
        if HOME in self.items:
            low = int(float(self.items[HOME]["w"]["N"]))
            for number in self.granted:
                check(number < low or name_of(SESSION, number) in self.items, "an answer was forgotten")
        else:
            finish(self.collects(self.slow))
            check(not self.items, "something was left behind")


@cache
def begun() -> dict[str, Item]:
    """What is in the table when it begins."""
    world = World({})
    world.granted = []
    finish(world.slow.store.contact(Contact("open", SESSION, lease=LEASE)))
    for number in (1, 2):
        finish(world.claims(world.slow, number, 0))
    return world.items


def finish(task: Coroutine[Any, Any, Any]) -> None:
    while advance(task):
        pass


def advance(task: Coroutine[Any, Any, Any]) -> bool:
    try:
        task.send(None)
    except StopIteration:
        return False
    return True


Deed = Callable[[World], Coroutine[Any, Any, Any]]
DEEDS: dict[str, Deed] = {
    "the fast server gets request 3": lambda world: world.claims(world.fast, 3, 0),
    "the slow server gets request 3": lambda world: world.claims(world.slow, 3, 0),
    "the slow server gets request 4, which acknowledges 2": lambda world: world.claims(world.slow, 4, 2),
    "the slow server gets request 5, which gives 3 up": lambda world: world.claims(world.slow, 5, 4),
    "the slow server gets request 1 again": lambda world: world.claims(world.slow, 1, 0),
    "the slow server gets a heartbeat": lambda world: world.contacts(world.slow, "touch", 2),
    "the patient server gets a heartbeat": lambda world: world.contacts(world.patient, "touch"),
    "the fast server gets a heartbeat": lambda world: world.contacts(world.fast, "touch"),
    "the client restarts": lambda world: world.contacts(world.slow, "resume"),
    "the client ends the session": lambda world: world.contacts(world.slow, "end"),
    "the fast server collects": lambda world: world.collects(world.fast),
}


THREE = {
    "differ about a session": (
        "the fast server gets request 3",
        "the slow server gets request 4, which acknowledges 2",
        "the slow server gets request 1 again",
    ),
    "move the mark": (
        "the slow server gets request 3",
        "the slow server gets a heartbeat",
        "the slow server gets request 5, which gives 3 up",
    ),
}


def explore(names: Sequence[str]) -> int:
    """Do some deeds at once, in every order of their pieces: how many orders there are."""
    orders, schedule = 0, list[int]()
    while True:
        orders += 1
        width = follow(names, schedule)
        while schedule and schedule[-1] + 1 >= width[len(schedule) - 1]:
            schedule.pop()
        if not schedule:
            return orders
        schedule[-1] += 1


def follow(names: Sequence[str], schedule: list[int]) -> list[int]:
    """Go by a schedule, and on from its end with whoever is first: how many could go on at each point."""
    world, width, told = World(), list[int](), list[str]()
    tasks = [(name, DEEDS[name](world)) for name in names]
    for _, task in tasks:
        advance(task)  # to where it first waits for the table
    try:
        while tasks:
            at = len(width)
            if at == len(schedule):
                schedule.append(0)
            width.append(len(tasks))
            name, task = tasks[schedule[at]]
            told.append(name)
            world.caller = id(task)
            if not advance(task):
                tasks.pop(schedule[at])
        world.at_last()
    except Broken as broken:
        story = "\n  ".join(told)
        raise Broken(f"{broken}:\n  {story}") from None
    finally:
        for _, task in tasks:
            task.close()
    return width


@pytest.fixture(autouse=True)
def _drops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is acknowledged leave as early as it can."""
    monkeypatch.setattr(_dynamodb, "SLACK", 1)


def test_any_two_at_once_keep_every_invariant() -> None:
    """Nothing runs twice, below the mark, or in a session that was told to be over; nothing is left behind."""
    orders = sum(map(explore, combinations_with_replacement(DEEDS, 2)))
    print(orders)
    assert orders > 500, "there is more that can happen"


@pytest.mark.parametrize("what", THREE)
def test_three_at_once_keep_every_invariant(what: str) -> None:
    """Requests at servers that differ about whether a session is over; requests that are given up on their way."""
    orders = explore(THREE[what])
    print(orders)
    assert orders > 50, "there is more that can happen"


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("first", range(len(DEEDS)))
def test_any_three_at_once_keep_every_invariant(first: int) -> None:
    """The same with everything else."""
    names = [*DEEDS]
    orders = sum(explore((names[first], *two)) for two in combinations_with_replacement(names[first:], 2))
    print(orders)
    assert orders > 5, "there is more that can happen"


# Seeded bugs


def it_is_told_before_it_is_ended(patch: pytest.MonkeyPatch) -> None:
    """The clock says that it is over, doesn't it?"""
    patch.setattr(Shelf, "end", lambda self, item: True)


def it_is_ended_without_another_look(patch: pytest.MonkeyPatch) -> None:
    """Its lease was over a moment ago."""
    patch.setattr(_dynamodb_shelf, "as_seen", lambda home: {})


def the_mark_is_not_asked(patch: pytest.MonkeyPatch) -> None:
    """That a request is not there is enough."""
    asked = _dynamodb.AS_USUAL.replace("w <= :w AND", "").replace("AND NOT contains(q, :number)", "")
    patch.setattr(_dynamodb, "AS_USUAL", asked)


def the_epoch_is_not_asked(patch: pytest.MonkeyPatch) -> None:
    """Whoever knows the number is the client."""
    patch.setattr(_dynamodb, "AS_USUAL", _dynamodb.AS_USUAL.replace("e = :e AND ", ""))


def the_mark_is_not_asked_again(patch: pytest.MonkeyPatch) -> None:
    """It was seen a moment ago."""
    real = DynamoDBDesk.writes

    def writes(self: DynamoDBDesk) -> list[Any]:
        return [
            write._replace(condition=write.condition.replace("w = :as_w AND ", ""))
            if isinstance(write, Update)
            else write
            for write in real(self)
        ]

    patch.setattr(DynamoDBDesk, "writes", writes)


def sessions_are_made_on_the_fly(patch: pytest.MonkeyPatch) -> None:
    """An update makes an item where there is none."""
    real = _dynamodb.AS_USUAL
    patch.setattr(_dynamodb, "AS_USUAL", f"attribute_not_exists(k) OR ({real})")
    patch.setattr(_dynamodb, "CLAIM", "SET u = :now, e = :e, d = :hold, w = :w ADD q :noted")


def claims_are_two_writes(patch: pytest.MonkeyPatch) -> None:
    """First the session is looked after, then the request is put in its place."""

    async def done(self: DynamoDBSessions, writes: Sequence[Any]) -> Any:
        for write in writes:
            item = await self.errand(lambda: self.shelf.table.write(write))  # noqa: B023
            if item is not None:
                return {write.key: item}
        return None

    patch.setattr(DynamoDBSessions, "_done", done)


@pytest.mark.parametrize(
    "bug",
    [
        it_is_told_before_it_is_ended,
        it_is_ended_without_another_look,
        the_mark_is_not_asked,
        the_epoch_is_not_asked,
        the_mark_is_not_asked_again,
        sessions_are_made_on_the_fly,
        claims_are_two_writes,
    ],
    ids=lambda bug: bug.__name__,
)
def test_a_seeded_bug_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them, with a story that tells how it comes to harm."""
    bug(monkeypatch)
    with pytest.raises(Broken) as found:
        for names in (*combinations_with_replacement(DEEDS, 2), *THREE.values()):
            explore(names)
    print(found.value)
