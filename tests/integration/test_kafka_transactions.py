"""From Kafka to Kafka in Kafka's transactions: each output once, for whoever reads what is committed."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from confluent_kafka import Consumer, TopicPartition
from tests.integration.consumers_atomic import batter
from tests.integration.consumers_helpers import STORM, stop_when, working
from tests.integration.test_consumers_kafka import GROUP, PARTITIONS, Topic

from effectonce import Message, Policy, Receiver, current
from effectonce.errors import UsageError
from effectonce.messaging import kafka as messaging_kafka
from effectonce.messaging.kafka import Output, Transformer
from effectonce.testing.clocks import wait_until

SIZES = [
    pytest.param("transformer", 100, marks=STORM),
    pytest.param("transformer", 10_000, marks=pytest.mark.soak),
    pytest.param("transformer_aio", 10_000, marks=pytest.mark.soak),
]
COLOURS = pytest.mark.parametrize("awaits", [False, True], ids=["blocking", "asyncio"])


class Pipe(Topic):
    """A topic, one for what is made of its records, and who reads there what is committed."""

    def __init__(self, server: Any, name: str) -> None:
        super().__init__(server, name)
        self.out = Topic(server, f"{name}-out")
        settings = {
            "bootstrap.servers": self.servers,
            "group.id": f"look-{name}",
            "enable.auto.commit": False,
        }
        self._reader = Consumer(
            settings | {"isolation.level": "read_committed", "enable.partition.eof": True}
        )
        self._reader.assign([TopicPartition(self.out.name, number, 0) for number in range(PARTITIONS)])
        self._read: list[tuple[int, str]] = []

    def outputs(self) -> list[tuple[int, str]]:
        """What is committed so far: partitions and values."""
        for message in self._reader.consume(10_000, timeout=0.1):
            if message.error() is None:
                self._read.append((message.partition(), message.value().decode()))
        return self._read

    def letters(self) -> list[dict[str, bytes]]:
        """The headers of committed dead letters; offsets count the marks of transactions, too."""
        self._reader.assign([TopicPartition(f"{self.name}.dead", 0, 0)])
        found: list[dict[str, bytes]] = []
        while (message := self._reader.poll(10)) is not None and message.error() is None:
            found.append(dict(message.headers() or ()))
        return found

    def transformer(self, receiver: Receiver, name: str = "t-1", **options: Any) -> Transformer:
        configuration = self.configuration | {"transactional.id": f"{self.name}-{name}"}
        choices: dict[str, Any] = {"retry": ("50ms", "100ms")} | options
        return Transformer(configuration, self.name, receiver=receiver, **choices)

    def close(self) -> None:
        self._reader.close()
        self.out.close()
        super().close()


@pytest.fixture
def pipe(kafka: Any, request: pytest.FixtureRequest) -> Iterator[Pipe]:
    pipe = Pipe(kafka, "".join(each if each.isalnum() else "-" for each in request.node.name))
    yield pipe
    pipe.close()


def transform(
    transformer: Transformer, handler: Callable[[Message], Any], until: Callable[[], object], awaits: bool
) -> None:
    stop_when(transformer, until, time.monotonic() + 60)
    if not awaits:
        transformer.run(handler)
        return

    async def coroutine(message: Message) -> Any:
        return handler(message)

    asyncio.run(transformer.arun(coroutine))


@COLOURS
def test_outputs_dead_letters_and_offsets_are_one_transaction(pipe: Pipe, awaits: bool) -> None:
    """One output, several, or none; a failure is tried again, and what is used up is put aside once."""
    for number in range(6):
        pipe.produce(f"o-{number}", partition=0)
    pipe.produce("bad", b"{", partition=0)
    pipe.produce("last", partition=0)
    pipe.flush()
    attempts: list[int] = []

    def handler(message: Message) -> Any:
        order = current().step("read", lambda: message.payload["order"])
        out = Output(pipe.out.name, order.encode(), key=order, headers={"id": current().key_for("out")})
        if order == "o-3":
            attempts.append(current().number)
            raise ValueError("not today")
        return {"o-0": None, "o-1": [out, out._replace(value=b"more")]}.get(order, out)

    with Receiver("memory://", policy=Policy(max_attempts=2)) as receiver:
        transform(pipe.transformer(receiver), handler, pipe.is_done, awaits)
    wait_until(lambda: len(pipe.outputs()) >= 6)
    values = sorted(value for _, value in pipe.outputs())
    assert values == ["last", "more", "o-1", "o-2", "o-4", "o-5"]
    assert attempts == [1, 2]
    letters = pipe.letters()
    reasons = [letter["dead-reason"] for letter in letters]
    assert {letter["dead-consumer"].decode() for letter in letters} == {f"{GROUP}-{pipe.name}"}
    assert reasons == [b"attempts_exhausted", b"undecodable"]


def test_an_output_for_what_can_not_be_a_topic_is_its_messages_failure(pipe: Pipe) -> None:
    """The broker would have the whole transaction rolled back, each time, and nothing would go on."""
    for order in ("o-1", "o-2", "o-3"):
        pipe.produce(order, partition=0)
    pipe.flush()

    def handler(message: Message) -> Output:
        order = message.payload["order"]
        return Output("no topic" if order == "o-2" else pipe.out.name, order)

    with Receiver("memory://", policy=Policy(max_attempts=2)) as receiver:
        transform(pipe.transformer(receiver), handler, pipe.is_done, awaits=False)
    wait_until(lambda: len(pipe.outputs()) >= 2)
    assert sorted(value for _, value in pipe.outputs()) == ["o-1", "o-3"]
    assert [letter["dead-reason"] for letter in pipe.letters()] == [b"attempts_exhausted"]


def test_what_was_made_before_a_rebalance_is_never_seen(pipe: Pipe) -> None:
    """A consumer whose partitions were given out anew while its handler ran can't commit what that returned."""
    pipe.produce("o-1", partition=0)
    pipe.flush()
    runs: list[str] = []
    is_busy, may_go_on = threading.Event(), threading.Event()

    def handler(message: Message) -> Output:
        runs.append(message.id)
        number = len(runs)
        if number == 1:
            is_busy.set()
            assert may_go_on.wait(60)
        return Output(pipe.out.name, f"{number}")

    with Receiver("memory://") as receiver:
        zombie, other = pipe.transformer(receiver, "zombie"), pipe.transformer(receiver, "other")
        broker: Any = zombie._broker
        broker.deadline = 0.6  # its heartbeats let the group have its partitions, while the handler runs
        threads = [threading.Thread(target=each.run, args=(handler,)) for each in (zombie, other)]
        try:
            threads[0].start()
            assert is_busy.wait(60)
            before = broker._rebalances
            threads[1].start()
            wait_until(lambda: broker._rebalances >= before + 2, seconds=60)  # given away, and taken anew
            may_go_on.set()
            wait_until(pipe.is_done, seconds=60)
        finally:
            may_go_on.set()
            for each, thread in zip((zombie, other), threads, strict=True):
                each.stop()
                thread.join(60)
    wait_until(lambda: pipe.outputs() != [])
    assert len(runs) >= 2
    assert len(pipe.outputs()) == 1
    assert pipe.outputs()[0][1] != "1", "the first run was for nothing"


def test_whoever_opens_the_same_id_ends_what_was_begun(pipe: Pipe) -> None:
    """A process that is started again with its transactional.id makes its former self's transaction void."""
    pipe.produce("o-1", partition=0)
    pipe.flush()
    with Receiver("memory://") as receiver:
        first, second = pipe.transformer(receiver), pipe.transformer(receiver)
        broker: Any = first._broker
        commit = broker._commit
        taken: list[int] = []

        def commit_late(planned: Any, outputs: Any) -> None:
            if not taken:
                taken.append(1)
                stop_when(second, lambda: True, time.monotonic() + 60)
                second.run(lambda message: None)  # opens the id, and leaves
            commit(planned, outputs)

        broker._commit = commit_late
        transform(first, lambda message: Output(pipe.out.name, message.id), pipe.is_done, False)
    wait_until(lambda: pipe.outputs() != [])
    assert [value for _, value in pipe.outputs()] == ["o-1"]
    assert taken == [1]


@pytest.mark.parametrize(("kind", "messages"), SIZES)
def test_killed_and_rebalanced_transformers_produce_each_output_once_and_in_order(
    kind: str, messages: int, pipe: Pipe, tmp_path: Path
) -> None:
    """Two members of the group, one killed in the middle, and one that joins."""
    sent = [f"o-{number}" for number in range(messages)]
    for order in sent:
        pipe.produce(order, partition=int(order[2:]) % PARTITIONS)
    pipe.flush()
    settings = {"topic": pipe.name, "out": pipe.out.name, **pipe.configuration}

    def start() -> Any:
        return working(kind, tmp_path, **settings)

    kills = 1 if messages == 100 else 12
    batter(start, tmp_path, lambda: len(pipe.outputs()), messages, pipe.is_done, kills=kills, members=2)
    wait_until(lambda: len(pipe.outputs()) >= messages)
    assert set(Counter(value for _, value in pipe.outputs()).values()) == {1}
    for number in range(PARTITIONS):
        mine = [
            (partition, value) for partition, value in pipe.outputs() if int(value[2:]) % PARTITIONS == number
        ]
        assert len({partition for partition, _ in mine}) == 1, "one key, one partition"
        assert [value for _, value in mine] == [
            order for order in sent if int(order[2:]) % PARTITIONS == number
        ]


def test_mistakes_are_refused() -> None:
    """Each says what to do."""
    good = {"group.id": "g", "transactional.id": "t"}

    async def with_aiokafka(receiver: Receiver) -> None:
        client = AIOKafkaConsumer(bootstrap_servers="127.0.0.1:1", group_id="g", enable_auto_commit=False)
        try:
            Transformer(client, "t", receiver=receiver)
        finally:
            await client.stop()

    with Receiver("memory://") as receiver:
        with pytest.raises(UsageError, match=r"transactional\.id"):
            Transformer({"group.id": "g"}, "t", receiver=receiver)
        with pytest.raises(UsageError, match="read_committed"):
            Transformer(good | {"isolation.level": "read_uncommitted"}, "t", receiver=receiver)
        with pytest.raises(UsageError, match="leave out"):
            Transformer(good, "t", receiver=receiver, transaction=lambda: None)  # type: ignore[arg-type,return-value]
        with pytest.raises(UsageError, match="come twice"):
            asyncio.run(with_aiokafka(receiver))
        handling: Any = Transformer(good | {"message.max.bytes": 2000}, "t", receiver=receiver)._handling
        for wrong in (["text"], Output("t", b"x" * 3000), json):
            with pytest.raises((UsageError, TypeError)):
                handling._checked(wrong)
    assert messaging_kafka.Output is Output
