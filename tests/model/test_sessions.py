"""Client sessions, every schedule within bounds: the real rules and verbs over the real memory, and the real client.

Two clients send three requests each. The network holds back, repeats and reorders; attempts crash, fail, or end;
answers get lost; clients send again, give up, restart and beat; time passes, and sessions are collected. After every
step of every order in which that can happen, up to so many faults at a time, the invariants have to hold. What can't
be told apart is gone through once, and so are two schedules that differ only in which client is which.

A schedule that breaks an invariant is told as a story. The seeded bugs show that it would be.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest

from effectonce._blocking import run
from effectonce._protocol import decide_claim, decide_ending, decide_renewal
from effectonce._records import Completion, Decision, Ending, Record, Renewal, State, Verdict, make
from effectonce.errors import BadRequest, Fenced, Refused, SessionExpired, StaleRequest
from effectonce.sessions import ClientSession, Opened, Request, _rules, _store
from effectonce.sessions._memory import MemorySessions, _Kept
from effectonce.sessions._rules import Contact, Session, SessionClaim, key_of, place_of

WINDOW = 3
LEASE, SESSION_LEASE, TICK = 10.0, 15.0, 8.0
SKEW = 40.0
"""How far a client's clock is behind the store's, for the bug that believes it."""


class Message(NamedTuple):
    """A request on its way."""

    client: int
    number: int
    acked: int
    epoch: int


class Attempt(NamedTuple):
    """A handler that runs."""

    client: int
    number: int
    owner: bytes
    fence: int


class Client(NamedTuple):
    """A client, and what is true of it."""

    next: int = 1
    outstanding: frozenset[int] = frozenset()
    epoch: int = 1
    executed: tuple[int, ...] = ()
    """How often each number was executed."""
    low: int = 1
    """The highest mark that a valid contact has brought to the server."""
    alive_until: float = SESSION_LEASE
    """How long the session lives by the rules."""


class Moment(NamedTuple):
    """Everything that matters from here on."""

    now: float
    clients: tuple[Client, ...]
    store: tuple[tuple[Session | None, tuple[tuple[int, Record], ...]], ...]
    network: tuple[Message, ...]
    running: tuple[Attempt, ...]
    budget: int


class Broken(AssertionError):
    """An invariant does not hold."""


def check(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


class World:
    """Makes things happen: each move is one step of the real code, from a moment to another."""

    def __init__(self, clients: int, numbers: int) -> None:
        self.indices, self.numbers = range(clients), numbers
        self.clock = 0.0
        self.memory = MemorySessions(lambda: self.clock)

    def begin(self, budget: int) -> Moment:
        clients, store = [], []
        for index in self.indices:
            run(self._at(0.0).contact(Contact("open", name(index), lease=SESSION_LEASE)))
            clients.append(Client(executed=(0,) * self.numbers))
            store.append((self.memory.sessions[name(index)].session, ()))
        return Moment(0.0, tuple(clients), tuple(store), (), (), budget)

    def _at(self, now: float) -> MemorySessions:
        self.clock = now
        return self.memory

    # From a moment into the real objects, and back

    def put(self, moment: Moment) -> None:
        self._at(moment.now).sessions.clear()
        for index, (session, requests) in enumerate(moment.store):
            if session is not None:
                kept = self.memory.sessions[name(index)] = _Kept(session)
                kept.requests = dict(requests)

    def taken(self, moment: Moment, **changes: Any) -> Moment:
        store = []
        for index in self.indices:
            kept = self.memory.sessions.get(name(index))
            store.append((kept.session, tuple(sorted(kept.requests.items()))) if kept else (None, ()))
        after = moment._replace(store=tuple(store), **changes)
        for index, (session, requests) in enumerate(after.store):
            if session is None:
                continue
            check(
                session.low == after.clients[index].low,
                "the mark is not the highest that a valid contact brought",
            )
            above = [number for number, _ in requests if number >= session.low]
            check(len(above) <= WINDOW, "more is remembered than the window")
        return after

    # What may happen

    def moves(self, moment: Moment) -> Iterator[tuple[str, Callable[[], Moment]]]:
        may_fail = moment.budget > 0
        for index, client in enumerate(moment.clients):
            if client.next <= self.numbers and self.session_of(client, index)._has_room():
                yield f"client {index} sends {client.next}", partial(self.send, moment, index, None)
            if may_fail:
                for number in sorted(client.outstanding):
                    yield f"client {index} sends {number} again", partial(self.send, moment, index, number)
                    yield f"client {index} gives {number} up", partial(self.give_up, moment, index, number)
                yield f"client {index} restarts", partial(self.contact, moment, index, "resume")
                yield f"client {index} beats", partial(self.contact, moment, index, "touch")
        for message in moment.network:
            arrives = partial(self.deliver, moment, message)
            yield f"{message} arrives", arrives
            if may_fail:
                yield f"{message} arrives, and its answer is lost", partial(arrives, lost=True)
        for attempt in moment.running:
            ends = partial(self.end, moment, attempt)
            yield f"{attempt} ends well", partial(ends, State.COMPLETED)
            if may_fail:
                yield (
                    f"{attempt} ends well, and its answer is lost",
                    partial(ends, State.COMPLETED, lost=True),
                )
                yield f"{attempt} ends without effect", partial(ends, State.ABSENT)
                yield f"{attempt} crashes", partial(self.crash, moment, attempt)
        if may_fail:
            yield "time passes", partial(self.tick, moment)
            yield "sessions are collected", partial(self.collect, moment)

    # Clients

    def session_of(self, client: Client, index: int) -> ClientSession:
        real = ClientSession(Opened(name(index), 1, 0, SESSION_LEASE, WINDOW))
        real.epoch = client.epoch
        real._next, real._outstanding = client.next, dict.fromkeys(client.outstanding)
        return real

    def send(self, moment: Moment, index: int, number: int | None) -> Moment:
        client = moment.clients[index]
        real = self.session_of(client, index)
        request = (
            real.begin()
            if number is None
            else real.again(Request(name(index), number, 0, None, client.epoch))
        )
        message = Message(index, request.number, request.acked, request.epoch)
        after = client._replace(next=real._next, outstanding=frozenset(real._outstanding))
        return _with(moment, index, after)._replace(
            network=tuple(sorted((*moment.network, message))),
            budget=moment.budget - (number is not None),
        )

    def give_up(self, moment: Moment, index: int, number: int) -> Moment:
        return self._settled(moment, index, number, given_up=True)._replace(budget=moment.budget - 1)

    def _settled(self, moment: Moment, index: int, number: int, given_up: bool = False) -> Moment:
        client = moment.clients[index]
        real = self.session_of(client, index)
        request = Request(name(index), number)
        (real.give_up if given_up else real.done)(request)
        return _with(moment, index, client._replace(outstanding=frozenset(real._outstanding)))

    def contact(self, moment: Moment, index: int, kind: str) -> Moment:
        self.put(moment)
        client = moment.clients[index]
        acked = self.session_of(client, index).acked
        try:
            session = run(self.memory.contact(Contact(kind, name(index), client.epoch, acked + 1)))
        except SessionExpired:
            check(client.alive_until <= moment.now, "a session that lives was taken for expired")
            return self.taken(moment, budget=moment.budget - 1)
        check(client.alive_until > moment.now, "a session that is over came to life again")
        after = client._replace(
            epoch=session.epoch,
            low=client.low if kind == "resume" else max(client.low, acked + 1),
            alive_until=max(client.alive_until, moment.now + SESSION_LEASE),
        )
        return self.taken(_with(moment, index, after), budget=moment.budget - 1)

    # The server

    def deliver(self, moment: Moment, message: Message, lost: bool = False) -> Moment:
        self.put(moment)
        index, number, acked, epoch = message
        client = moment.clients[index]
        try:
            place = place_of(name(index), number, acked, epoch, WINDOW)
        except BadRequest as mistake:
            raise Broken(str(mistake)) from mistake
        key, owner = key_of("", name(index), number), self._owner(index, number)
        claim: Any = make(SessionClaim, (key, owner, b"", LEASE, 1e9, True, None, True))
        claim.place = place
        network = list(moment.network)
        network.remove(message)
        after = moment._replace(network=tuple(network), budget=moment.budget - lost)
        is_alive, is_own = client.alive_until > moment.now, epoch == client.epoch
        try:
            decision = run(self.memory.claim(claim))
        except SessionExpired:
            check(not is_alive, "a session that lives was taken for expired")
            return self.taken(after)
        except Fenced:
            check(is_alive and not is_own, "a client was fenced out of its own session")
            return self.taken(after)
        except StaleRequest:
            moved = self._touched(after, index, acked + 1)
            check(number < moved.clients[index].low, "a number at or above the mark was taken for stale")
            check(number not in client.outstanding, "a request that its client waits for was taken for stale")
            return self.taken(moved)
        check(is_alive, "an expired session was answered")
        check(is_own, "a fenced client was answered")
        after = self._touched(after, index, acked + 1)
        check(number >= after.clients[index].low, "a request below the mark was answered")
        return self._answered(after, message, decision, owner, lost)

    def _owner(self, index: int, number: int) -> bytes:
        """A name that no attempt has which could still be heard of."""
        kept = self.memory.sessions.get(name(index))
        known = kept.requests.get(number) if kept else None
        return b"b" if known is not None and known.owner == b"a" else b"a"

    def _touched(self, moment: Moment, index: int, low: int) -> Moment:
        client = moment.clients[index]
        until = max(client.alive_until, moment.now + max(SESSION_LEASE, LEASE))
        return _with(moment, index, client._replace(low=max(client.low, low), alive_until=until))

    def _answered(
        self, moment: Moment, message: Message, decision: Decision, owner: bytes, lost: bool
    ) -> Moment:
        index, number = message.client, message.number
        client = moment.clients[index]
        if decision.verdict in (Verdict.CLAIMED, Verdict.TAKEN_OVER):
            assert decision.record is not None
            begun = [a for a in moment.running if (a.client, a.number) == (index, number)]
            check(not begun, "a request runs twice at once")
            check(client.executed[number - 1] == 0, "a request is executed again")
            attempt = Attempt(index, number, owner, decision.record.fence)
            return self.taken(moment, running=tuple(sorted((*moment.running, attempt))))
        if decision.verdict is Verdict.REPLAY:
            check(client.executed[number - 1] == 1, "an answer was given that nobody has made")
            after = self.taken(moment)
            return after if lost else self._settled(after, index, number)
        return self.taken(moment)

    def end(self, moment: Moment, attempt: Attempt, state: State, lost: bool = False) -> Moment:
        self.put(moment)
        index, number, owner, fence = attempt
        result = b"1" if state is State.COMPLETED else None
        ending = Completion(key_of("", name(index), number), owner, fence, state, result, 1e9)
        answer = run(self.memory.complete(ending))
        client = moment.clients[index]
        running = tuple(each for each in moment.running if each != attempt)
        spent = lost or state is not State.COMPLETED
        after = moment._replace(running=running, budget=moment.budget - spent)
        if state is State.COMPLETED:  # it was done, whether that could be recorded or not
            executed = list(client.executed)
            executed[number - 1] += 1
            check(executed[number - 1] == 1, "a request was executed twice")
            after = _with(after, index, client._replace(executed=tuple(executed)))
        if state is not State.COMPLETED or lost or answer is Ending.FENCED:
            return self.taken(after)
        return self.taken(self._settled(after, index, number))

    def crash(self, moment: Moment, attempt: Attempt) -> Moment:
        """It did what it had to do, and died before it could say so: nobody may do it again."""
        client = moment.clients[attempt.client]
        executed = list(client.executed)
        executed[attempt.number - 1] += 1
        check(executed[attempt.number - 1] == 1, "a request was executed twice")
        running = tuple(each for each in moment.running if each != attempt)
        after = _with(moment, attempt.client, client._replace(executed=tuple(executed)))
        return after._replace(running=running, budget=moment.budget - 1)

    def tick(self, moment: Moment) -> Moment:
        """Time passes; the keeper renews what runs."""
        now = moment.now + TICK
        self.put(moment)
        self._at(now)
        clients = list(moment.clients)
        for index, number, owner, fence in moment.running:
            renewal = Renewal(key_of("", name(index), number), owner, fence, LEASE, 1e9)
            held = run(self.memory.renew(renewal))
            check(held or clients[index].alive_until <= now, "a request that runs lost its session")
            if held:
                until = max(clients[index].alive_until, now + LEASE)
                clients[index] = clients[index]._replace(alive_until=until)
        return self.taken(moment._replace(now=now, clients=tuple(clients)), budget=moment.budget - 1)

    def collect(self, moment: Moment) -> Moment:
        self.put(moment)
        run(self.memory.purge(10))
        for index, client in enumerate(moment.clients):
            gone = name(index) not in self.memory.sessions
            check(not gone or client.alive_until <= moment.now, "a session that lives was collected")
        return self.taken(moment, budget=moment.budget - 1)


def name(index: int) -> str:
    return f"{index:032d}"


def _with(moment: Moment, index: int, client: Client) -> Moment:
    clients = list(moment.clients)
    clients[index] = client
    return moment._replace(clients=tuple(clients))


def outlook(moment: Moment) -> Any:
    """A moment as it matters: times count from now on, and it does not matter which client is which."""

    def seen(index: int) -> Any:
        client, (session, requests) = moment.clients[index], moment.store[index]
        return (
            client._replace(alive_until=max(client.alive_until - moment.now, 0.0)),
            session and (session.epoch, session.low, max(session.lease_until - moment.now, 0.0)),
            tuple(
                (number, record.state, record.owner, record.fence, max(record.lease_until - moment.now, 0.0))
                for number, record in requests
            ),
            tuple(message[1:] for message in moment.network if message.client == index),
            tuple(attempt[1:] for attempt in moment.running if attempt.client == index),
        )

    return moment.budget, *sorted(map(seen, range(len(moment.clients))), key=hash)


def explore(clients: int, numbers: int, budget: int) -> Counter[str]:
    """Go through everything that can happen; gives how many moments there are, or raises with a story."""
    world = World(clients, numbers)
    first = world.begin(budget)
    came: dict[Any, tuple[Any, str]] = {outlook(first): (None, "")}
    waiting = deque([first])
    figures: Counter[str] = Counter(moments=1)
    while waiting:
        moment = waiting.popleft()
        here = outlook(moment)
        for told, move in world.moves(moment):
            figures["steps"] += 1
            try:
                after = move()
            except Broken as broken:
                raise Broken(f"{broken}\n{_story(came, here)}\n  {told}") from None
            there = outlook(after)
            if there not in came:
                came[there] = (here, told)
                figures["moments"] += 1
                waiting.append(after)
    return figures


def _story(came: dict[Any, tuple[Any, str]], place: Any) -> str:
    steps: list[str] = []
    while place is not None:
        place, told = came[place]
        if told:
            steps.append(f"  {told}")
    return "\n".join(reversed(steps))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("clients", "numbers", "budget"), [(1, 3, 2), (2, 3, 1)], ids=lambda number: str(number)
)
def test_every_schedule_keeps_every_invariant(clients: int, numbers: int, budget: int) -> None:
    """No request is executed twice, none below the mark, none in a session that is over or another's."""
    figures = explore(clients, numbers, budget)
    print(figures)
    assert figures["moments"] > 5_000, "there is more that can happen"


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("clients", "numbers", "budget"), [(1, 3, 4), (2, 3, 2)], ids=lambda number: str(number)
)
def test_every_schedule_with_more_faults_keeps_every_invariant(
    clients: int, numbers: int, budget: int
) -> None:
    """The same, with two clients of three requests each, and more going wrong."""
    figures = explore(clients, numbers, budget)
    print(figures)
    assert figures["moments"] > 200_000, "there is more that can happen"


# Seeded bugs: each is a change of the real code that looks harmless


def mark_moves_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of a request is taken for its mark: what is below must have been answered, mustn't it?"""
    real = _rules.rule_on_claim

    def early(session: Any, record: Any, claim: Any, now: float) -> Any:
        claim.place = claim.place._replace(low=claim.place.number)
        return real(session, record, claim, now)

    monkeypatch.setattr(_store, "rule_on_claim", early)


def answers_leave_when_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer is forgotten as soon as it is made, to save room."""
    real = decide_ending

    async def ending(desk: Any, completion: Completion) -> Ending:
        session, number = _rules.parts_of(completion.key)
        _, record, now = await desk.look(session, completion.key)
        answer, _ = real(record, completion, now)
        await desk.drop(session, number)
        return answer

    monkeypatch.setattr(_store, "ending", ending)


def sessions_are_made_on_the_fly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that is not known, or not any more, is welcome."""
    real = _rules._contacted

    def contacted(session: Session | None, epoch: int, low: int, hold: float, now: float) -> Any:
        if session is None or session.lease_until <= now:
            session = Session(
                session.id if session else name(0), epoch, low, SESSION_LEASE, now + SESSION_LEASE
            )
        return real(session, epoch, low, hold, now)

    monkeypatch.setattr(_rules, "_contacted", contacted)


def leases_go_by_the_clients_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What time it is, is taken from the message."""
    real = MemorySessions.look

    async def look(self: MemorySessions, session: str, key: str | None = None) -> _store.Sight:
        sight = await real(self, session, key)
        return sight if key is None else sight._replace(now=sight.now - SKEW)

    monkeypatch.setattr(MemorySessions, "look", look)


def the_mark_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that is not there is new."""

    def rule(session: Any, record: Any, claim: Any, now: float) -> Any:
        after = _rules._contacted(session, claim.place.epoch, claim.place.low, claim.lease, now)
        if isinstance(after, Refused):
            return _rules.Ruling(session, after)
        return _rules.Ruling(after, decide_claim(record, claim, now, 0))

    monkeypatch.setattr(_store, "rule_on_claim", rule)


def the_epoch_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever knows the client id is the client."""
    real = _rules.refusal_of

    def refusal(session: Session | None, epoch: int, now: float) -> Any:
        return real(session, session.epoch if session else epoch, now)

    monkeypatch.setattr(_rules, "refusal_of", refusal)


def running_requests_dont_hold_their_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the client's own contact counts."""

    async def renewing(desk: Any, renewal: Any) -> bool:
        session, number = _rules.parts_of(renewal.key)
        _, record, now = await desk.look(session, renewal.key)
        renewed = decide_renewal(record, renewal, now)
        if renewed is None:
            return False
        await desk.put(session, number, renewed, False)
        return True

    monkeypatch.setattr(_store, "renewing", renewing)


def the_mark_drops_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything below it, without a look."""
    from effectonce.sessions import _memory

    monkeypatch.setattr(_memory, "is_dropped", lambda record, now: True)


def the_mark_moves_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last word counts."""
    real = _rules._contacted

    def contacted(session: Session | None, epoch: int, low: int, hold: float, now: float) -> Any:
        after = real(session, epoch, low, hold, now)
        return after if isinstance(after, Refused) else after._replace(low=low)

    monkeypatch.setattr(_rules, "_contacted", contacted)


def the_client_acknowledges_what_it_has_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no more to do with it, has it?"""
    monkeypatch.setattr(ClientSession, "_acked", lambda self: max(self._next - 2, 0))


@pytest.mark.parametrize(
    "bug",
    [
        mark_moves_too_early,
        answers_leave_when_they_are_given,
        sessions_are_made_on_the_fly,
        leases_go_by_the_clients_clock,
        the_mark_is_not_asked,
        the_epoch_is_not_asked,
        running_requests_dont_hold_their_session,
        the_mark_drops_what_runs,
        the_mark_moves_back,
        the_client_acknowledges_what_it_has_sent,
    ],
    ids=lambda bug: bug.__name__,
)
def test_a_seeded_bug_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them, with a story that tells how it comes to harm."""
    bug(monkeypatch)
    with pytest.raises(Broken) as found:
        explore(1, 3, 3)
    print(found.value)
