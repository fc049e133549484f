"""Client sessions in DynamoDB, which has no clock: wrong clocks, lost replies, conflicts, and what is left behind."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from tests.integration.dynamodb_helpers import (
    Gateway,
    client,
    hold,
    items,
    make_table,
    new_table,
    one_session,
    opened,
)

from effectonce import Policy, Receiver, current
from effectonce._blocking import run
from effectonce.errors import InProgress, SessionExpired, StoreUnavailable
from effectonce.sessions import ClientSession, Request, Sessions
from effectonce.sessions._dynamodb import SLACK
from effectonce.stores.dynamodb import DynamoDBStore
from effectonce.testing.clocks import ManualClock

HOUR, MINUTE = 3600.0, 60.0
CONFLICT = {"CancellationReasons": [{"Code": "TransactionConflict"}, {"Code": "None"}]}


@pytest.fixture(autouse=True)
def _quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    one_session(monkeypatch)


class Server:
    """One of the processes that serve the same clients, with a clock of its own."""

    def __init__(self, store: DynamoDBStore, clock: ManualClock, lease: float, window: int) -> None:
        self.store, self.clock = store, clock
        self.receiver = Receiver(store)
        self.sessions = Sessions(self.receiver, lease=lease, window=window, policy=Policy(busy="reject"))
        self.ran: list[int] = []

    def handle(self, request: Request) -> Any:
        """Run a request."""
        return self.sessions.process(request, self.charge).value

    def charge(self, request: Request) -> int:
        self.ran.append(request.number)
        return request.number


@contextmanager
def serving(
    endpoint: str,
    table: str | None = None,
    ahead: float = 0.0,
    lease: float = HOUR,
    window: int = 512,
    **choices: Any,
) -> Iterator[Server]:
    """A server whose clock is so many seconds ahead of the others'."""
    clock = ManualClock()
    clock.advance(ahead)
    choices = {"skew": MINUTE, "clock": clock, "monotonic": clock, "create": False} | choices
    if table is None:
        make_table(endpoint, table := new_table())
    with opened(endpoint, table, **choices) as store:
        server = Server(store, clock, lease, window)
        yield server
        server.sessions.close()


class TestClocks:
    """A session is over when somebody has ended it in the table."""

    def test_what_one_server_has_told_to_be_over_no_other_executes(self, endpoint: str) -> None:
        """Their clocks are two hours apart, far beyond skew, and a lease is one."""
        with serving(endpoint) as slow, serving(endpoint, slow.store._table.name, ahead=2 * HOUR) as fast:
            opened = slow.sessions.open()
            assert slow.handle(Request(opened.client, 1)) == 1
            with pytest.raises(SessionExpired):
                fast.handle(Request(opened.client, 2))
            for number in (1, 2, 3):
                with pytest.raises(SessionExpired):
                    slow.handle(Request(opened.client, number))
            for act in (slow.sessions.touch, slow.sessions.resume, slow.sessions.end):
                with pytest.raises(SessionExpired):
                    act(opened.client)
            assert (slow.ran, fast.ran) == ([1], [])
            assert items(endpoint, slow.store) == {}

    @pytest.mark.parametrize("asked", ["touch", "resume", "end", "collect"])
    def test_whoever_says_so_has_ended_it(self, quick: str, asked: str) -> None:
        """A heartbeat, a restart, an end that comes too late, or a collection."""
        with serving(quick) as slow, serving(quick, slow.store._table.name, ahead=2 * HOUR) as fast:
            opened = slow.sessions.open()
            if asked == "collect":
                while not fast.sessions.collect():
                    pass
            else:
                with pytest.raises(SessionExpired):
                    getattr(fast.sessions, asked)(opened.client)
            with pytest.raises(SessionExpired):
                slow.handle(Request(opened.client, 1))

    def test_clocks_within_skew_agree(self, quick: str) -> None:
        """They are an hour apart, and so is the lease; nobody has to be told anything."""
        with ExitStack() as stack:
            slow = stack.enter_context(serving(quick, skew=2 * HOUR, lease=MINUTE))
            table = slow.store._table.name
            fast = stack.enter_context(serving(quick, table, ahead=HOUR, skew=2 * HOUR, lease=MINUTE))
            opened = slow.sessions.open()
            for number, server in enumerate((slow, fast, slow, fast, slow), 1):
                assert server.handle(Request(opened.client, number, number - 1)) == number
                assert server.sessions.touch(opened.client).acked == number - 1
            assert (slow.ran, fast.ran) == ([1, 3, 5], [2, 4])

    def test_a_lease_that_is_renewed_meanwhile_is_not_over(self, quick: str) -> None:
        """Between the look of one server and its last word another has heard of the client."""
        with ExitStack() as stack:
            gateway = stack.enter_context(Gateway(quick))
            hasty = stack.enter_context(serving(quick, create=True))
            table = hasty.store._table.name
            hasty = stack.enter_context(serving(gateway.endpoint, table))
            patient = stack.enter_context(serving(quick, table, skew=24 * HOUR))
            opened = patient.sessions.open()
            for server in (hasty, patient):
                server.clock.advance(3 * HOUR)

            def renewed(operation: str, request: dict[str, Any]) -> None:
                if operation == "DeleteItem":
                    patient.sessions.touch(opened.client)

            gateway.judge = renewed
            assert hasty.handle(Request(opened.client, 1)) == 1

    def test_a_server_that_runs_a_request_holds_its_session(self, quick: str) -> None:
        """A lease of the request's that is longer than the session's is not shortened by the next one's."""
        long, short = Policy(lease=10 * HOUR), Policy(lease=MINUTE)
        with serving(quick, lease=HOUR, skew=0.0) as server:
            opened = server.sessions.open()
            store = server.sessions.receiver.store
            claim = server.sessions.call_of(Request(opened.client, 1), b"", long).claim
            run(store.claim(claim))
            for number in (2, 3):
                server.sessions.process(Request(opened.client, number), server.charge, policy=short)
            server.clock.advance(9 * HOUR)
            server.sessions.collect(1000)
            assert server.sessions.touch(opened.client).epoch == 1
            server.clock.advance(2 * HOUR)
            with pytest.raises(SessionExpired):
                server.sessions.touch(opened.client)


class TestRequests:
    """How many requests each verb takes, and what comes of those that fail."""

    def test_round_trips(self, endpoint: str) -> None:
        """A new request is a transaction and a write; a repeat is a transaction that fails, and a write."""
        with Gateway(endpoint) as gateway, serving(gateway.endpoint) as server:
            store = server.sessions.receiver.store
            assert run(store.get("session||" + "0" * 32 + ":1")) is None
            gateway.counted()
            opened = server.sessions.open()
            assert gateway.counted() == {"Scan": 1, "PutItem": 1}
            for _ in range(2):
                server.clock.advance(1.0)
                server.handle(Request(opened.client, 1))
                assert gateway.counted() == {"TransactWriteItems": 1, "UpdateItem": 1}
            server.clock.advance(1.0)
            server.sessions.touch(opened.client)
            assert gateway.counted() == {"BatchGetItem": 1, "UpdateItem": 1}
            server.sessions.end(opened.client)
            assert gateway.counted() == {"BatchGetItem": 2, "DeleteItem": 1, "BatchExecuteStatement": 1}

    def test_acknowledged_answers_leave_some_at_a_time(self, quick: str) -> None:
        """As many as one batch deletes. All other requests, one after the other, take two round trips."""
        with Gateway(quick) as gateway, serving(gateway.endpoint) as server:
            opened = server.sessions.open()
            gateway.counted()
            for number in range(1, 101):
                server.handle(Request(opened.client, number, number - 1))
            assert gateway.counted() == {
                "TransactWriteItems": 100 + 3,  # three times there are more than that
                "UpdateItem": 100 + 3,
                "BatchGetItem": 3,
                "BatchExecuteStatement": 3,
            }

    @pytest.mark.parametrize("kind", ["claim", "completion", "touch"])
    def test_a_lost_reply_changes_nothing(self, quick: str, kind: str) -> None:
        """What was done is known again when it is sent again: the attempt's own name is in it."""
        operation = "TransactWriteItems" if kind == "claim" else "UpdateItem"
        with Gateway(quick) as gateway, serving(gateway.endpoint) as server:
            opened = server.sessions.open()
            lose_replies(gateway, operation, 1)
            if kind == "touch":
                assert server.sessions.touch(opened.client).epoch == 1
            assert server.handle(Request(opened.client, 1)) == 1
            assert server.handle(Request(opened.client, 1)) == 1
            assert server.ran == [1]

    def test_a_claim_nobody_heard_of_is_held_until_its_lease_was_watched(self, quick: str) -> None:
        """Every reply was lost, so that the client is told of the store's trouble and sends it again."""
        with Gateway(quick) as gateway, serving(gateway.endpoint) as server:
            opened = server.sessions.open()
            lose_replies(gateway, "TransactWriteItems", 10**6)
            request = Request(opened.client, 1)
            with pytest.raises(StoreUnavailable):
                server.handle(request)
            gateway.allow()
            assert server.ran == []
            for _ in range(2):
                with pytest.raises(InProgress):
                    server.handle(request)
            server.clock.advance(MINUTE * 10)
            outcome = server.sessions.process(request, server.charge)
            assert (outcome.fence, outcome.attempt, server.ran) == (2, 2, [1])

    @pytest.mark.parametrize("colour", ["blocking", "asyncio"])
    def test_transactions_that_get_in_each_others_way(self, quick: str, colour: str) -> None:
        """Sixteen callers at once; of every three transactions, and of every three writes, DynamoDB does one."""
        with Gateway(quick) as gateway, serving(gateway.endpoint) as server:
            opened = server.sessions.open()
            refuse_most(gateway)
            requests = [Request(opened.client, number) for number in range(1, 33)]

            async def charge(request: Request) -> int:
                return server.charge(request)

            async def crowd() -> list[Any]:
                asked = [server.sessions.aprocess(request, charge) for request in requests]
                return [outcome.value for outcome in await asyncio.gather(*asked)]

            if colour == "asyncio":
                answers = asyncio.run(crowd())
            else:
                with ThreadPoolExecutor(16) as callers:
                    answers = list(callers.map(server.handle, requests))
            assert answers == list(range(1, 33))
            assert sorted(server.ran) == list(range(1, 33))

    def test_conflicts_without_end_are_trouble(self, quick: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Which the client is told; nothing was run."""
        with Gateway(quick) as gateway, serving(gateway.endpoint) as server:
            opened = server.sessions.open()
            monkeypatch.setattr("effectonce.sessions._dynamodb.LAST_PAUSE", 0.0)
            conflict = (400, "TransactionCanceledException", CONFLICT)
            gateway.judge = lambda operation, _: conflict if operation.startswith("Transact") else None
            with pytest.raises(StoreUnavailable, match="Try again"):
                server.handle(Request(opened.client, 1))
            assert server.ran == []


class TestWhatIsLeft:
    """What is in the table."""

    def test_it_is_bounded_by_the_window(self, endpoint: str) -> None:
        """And some answers that are acknowledged and have not left yet. When the session ends there is nothing."""
        window, most = 4, 0
        with serving(endpoint, window=window) as server:
            session = ClientSession(server.sessions.open())
            for _ in range(30):
                requests = [session.begin() for _ in range(window)]
                for request in reversed(requests):
                    server.handle(request)
                for request in requests:
                    session.done(request)
                most = max(most, len(items(endpoint, server.store)))
            assert server.ran[-1] == 117
            assert window < most <= 1 + window + SLACK + window
            server.sessions.end(session.client)
            assert items(endpoint, server.store) == {}

    def test_what_runs_or_is_in_doubt_stays(self, quick: str) -> None:
        """Also below the mark, and as long as the session lives; one that crashed leaves when it was watched."""
        with serving(quick) as server:
            opened = server.sessions.open()
            store, sessions = server.sessions.receiver.store, server.sessions
            run(store.claim(sessions.call_of(Request(opened.client, 1), b"", Policy(lease=MINUTE)).claim))
            with pytest.raises(TimeoutError):
                sessions.process(Request(opened.client, 2), _hangs, policy=Policy(in_doubt=(TimeoutError,)))
            for number in range(3, 103):
                server.handle(Request(opened.client, number, number - 1))
            assert {1, 2} <= numbers(quick, server)
            server.clock.advance(2 * MINUTE)
            for number in range(103, 203):
                server.handle(Request(opened.client, number, number - 1))
            assert min(numbers(quick, server)) == 2

    def test_what_a_crash_has_left_is_collected(self, quick: str) -> None:
        """A session that is gone without its requests, and without the parts of a large answer."""
        with serving(quick) as server:
            opened, other = server.sessions.open(), server.sessions.open()
            for each in (opened, other):
                server.handle(Request(each.client, 1))
                server.sessions.process(Request(each.client, 2), lambda _: "x" * 900_000)
            server.handle(Request(opened.client, 3))
            homes = [key for key in items(quick, server.store) if key.count(":") == 1]
            lost = next(key for key in homes if f"{key}:3" in items(quick, server.store))
            client(quick).delete_item(TableName=server.store._table.name, Key={"k": {"S": lost}})
            for _ in range(16):
                server.sessions.collect(3)
            left = items(quick, server.store)
            assert len(left) == 1 + 2 + 3
            assert not any(key.startswith(lost) for key in left)
            assert server.sessions.process(Request(other.client, 2), _hangs).value == "x" * 900_000

    def test_a_large_answer_leaves_with_its_parts(self, quick: str) -> None:
        """It is too large for one item; so is the journal of a request that takes many steps."""
        with serving(quick) as server:
            opened = server.sessions.open()

            def book(request: Request) -> str:
                for number in range(3):
                    current().step(f"step {number}", lambda: "y" * 300_000)
                return "z" * (900_000 if request.number == 1 else 9)

            for number, size in ((1, 900_000), (2, 9), (1, 900_000)):
                assert server.sessions.process(Request(opened.client, number), book).value == "z" * size
            assert len(items(quick, server.store)) == 1 + 2 + 3
            for number in range(3, 3 + 2 * SLACK):
                server.handle(Request(opened.client, number, number - 1))
            assert min(numbers(quick, server)) > 1
            assert not any(key.count(":") > 2 for key in items(quick, server.store))

    def test_the_store_beside_it_takes_no_notice(self, quick: str) -> None:
        """Its lists, counts and sweeps are about records; one whose scope looks like a session is one."""
        with serving(quick) as server:
            opened = server.sessions.open()
            server.handle(Request(opened.client, 1))
            key = f"session:{'0' * 32}|charge||7"
            hold(server.store, key)
            assert [record.key for record in run(server.store.scan())] == [key]
            assert run(server.store.stats()).by_state == {"PENDING": 1}
            server.clock.advance(HOUR / 2)
            assert run(server.store.purge(1000)) == 0
            server.sessions.collect(1000)
            assert len(items(quick, server.store)) == 3
            assert server.handle(Request(opened.client, 1)) == 1
            assert server.ran == [1]


def _hangs(request: Request) -> str:
    raise TimeoutError


def numbers(endpoint: str, server: Server) -> set[int]:
    """The requests that are in the table."""
    return {int(key.split(":")[2]) for key in items(endpoint, server.store) if key.count(":") == 2}


def lose_replies(gateway: Gateway, operation: str, times: int) -> None:
    """Do what is asked so many times, and say that it failed."""
    left = [times]

    def judge(asked: str, request: dict[str, Any]) -> tuple[int, str] | None:
        if asked != operation or not left[0]:
            return None
        left[0] -= 1
        gateway.pass_on(asked, request)
        return 500, "InternalServerError"

    gateway.judge = judge


def refuse_most(gateway: Gateway) -> None:
    """Say of two in three writes that a transaction which is under way has the item."""
    lock, asked = threading.Lock(), Counter[str]()

    def judge(operation: str, request: dict[str, Any]) -> Any:
        with lock:
            asked[operation] += 1
            if asked[operation] % 3 == 0:
                return None
        if operation == "TransactWriteItems":
            return 400, "TransactionCanceledException", CONFLICT
        return (400, "TransactionConflictException") if operation == "UpdateItem" else None

    gateway.judge = judge
