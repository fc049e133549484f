"""Client sessions keep their rules on every store that has them, for callers of both colours."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from tests.integration.dynamodb_helpers import one_session

from effectonce import KeyReused, NotApplied, Outcome, Policy, Receiver, current
from effectonce._blocking import run
from effectonce._records import Completion, Ending, State, Verdict
from effectonce.errors import (
    BadRequest,
    EffectOnceError,
    Fenced,
    InDoubt,
    InProgress,
    SessionExpired,
    StaleRequest,
    WindowExceeded,
)
from effectonce.hooks import Event
from effectonce.keys import new_owner
from effectonce.sessions import ClientSession, Opened, Request, Sessions
from effectonce.sessions._dynamodb import DynamoDBSessions
from effectonce.stores import Store
from effectonce.stores.dynamodb import DynamoDBStore
from effectonce.testing.clocks import ManualClock, wait_until

STORES = ["memory", "sqlite", "valkey", "valkey_cluster", "postgres", "mariadb", "dynamodb", "dynamodb_local"]
SHORT, LONG = 0.25, 600.0
ADA = "ada"


class Shop:
    """A server with a handler that counts, and sessions of any lease."""

    def __init__(self, url: str | Receiver) -> None:
        self.receiver = Receiver(url) if isinstance(url, str) else url
        self.charged: list[int] = []
        self._made: list[Sessions] = []

    def sessions(self, lease: float = LONG, window: int = 512, **policy: Any) -> Sessions:
        made = Sessions(self.receiver, lease=lease, window=window, policy=Policy(**policy))
        self._made.append(made)
        return made

    def charge(self, request: Request) -> dict[str, int]:
        self.charged.append(request.number)
        return {"charged": request.number}

    def close(self) -> None:
        for sessions in self._made:
            sessions.close()
        self.receiver.close()


@pytest.fixture(params=STORES)
def shop(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    kind = request.param
    if kind == "memory":
        url = "memory://"
    elif kind == "sqlite":
        url = f"sqlite:///{tmp_path}/effects.db"
    else:
        url = request.getfixturevalue(kind).url
        if kind in ("postgres", "mariadb"):
            url += "?table=session_tests"
    one_session(monkeypatch)
    made = Shop(Receiver(dynamodb_store(url)) if kind.startswith("dynamodb") else url)
    yield made
    made.close()


def dynamodb_store(url: str) -> DynamoDBStore:
    """Its clocks are this process's: here they stand still until ``later``."""
    clock = ManualClock()
    place: Any = {"region": "eu-central-1", "endpoint": url.partition("endpoint=")[2], "timeout": 60.0}
    return DynamoDBStore("session-tests", **place, skew=0.0, clock=clock, monotonic=clock)


def later(sessions: Sessions, seconds: float) -> None:
    """Wait until so many seconds have passed on the store's clock."""
    store = sessions.receiver.store
    if isinstance(store, DynamoDBSessions):
        cast("ManualClock", store.shelf.store.clock).advance(seconds)
        return
    end = run(store.now()) + seconds
    wait_until(lambda: run(store.now()) > end)


def claim_of(sessions: Sessions, request: Request, **policy: Any) -> Any:
    return sessions.call_of(request, b"asked", Policy(**policy), scope=ADA).claim


def left(store: Store, key: str) -> float:
    """How long the lease of a request lasts."""
    held = run(store.get(key))
    return held.lease_until - run(store.now()) if held else 0.0


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(EffectOnceError) as refused:
        action()
    return f"{type(refused.value).__name__}: {refused.value}"


def test_a_number_runs_once_and_every_repeat_gets_the_first_answer(shop: Shop) -> None:
    """In both colours, which share their sessions."""
    sessions = shop.sessions()
    client = ClientSession(sessions.open(scope=ADA))

    async def charge(request: Request) -> dict[str, int]:
        return shop.charge(request)

    async def story() -> list[Outcome[Any]]:
        return [await sessions.aprocess(request, charge, scope=ADA) for request in (first, second)]

    first, second = client.begin({"cents": 500}), client.begin({"cents": 700})
    outcomes = [sessions.process(first, shop.charge, scope=ADA), *asyncio.run(story())]
    outcomes.append(sessions.process(second, shop.charge, scope=ADA))
    assert [outcome.replayed for outcome in outcomes] == [False, True, False, True]
    assert [outcome.value for outcome in outcomes] == [{"charged": number} for number in (1, 1, 2, 2)]
    assert shop.charged == [1, 2]


def test_several_are_in_flight_and_arrive_in_any_order(shop: Shop) -> None:
    """A number that is not there was never seen, also when a higher one was."""
    sessions = shop.sessions()
    client = ClientSession(sessions.open(scope=ADA))
    requests = [client.begin(number) for number in range(5)]
    for request in reversed(requests):
        assert sessions.process(request, shop.charge, scope=ADA).value == {"charged": request.number}
    assert shop.charged == [5, 4, 3, 2, 1]


def test_what_is_acknowledged_is_forgotten_and_never_runs_again(shop: Shop) -> None:
    """The mark moves with the next contact; nothing else makes a request leave."""
    sessions = shop.sessions()
    client = ClientSession(sessions.open(scope=ADA))
    first, second = client.begin(), client.begin()
    for request in (second, first):
        sessions.process(request, shop.charge, scope=ADA)
    client.done(second)
    third = client.begin()
    sessions.process(third, shop.charge, scope=ADA)
    store = sessions.receiver.store
    assert all(run(store.get(claim_of(sessions, request).key)) for request in (first, second, third))
    client.done(first)
    sessions.process(client.again(third), shop.charge, scope=ADA)
    assert [bool(run(store.get(claim_of(sessions, r).key))) for r in (first, second, third)] == [
        False,
        False,
        True,
    ]
    for request in (first, second, first._replace(payload="another")):
        with pytest.raises(StaleRequest, match="never runs again"):
            sessions.process(request, shop.charge, scope=ADA)
    assert shop.charged == [2, 1, 3]


def test_the_mark_never_moves_back(shop: Shop) -> None:
    """A request that was held up says less than is known; it changes nothing."""
    sessions = shop.sessions()
    opened = sessions.open(scope=ADA)
    sessions.process(Request(opened.client, 9, 8), shop.charge, scope=ADA)
    assert sessions.touch(opened.client, acked=3, scope=ADA).acked == 8
    assert sessions.process(Request(opened.client, 9, 2), shop.charge, scope=ADA).replayed
    with pytest.raises(StaleRequest):
        sessions.process(Request(opened.client, 8, 2), shop.charge, scope=ADA)
    assert shop.charged == [9]


def test_a_jump_of_the_mark_over_many_numbers_drops_what_is_there(shop: Shop) -> None:
    """However far it is."""
    sessions = shop.sessions()
    opened = sessions.open(scope=ADA)
    early = Request(opened.client, 2, 0)
    sessions.process(early, shop.charge, scope=ADA)
    far = Request(opened.client, 10**12, 10**12 - 1)
    sessions.process(far, shop.charge, scope=ADA)
    assert run(sessions.receiver.store.get(claim_of(sessions, early).key)) is None
    assert sessions.touch(opened.client, acked=0, scope=ADA).acked == 10**12 - 1


@pytest.mark.parametrize(
    ("number", "acked", "epoch", "error"),
    [
        (0, 0, 1, BadRequest),
        (-1, 0, 1, BadRequest),
        (1.5, 0, 1, BadRequest),
        ("1", 0, 1, BadRequest),
        (True, 0, 1, BadRequest),
        (2**53, 2**53 - 1, 1, BadRequest),
        (1, -1, 1, BadRequest),
        (1, 1, 1, BadRequest),
        (5, 7, 1, BadRequest),
        (1, 0, 0, BadRequest),
        (1, 0, 2, Fenced),
        (5, 0, 1, WindowExceeded),
        (2**53 - 1, 0, 1, WindowExceeded),
    ],
)
def test_a_place_that_no_request_can_have_is_refused(
    shop: Shop, number: Any, acked: Any, epoch: Any, error: type[Exception]
) -> None:
    """Nothing is executed, and nothing changes for the session."""
    sessions = shop.sessions(window=4)
    opened = sessions.open(scope=ADA)
    with pytest.raises(error):
        sessions.process(Request(opened.client, number, acked, None, epoch), shop.charge, scope=ADA)
    assert sessions.process(Request(opened.client, 4), shop.charge, scope=ADA).value == {"charged": 4}
    assert shop.charged == [4]


@pytest.mark.parametrize("scope", [None, 7, b"ada", ["ada"], "a\x00b", "\ud800"], ids=repr)
def test_a_scope_that_names_nobody_is_refused_with_advice(scope: Any) -> None:
    """When the session is opened, not with its first request."""
    with Receiver("memory://") as receiver:
        sessions = Sessions(receiver)
        client = sessions.open(scope=ADA).client
        for action in (
            lambda: sessions.open(scope=scope),
            lambda: asyncio.run(sessions.aopen(scope=scope)),
            lambda: sessions.resume(client, scope=scope),
            lambda: sessions.touch(client, scope=scope),
            lambda: sessions.end(client, scope=scope),
            lambda: sessions.process(Request(client, 1), lambda _: 1, scope=scope),
        ):
            assert "The scope" in refusal(action)
        assert sessions.touch(client, scope=ADA).epoch == 1
        sessions.close()


def test_forged_and_foreign_ids_are_answered_like_ids_that_never_were(shop: Shop) -> None:
    """Word for word: an attacker can't tell a session of another from none. Nothing is executed or made."""
    sessions = shop.sessions()
    opened = sessions.open(scope=ADA)
    ids: list[Any] = ["0" * 32, opened.client.upper() + "!", "", "x" * 10_000, "é" * 32, "a\0b", None, 7]
    refusals = {
        refusal(lambda: sessions.process(Request(client, 1), shop.charge, scope=ADA))  # noqa: B023
        for client in ids
    }
    for action in (
        lambda: sessions.process(Request(opened.client, 1), shop.charge, scope="bob"),
        lambda: sessions.process(Request(opened.client, 1), shop.charge),
        lambda: sessions.touch(opened.client, scope="bob"),
        lambda: sessions.resume(opened.client, scope="bob"),
        lambda: sessions.end(opened.client, scope="bob"),
        lambda: sessions.end("0" * 32, scope=ADA),
    ):
        refusals.add(refusal(action))
    assert len(refusals) == 1
    assert refusals.pop().startswith("SessionExpired")
    assert shop.charged == []
    assert sessions.touch(opened.client, scope=ADA).epoch == 1
    assert opened.client not in repr(opened) + repr(Request(opened.client, 1))


def test_who_listens_hears_of_refusals(tmp_path: Path) -> None:
    """By a hash of scope and id, and why."""
    events: list[Event] = []
    with Receiver("memory://", hooks=[events.append]) as receiver:
        sessions = Sessions(receiver)
        opened = sessions.open(scope=ADA)
        sessions.process(Request(opened.client, 2, 1), lambda request: 1, scope=ADA)
        refusal(lambda: sessions.process(Request(opened.client, 1), lambda request: 1, scope=ADA))
        refusal(lambda: sessions.process(Request("0" * 32, 1), lambda request: 1, scope=ADA))
        sessions.close()
    told = [(event.kind, event.detail) for event in events]
    assert told[-2:] == [("late", "StaleRequest"), ("late", "SessionExpired")]
    assert [kind for kind, _ in told[:2]] == ["claimed", "completed"]
    assert not any(opened.client in event.key for event in events)


def test_client_ids_cant_be_guessed_and_are_not_stored(shop: Shop) -> None:
    """128 random bits each; keys and errors have a hash of scope and id."""
    sessions = shop.sessions()
    ids = {sessions.open(scope=ADA).client for _ in range(50)}
    assert len(ids) == 50
    assert {len(bytes.fromhex(client)) for client in ids} == {16}
    assert not any(client in claim_of(sessions, Request(client, 1)).key for client in ids)


def test_another_payload_under_a_number_is_a_mistake(shop: Shop) -> None:
    """It is refused as a key that is used twice, also after an error has released it."""
    sessions = shop.sessions()
    opened = sessions.open(scope=ADA)
    sessions.process(Request(opened.client, 1, 0, "a"), shop.charge, scope=ADA)
    with pytest.raises(KeyReused):
        sessions.process(Request(opened.client, 1, 0, "b"), shop.charge, scope=ADA)
    assert shop.charged == [1]


def test_an_error_releases_the_number_and_one_that_is_remembered_is_an_answer(shop: Shop) -> None:
    """By the policy, as everywhere."""
    sessions = shop.sessions(remember=(LookupError,))
    opened = sessions.open(scope=ADA)
    errors: list[Exception] = [ValueError("down"), NotApplied("no"), LookupError("declined")]

    def fails(request: Request) -> None:
        shop.charge(request)
        raise errors.pop(0)

    request = Request(opened.client, 1)
    for kind in (ValueError, NotApplied, LookupError, LookupError):
        with pytest.raises(kind):
            sessions.process(request, fails, scope=ADA)
    assert shop.charged == [1, 1, 1]


def test_a_session_whose_lease_is_over_never_executes_and_is_never_made_again(shop: Shop) -> None:
    """Not for a repeat, not for a new number, not by resuming; the client has to open another."""
    sessions = shop.sessions(lease=SHORT)
    opened = sessions.open(scope=ADA)
    sessions.process(Request(opened.client, 1), shop.charge, scope=ADA, policy=Policy(lease=SHORT))
    later(sessions, SHORT)
    for _ in range(2):
        for number in (1, 2):
            with pytest.raises(SessionExpired):
                sessions.process(Request(opened.client, number), shop.charge, scope=ADA)
        for act in (sessions.touch, sessions.resume, sessions.end):
            with pytest.raises(SessionExpired):
                act(opened.client, scope=ADA)
    assert shop.charged == [1]
    assert sessions.open(scope=ADA).client != opened.client


def test_contact_renews_the_lease(shop: Shop) -> None:
    """A request, a repeat, a stale one or a heartbeat; what is not valid does not."""
    sessions = shop.sessions(lease=1.2)
    opened = sessions.open(scope=ADA)
    terms = Policy(lease=SHORT)
    contacts: list[Callable[[], object]] = [
        lambda: sessions.process(Request(opened.client, 2, 1), shop.charge, scope=ADA, policy=terms),
        lambda: sessions.process(Request(opened.client, 2, 1), shop.charge, scope=ADA, policy=terms),
        lambda: refusal(
            lambda: sessions.process(Request(opened.client, 1), shop.charge, scope=ADA, policy=terms)
        ),
        lambda: sessions.touch(opened.client, scope=ADA),
    ]
    for contact in contacts:
        later(sessions, 0.5)
        contact()
    later(sessions, 0.5)
    assert sessions.touch(opened.client, scope=ADA).client == opened.client


def test_a_session_with_a_request_running_is_not_collected(shop: Shop) -> None:
    """However short its lease is: the one of the request keeps it, for as long as that is renewed."""
    sessions = shop.sessions(lease=SHORT)
    opened = sessions.open(scope=ADA)
    terms = Policy(lease=1.2)

    def slow(request: Request) -> str:
        store, key = sessions.receiver.store, claim_of(sessions, request).key
        for _ in range(3):
            later(sessions, 0.5)
            wait_until(lambda: left(store, key) > 0.75)  # it was renewed
        sessions.collect(1000)
        return "done"

    assert sessions.process(Request(opened.client, 1), slow, scope=ADA, policy=terms).value == "done"
    assert sessions.process(Request(opened.client, 1), slow, scope=ADA, policy=terms).replayed


def test_collecting_forgets_sessions_and_their_requests(shop: Shop) -> None:
    """By a call, and a few at a time with every new session."""
    sessions = shop.sessions(lease=SHORT)
    terms = Policy(lease=SHORT)
    gone = []
    for _ in range(3):
        request = Request(sessions.open(scope=ADA).client, 1)
        sessions.process(request, shop.charge, scope=ADA, policy=terms)
        gone.append(claim_of(sessions, request).key)
    later(sessions, SHORT)
    store = sessions.receiver.store
    wait_until(lambda: (sessions.collect(10_000), not any(run(store.get(key)) for key in gone))[1])


def test_an_attempt_that_crashed_is_taken_over(shop: Shop) -> None:
    """When its lease is over; until then its number is busy. The late one's answer is refused."""
    sessions = shop.sessions(busy="reject")
    opened = sessions.open(scope=ADA)
    request = Request(opened.client, 1)
    store = sessions.receiver.store
    dead = run(store.claim(sessions.call_of(request, b"", Policy(lease=SHORT), scope=ADA).claim)).record
    assert dead is not None
    with pytest.raises(InProgress):
        sessions.process(request, shop.charge, scope=ADA)
    later(sessions, SHORT)
    outcome = sessions.process(request, shop.charge, scope=ADA)
    assert (outcome.attempt, outcome.fence) == (2, 2)
    late = Completion(dead.key, dead.owner, dead.fence, State.COMPLETED, b'"late"', 1.0)
    assert run(store.complete(late)) is Ending.FENCED
    assert sessions.process(request, shop.charge, scope=ADA).value == {"charged": 1}


def test_every_command_may_be_sent_twice(shop: Shop) -> None:
    """A claim by the same owner gets the same fence, an ending the same answer."""
    sessions = shop.sessions()
    opened = sessions.open(scope=ADA)
    claim = claim_of(sessions, Request(opened.client, 1), lease=LONG)
    store = sessions.receiver.store
    one, two = run(store.claim(claim)), run(store.claim(claim))
    assert one.verdict is two.verdict is Verdict.CLAIMED
    assert one.record is not None and two.record is not None
    assert one.record.fence == two.record.fence
    end = Completion(claim.key, claim.owner, one.record.fence, State.COMPLETED, b"1", 1.0)
    assert [run(store.complete(end)) for _ in range(2)] == [Ending.DONE, Ending.REPEATED]
    assert run(store.complete(end._replace(owner=new_owner(), result=b"2"))) is Ending.FENCED


def test_a_request_that_runs_is_not_dropped_when_its_client_gives_it_up(shop: Shop) -> None:
    """It ends undisturbed; then it is gone, and it never runs again."""
    sessions = shop.sessions()
    client = ClientSession(sessions.open(scope=ADA))
    given_up, following = client.begin(), client.begin()

    def slow(request: Request) -> str:
        client.give_up(given_up)
        sessions.process(client.again(following), shop.charge, scope=ADA)
        key = claim_of(sessions, given_up).key
        held = run(sessions.receiver.store.get(key))
        assert held is not None and held.state is State.PENDING
        return "done"

    assert sessions.process(given_up, slow, scope=ADA).value == "done"
    client.done(following)
    sessions.process(client.begin(), shop.charge, scope=ADA)
    assert run(sessions.receiver.store.get(claim_of(sessions, given_up).key)) is None
    with pytest.raises(StaleRequest):
        sessions.process(given_up, slow, scope=ADA)


def test_a_doubt_outlasts_the_mark(shop: Shop) -> None:
    """Somebody has to look into it, also when its client has given it up."""
    sessions = shop.sessions(in_doubt=(TimeoutError,))
    opened = sessions.open(scope=ADA)

    def hangs(request: Request) -> None:
        raise TimeoutError

    request = Request(opened.client, 1)
    with pytest.raises(TimeoutError):
        sessions.process(request, hangs, scope=ADA)
    with pytest.raises(InDoubt):
        sessions.process(request, shop.charge, scope=ADA)
    for number in (2, 3, 4):
        sessions.process(Request(opened.client, number, number - 1), shop.charge, scope=ADA)
    key = claim_of(sessions, request).key
    held = run(sessions.receiver.store.get(key))
    assert held is not None and held.state is State.IN_DOUBT
    assert sessions.receiver.resolve(key, "completed", "looked up")
    sessions.process(Request(opened.client, 5, 4), shop.charge, scope=ADA)
    assert run(sessions.receiver.store.get(key)) is None


def test_resuming_fences_the_twin(shop: Shop) -> None:
    """Whoever goes on with the journal last has the session; the answers before are its own too."""
    sessions = shop.sessions()
    opened = sessions.open(scope=ADA)
    sessions.process(Request(opened.client, 1), shop.charge, scope=ADA)
    resumed = sessions.resume(opened.client, scope=ADA)
    assert resumed == Opened(opened.client, 2, 0, LONG, 512)
    for act in (
        lambda: sessions.process(Request(opened.client, 2), shop.charge, scope=ADA),
        lambda: sessions.process(Request(opened.client, 1), shop.charge, scope=ADA),
        lambda: sessions.touch(opened.client, scope=ADA),
        lambda: sessions.end(opened.client, scope=ADA),
    ):
        with pytest.raises(Fenced):
            act()
    assert sessions.process(Request(opened.client, 1, 0, None, 2), shop.charge, scope=ADA).replayed
    assert shop.charged == [1]


def test_a_session_lives_on_an_event_loop(shop: Shop) -> None:
    """Opened, kept alive, resumed and ended by callers who await: the same session, and the same words at its end."""
    sessions = shop.sessions()

    async def charge(request: Request) -> dict[str, int]:
        return shop.charge(request)

    async def story() -> None:
        client = (await sessions.aopen(scope=ADA)).client
        assert (await sessions.aprocess(Request(client, 1), charge, scope=ADA)).status == "executed"
        assert (await sessions.atouch(client, acked=1, scope=ADA)).acked == 1
        assert (await sessions.aresume(client, scope=ADA)).epoch == 2
        with pytest.raises(Fenced):
            await sessions.aend(client, epoch=1, scope=ADA)
        await sessions.aend(client, epoch=2, scope=ADA)
        with pytest.raises(SessionExpired):
            await sessions.atouch(client, epoch=2, scope=ADA)

    asyncio.run(story())
    assert shop.charged == [1]


def test_an_ended_session_is_gone(shop: Shop) -> None:
    """With everything in it."""
    sessions = shop.sessions()
    opened = sessions.open(scope=ADA)
    request = Request(opened.client, 1)
    sessions.process(request, shop.charge, scope=ADA)
    sessions.end(opened.client, scope=ADA)
    assert run(sessions.receiver.store.get(claim_of(sessions, request).key)) is None
    with pytest.raises(SessionExpired):
        sessions.process(request, shop.charge, scope=ADA)


def test_steps_of_a_request_are_remembered_until_it_ends(shop: Shop) -> None:
    """A retry goes on after the last step that was finished, as everywhere."""
    sessions = shop.sessions()
    request = Request(sessions.open(scope=ADA).client, 1)
    reserved: list[int] = []

    def reserve() -> str:
        reserved.append(1)
        return "seat 7"

    def fails_once(request: Request) -> str:
        seat = current().step("reserve", reserve)
        if len(shop.charged) < 1:
            shop.charge(request)
            raise ValueError("down")
        return seat

    with pytest.raises(ValueError, match="down"):
        sessions.process(request, fails_once, scope=ADA)
    assert sessions.process(request, fails_once, scope=ADA).value == "seat 7"
    assert reserved == [1]


def test_a_crowd_of_repeats_runs_each_number_once(shop: Shop) -> None:
    """Four threads send every number, in different orders, each with what it knows is acknowledged."""
    sessions = shop.sessions()
    opened = sessions.open(scope=ADA)
    numbers, start = 24, threading.Barrier(4)

    def client(thread: int) -> list[Any]:
        start.wait()
        order = sorted(range(1, numbers + 1), key=lambda number: (number // (thread + 2), -number))
        return [
            sessions.process(Request(opened.client, number), shop.charge, scope=ADA).value for number in order
        ]

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(client, range(4)))
    assert sorted(shop.charged) == list(range(1, numbers + 1))
    assert all(sorted(a["charged"] for a in some) == list(range(1, numbers + 1)) for some in answers)


def test_what_is_remembered_is_bounded_by_the_window(shop: Shop) -> None:
    """However many requests a client has sent."""
    sessions = shop.sessions(window=4)
    client = ClientSession(sessions.open(scope=ADA))
    store = sessions.receiver.store
    for number in range(1, 41):
        request = client.begin()
        sessions.process(request, shop.charge, scope=ADA)
        client.done(request)
        if number % 10 == 0:
            keys = [claim_of(sessions, Request(client.client, n, n - 1)).key for n in range(1, number + 1)]
            assert sum(run(store.get(key)) is not None for key in keys) <= 4
    assert shop.charged == list(range(1, 41))
