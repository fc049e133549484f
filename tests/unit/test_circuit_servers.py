"""A store of several servers, one of which is away: only its own keys are refused, and nobody waits for it in vain."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from tests.unit.receiving import Colour, Counted, Told, by_hand, must_not_run

from effectonce import Message, Receiver, StoreUnavailable
from effectonce._records import Claim, Completion, Decision, Ending, Renewal
from effectonce.errors import StoreClosed, StoreError
from effectonce.stores import Breaker, Features
from effectonce.stores._circuit import MOST_SERVERS, Circuit
from effectonce.stores.base import all_answered
from effectonce.stores.memory import MemoryStore
from effectonce.testing.clocks import ManualClock

BREAKER = Breaker(errors=3, recovery="5s")
EAST, WEST = Message("east-1"), Message("west-1")


class TwoServers(MemoryStore):
    """Keys with "east" in them are on one server, all others on another."""

    features = Features()
    is_scattered = True

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.away = ""
        self.asked: list[str] = []

    def place_of(self, key: str) -> str:
        return "east" if "east" in key else "west"

    def reach(self, key: str) -> None:
        place = self.place_of(key)
        self.asked.append(place)
        if place == self.away:
            raise StoreUnavailable(f"{place} can't be reached")

    async def claim(self, claim: Claim) -> Decision:
        self.reach(claim.key)
        return await super().claim(claim)

    async def complete(self, completion: Completion) -> Ending:
        self.reach(completion.key)
        return await super().complete(completion)

    async def renew(self, renewal: Renewal) -> bool:
        self.reach(renewal.key)
        return await super().renew(renewal)

    async def claim_many(self, claims: Sequence[Claim]) -> list[Decision]:
        return await _each(self.claim, claims)

    async def complete_many(self, completions: Sequence[Completion]) -> list[Ending]:
        return await _each(self.complete, completions)


async def _each(verb: Callable[[Any], Coroutine[Any, Any, Any]], commands: Sequence[Any]) -> list[Any]:
    answers: list[Any] = []
    for command in commands:
        try:
            answers.append(await verb(command))
        except StoreError as error:
            answers.append(error)
    return all_answered(answers)


class Stage:
    def __init__(self, colour: Colour) -> None:
        self.clock, self.told, self.colour = ManualClock(), Told(), colour
        self.store = TwoServers(self.clock)
        self.receiver = by_hand(
            Receiver(self.store, breaker=BREAKER, hooks=[self.told], monotonic=self.clock, clock=self.clock)
        )

    def process(self, message: Message, handler: Any) -> Any:
        return self.colour.process(self.receiver, message, handler)

    def is_refused(self, message: Message) -> bool:
        """Whether a call is refused; and if so, without asking the store."""
        self.store.asked.clear()
        try:
            self.process(message, Counted("done"))
        except StoreUnavailable:
            return True
        return False

    def lose_east(self) -> None:
        self.store.away = "east"
        for number in range(2):  # each of which is asked for twice
            with pytest.raises(StoreUnavailable):
                self.process(Message(f"east-lost-{number}"), must_not_run)


@pytest.fixture
def stage(colour: Colour) -> Stage:
    return Stage(colour)


def test_only_the_keys_of_a_server_that_is_away_are_refused(stage: Stage) -> None:
    """They are refused at once; those of the other server go on as if nothing had happened."""
    stage.lose_east()
    assert stage.is_refused(EAST)
    assert stage.store.asked == []
    for number in range(20):
        assert not stage.is_refused(Message(f"west-{number}"))
    assert stage.is_refused(EAST)
    assert stage.store.asked == []
    assert [event.detail for event in stage.told if event.kind == "circuit"] == [
        "opened: east can't be reached"
    ]


def test_failures_of_one_server_between_answers_of_another_are_in_a_row(stage: Stage) -> None:
    """What others answer says nothing about the one that does not."""
    stage.store.away = "east"
    for number in range(2):
        with pytest.raises(StoreUnavailable):
            stage.process(Message(f"east-lost-{number}"), must_not_run)
        assert not stage.is_refused(Message(f"west-{number}"))
    assert stage.is_refused(EAST)
    assert stage.store.asked == []


def test_a_server_that_is_back_is_found_by_its_own_keys(stage: Stage) -> None:
    """One claim has a look after the recovery time; no restart is needed."""
    stage.lose_east()
    stage.store.away = ""
    stage.clock.advance(5)
    assert not stage.is_refused(EAST)
    assert not stage.is_refused(Message("east-2"))


def test_a_batch_does_not_ask_a_server_that_is_away(stage: Stage) -> None:
    """Its messages are store errors at once, and all others are done."""
    stage.lose_east()
    stage.store.asked.clear()
    messages = [Message(f"{place}-{number}") for number in range(3) for place in ("west", "east")]
    outcomes = stage.colour.batch(stage.receiver, messages, Counted("done"))
    assert [outcome.status for outcome in outcomes] == ["executed", "store_error"] * 3
    assert set(stage.store.asked) == {"west"}
    stage.store.away = ""
    stage.clock.advance(5)
    again = stage.colour.batch(stage.receiver, messages, Counted("done"))
    assert {outcome.status for outcome in again[::2]} == {"replayed"}


def test_batches_find_out_which_server_is_away(stage: Stage) -> None:
    """What was answered in part says something about each server."""
    stage.store.away = "east"
    for number in range(2):
        stage.colour.batch(stage.receiver, [Message(f"west-{number}"), EAST], Counted("done"))
    assert stage.is_refused(EAST)
    assert stage.store.asked == []
    assert not stage.is_refused(WEST)


def test_a_batch_for_servers_that_are_all_away_is_refused_as_a_whole(stage: Stage) -> None:
    """Nothing is asked for, and each message has the reason."""
    stage.lose_east()
    stage.store.asked.clear()
    outcomes = stage.colour.batch(stage.receiver, [EAST, Message("east-2")], must_not_run)
    assert [outcome.status for outcome in outcomes] == ["store_error"] * 2
    assert all("east can't be reached" in str(outcome.error) for outcome in outcomes)
    assert stage.store.asked == []


def test_an_ending_goes_through_an_open_circuit(stage: Stage) -> None:
    """Who sends it has run already; its answer closes the circuit of its server."""

    def handler(_: Message) -> str:
        circuit = stage.receiver.circuit
        assert circuit is not None
        for _ in range(BREAKER.errors):
            circuit.at("east").failed(StoreUnavailable("gone"), stage.clock())
        assert circuit.at("east").state == "open"
        return "done"

    assert stage.process(EAST, handler).value == "done"
    assert not stage.is_refused(Message("east-2"))


def test_a_closed_receiver_refuses_the_keys_of_every_server(stage: Stage) -> None:
    """Also of one that it has never asked."""
    assert not stage.is_refused(WEST)
    stage.receiver.close()
    for message in (EAST, WEST):
        with pytest.raises(StoreClosed):
            stage.process(message, must_not_run)


def test_circuits_of_servers_are_bounded() -> None:
    """Where addresses come and go, those that are gone are forgotten some time."""
    circuit = Circuit(BREAKER)
    first = circuit.at(0)
    assert first is circuit.at(0) is not circuit
    assert circuit.at(None) is circuit
    for place in range(MOST_SERVERS + 1):
        circuit.at(place)
    assert circuit.at(0) is not first
