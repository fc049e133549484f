"""Consumers of SQS, standard and FIFO: each message's effect happens once, whatever dies in between."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import boto3
import pytest
from botocore.exceptions import ClientError
from tests.integration.consumers_helpers import SIZES, SlowClock, deliveries, storm

from effectonce import Message, Policy, Receiver
from effectonce.errors import UsageError
from effectonce.messaging import sqs as messaging_sqs
from effectonce.testing.clocks import wait_until

KINDS = pytest.mark.parametrize("suffix", ["", ".fifo"], ids=["standard", "fifo"])


class Queue:
    """A queue to send to and to look at."""

    def __init__(self, server: Any, name: str) -> None:
        place = parse_qs(urlsplit(server.url).query)
        self.settings = {"region_name": place["region"][0], "endpoint_url": place["endpoint"][0]}
        self.client = boto3.client("sqs", **self.settings)
        self.is_fifo = name.endswith(".fifo")
        attributes = {"FifoQueue": "true"} if self.is_fifo else {}
        self.url = self.client.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"]
        self._sent = 0

    def send(self, order: str | None, body: str | None = None, group: str = "g", **attributes: Any) -> None:
        self.client.send_message(QueueUrl=self.url, **self._entry(order, body, group, attributes))

    def send_many(self, orders: Sequence[str], group_of: Callable[[str], str]) -> None:
        """Send so that the queue never gets long: the emulator walks through all of it for every request."""
        for start in range(0, len(orders), 10):
            entries = [
                {"Id": str(number), **self._entry(order, None, group_of(order), {})}
                for number, order in enumerate(orders[start : start + 10])
            ]
            assert not self.client.send_message_batch(QueueUrl=self.url, Entries=entries).get("Failed")
            if start % 500 == 0:
                wait_until(lambda: self.size() < 1000, seconds=600)

    def _entry(self, order: str | None, body: str | None, group: str, own: dict[str, Any]) -> dict[str, Any]:
        self._sent += 1
        if order is not None:
            own = {**own, "id": {"DataType": "String", "StringValue": order}}
        # Each sending is one of its own for SQS, as a sender's second try may be.
        fifo = {"MessageGroupId": group, "MessageDeduplicationId": f"s-{self._sent}"} if self.is_fifo else {}
        text = json.dumps({"order": order}) if body is None else body
        return {"MessageBody": text, "MessageAttributes": own, **fifo}

    def size(self) -> int:
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        found = self.client.get_queue_attributes(QueueUrl=self.url, AttributeNames=names)["Attributes"]
        return sum(int(found[name]) for name in names)

    def letters(self) -> list[dict[str, Any]]:
        """Dead letters: their attributes, and under "" the body."""
        url = self.url.removesuffix(".fifo") + "-dead" + (".fifo" if self.is_fifo else "")
        found: list[dict[str, Any]] = []
        while messages := self.client.receive_message(
            QueueUrl=url, MaxNumberOfMessages=10, MessageAttributeNames=["All"]
        ).get("Messages"):
            for message in messages:
                own = {name: value.get("StringValue") for name, value in message["MessageAttributes"].items()}
                found.append({"": message["Body"], **own})
                self.client.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
        return found


@pytest.fixture
def queue(sqs: Any, request: pytest.FixtureRequest) -> Iterator[Queue]:
    name = "".join(each if each.isalnum() else "-" for each in request.node.name)[-60:]
    suffix = ".fifo" if "fifo" in request.node.name else ""
    queue = Queue(sqs, name + suffix)
    yield queue
    queue.client.close()


def consumer_of(queue: Queue, receiver: Receiver, **options: Any) -> messaging_sqs.Consumer:
    choices: dict[str, Any] = {"visibility": "30s", "wait": "1s", "retry": ("100ms", "100ms")}
    return messaging_sqs.Consumer(queue.client, queue.url, receiver=receiver, **(choices | options))


def until(consumer: messaging_sqs.Consumer, handler: Any, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        consumer.run_once(handler)


@SIZES
@KINDS
def test_killed_consumers_leave_each_effect_once(
    suffix: str, messages: int, queue: Queue, tmp_path: Path
) -> None:
    """Messages that come up to four times, and a consumer killed in the middle: each effect once, nothing left.

    In a FIFO queue the effects of each group are in the order in which they were first sent.
    """
    sent = deliveries(messages)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(queue.send_many, sent, lambda order: f"g{int(order[2:]) % 5}")

        def is_drained() -> bool:
            return sending.done() and queue.size() == 0

        effects = storm("sqs", tmp_path, messages, is_drained, url=queue.url, **queue.settings)
        sending.result()
    assert queue.letters() == []
    if queue.is_fifo:
        first_sent = list(dict.fromkeys(sent))
        for group in range(5):
            mine = [effect for effect in effects if int(effect[2:]) % 5 == group]
            assert mine == [order for order in first_sent if int(order[2:]) % 5 == group]


@KINDS
def test_bad_messages_are_put_aside_with_a_reason_and_the_rest_goes_on(suffix: str, queue: Queue) -> None:
    """What can never be processed goes to the dead-letter queue, whole; good messages around it are handled."""
    number = {"DataType": "Number", "StringValue": "7"}
    queue.send("good-1", group="1")
    queue.send("undecodable", "{", group="2", trace={"DataType": "String", "StringValue": "t-1"})
    queue.send(None, group="3", id=number)
    queue.send("x" * 300, group="4")
    queue.send("large", json.dumps("x" * 2000), group="5")
    queue.send("good-1", '{"order": "another"}', group="6")
    queue.send("good-2", group="7")
    queue.send(None, '{"order": "no id"}', group="8")
    ran: list[str] = []
    with Receiver("memory://") as receiver:
        consumer = consumer_of(queue, receiver, max_body=1000)
        until(consumer, lambda message: ran.append(message.payload["order"]), lambda: queue.size() == 0)
    assert sorted(ran) == ["good-1", "good-2", "no id"], "without an id of the sender's, that of SQS serves"
    letters = {letter["dead-reason"]: letter for letter in queue.letters()}
    assert sorted(letters) == ["invalid_id", "mismatch", "too_large", "undecodable"]
    assert letters["undecodable"][""] == "{"
    assert letters["undecodable"]["id"] == "undecodable"
    assert letters["undecodable"]["trace"] == "t-1"
    assert "dead-first-seen" in letters["undecodable"]


@KINDS
def test_what_sqs_stamped_in_the_future_and_a_missing_id_are_put_aside(suffix: str, queue: Queue) -> None:
    """One of two clocks is wrong, so nobody can tell how old it is; and an id that was asked for has to be there."""
    own = {"DataType": "String", "StringValue": "o-1"}
    ran: list[str] = []
    with Receiver("memory://", clock=SlowClock()) as receiver:
        consumer = consumer_of(queue, receiver, batch=1, id="order-id")
        queue.send("future", group="1", **{"order-id": own})
        until(consumer, lambda message: ran.append(message.id), lambda: queue.size() == 0)
        queue.send("none", group="2")
        queue.send("named", group="3", **{"order-id": own})
        until(consumer, lambda message: ran.append(message.id), lambda: queue.size() == 0)
    assert ran == ["o-1"]
    assert sorted(letter["dead-reason"] for letter in queue.letters()) == ["future", "no_id"]


def test_a_letter_with_many_attributes_keeps_them(queue: Queue) -> None:
    """SQS allows ten: then the sender's are put together in one."""
    many = {f"a{number}": {"DataType": "String", "StringValue": "v"} for number in range(9)}
    queue.send("undecodable", "{", **many)
    with Receiver("memory://") as receiver:
        consumer_of(queue, receiver).run_once(print)
    (letter,) = queue.letters()
    assert json.loads(letter["dead-attributes"])["a8"] == "v"
    assert letter["dead-reason"] == "undecodable"


def test_bad_messages_as_large_as_can_be_are_put_aside_in_parts(queue: Queue) -> None:
    """Together with the reason, and together with each other, they are more than SQS takes at once."""
    bodies = ["é" * (1 << 19), "x" * (1 << 20)]
    for body in bodies:
        queue.send("large", body)
    queue.send("good")
    ran: list[str] = []
    with Receiver("memory://") as receiver:
        consumer = consumer_of(queue, receiver)
        until(consumer, lambda message: ran.append(message.id), lambda: not queue.size())
    assert ran == ["good"]
    letters = sorted(queue.letters(), key=lambda letter: (letter["dead-part"], letter[""]))
    assert [letter["dead-part"] for letter in letters] == ["1/2", "1/2", "2/2", "2/2"]
    x_1, e_1, x_2, e_2 = (letter[""] for letter in letters)
    assert [e_1 + e_2, x_1 + x_2] == bodies


def test_a_letter_that_can_not_be_sent_keeps_nobody_else_waiting(queue: Queue) -> None:
    """What is done is deleted first."""
    queue.send("bad", "{")
    queue.send("good")
    with Receiver("memory://") as receiver:
        consumer = consumer_of(queue, receiver, dead_letter=f"{queue.url}-nobody-made-this")
        with pytest.raises(ClientError):
            consumer.run_once(lambda message: None)
    assert queue.size() == 1


def test_a_failed_message_comes_again_and_a_hopeless_one_is_put_aside(queue: Queue) -> None:
    """A handler's exception gives the message back, only this one; used-up attempts make it a dead letter."""
    for order in ("fine", "flaky", "poison"):
        queue.send(order)
    ran: list[str] = []

    def handler(message: Message) -> None:
        ran.append(message.id)
        if message.id == "poison" or (message.id == "flaky" and ran.count("flaky") < 2):
            raise ValueError("not today")

    with Receiver("memory://", consumer="billing", policy=Policy(max_attempts=2)) as receiver:
        until(consumer_of(queue, receiver), handler, lambda: queue.size() == 0)
    assert sorted(ran) == ["fine", "flaky", "flaky", "poison", "poison"]
    (letter,) = queue.letters()
    assert (letter["dead-reason"], letter["dead-attempts"]) == ("attempts_exhausted", "2")
    assert letter["dead-consumer"] == "billing"


def test_a_fifo_group_stops_at_its_first_failure(queue: Queue) -> None:
    """What comes after it waits, in order; other groups go on."""
    for order in ("a1", "b1", "a2", "a3", "b2"):
        queue.send(order, group=order[0])
    ran: list[str] = []

    def handler(message: Message) -> None:
        ran.append(message.id)
        if message.id == "a1" and ran.count("a1") < 2:
            raise ValueError("not yet")

    with Receiver("memory://") as receiver:
        until(consumer_of(queue, receiver), handler, lambda: queue.size() == 0)
    assert [order for order in ran if order[0] == "a"] == ["a1", "a1", "a2", "a3"]
    assert [order for order in ran if order[0] == "b"] == ["b1", "b2"]


def test_a_long_handler_keeps_its_message(queue: Queue) -> None:
    """While a handler runs, its message stays invisible, although that takes longer than its visibility."""
    queue.send("slow")
    beats: list[int] = []

    def slow(message: Message) -> None:
        wait_until(lambda: len(beats) >= 6)  # a third of the visibility each
        rival = queue.client.receive_message(QueueUrl=queue.url, WaitTimeSeconds=0)
        assert not rival.get("Messages")

    with Receiver("memory://") as receiver:
        consumer = consumer_of(queue, receiver, visibility="1s")
        broker: Any = consumer._broker
        extend = broker.extend

        async def counted(under_way: Any) -> None:
            await extend(under_way)
            beats.append(len(under_way))

        broker.extend = counted
        consumer.run_once(slow)
    assert queue.size() == 0


def test_settings_that_sqs_would_refuse_are_told(queue: Queue) -> None:
    """Before anything is asked of SQS."""
    with Receiver("memory://") as receiver:
        for wrong in ({"visibility": "13h"}, {"visibility": "500ms"}, {"wait": "30s"}):
            with pytest.raises(UsageError, match="visibility"):
                consumer_of(queue, receiver, **wrong)
