"""What a consumer is told is checked at once: nonsense is an error that explains, and never a queue of dead letters."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from nats.js.api import ConsumerConfig

from effectonce import Receiver
from effectonce.errors import UsageError
from effectonce.messaging import kafka, nats, rabbitmq, redis_streams, sqs

NONSENSE: dict[str, tuple[dict[str, Any], str]] = {
    "a URL for a receiver": ({"receiver": "redis://:secret@host"}, "A str is not a Receiver"),
    "no receiver": ({"receiver": None}, "not a Receiver"),
    "no stream": ({"stream": None}, "stream=None must be a name"),
    "an empty stream": ({"stream": ""}, "stream='' must be a name"),
    "bytes for a stream": ({"stream": b"orders"}, "must be a name"),
    "streams": ({"stream": []}, r"stream=\[\] must be a name"),
    "a blank group": ({"group": " "}, "group=' ' must be a name"),
    "a group that is a number": ({"group": 5}, "group=5 must be a name"),
    "batch 0": ({"batch": 0}, "batch=0 must be a whole number, 1 to 1000"),
    "batch 1001": ({"batch": 1001}, "batch=1001"),
    "half a message": ({"batch": 1.5}, r"batch=1\.5"),
    "batch as text": ({"batch": "10"}, "batch='10'"),
    "batch as a flag": ({"batch": True}, "batch=True"),
    "nobody at work": ({"concurrency": 0}, "concurrency=0 must be a whole number, 1 or more"),
    "concurrency as text": ({"concurrency": "4"}, "concurrency='4'"),
    "no room": ({"max_body": 0}, "max_body=0"),
    "a policy's name": ({"policy": "payments"}, "must be a Policy"),
    "an id that is a number": ({"id": 5}, "id=5 must be the name of a header"),
    "no decoder": ({"decode": "json"}, "decode='json' must be a function"),
    "a dead letter's number": ({"dead_letter": 5}, "dead_letter=5 must be a name"),
    "dead letters that come back": ({"dead_letter": "orders"}, "would come back for ever"),
    "a URL for a client": ({"client": "redis://host"}, "A str is no client of redis-py"),
    "a word that there is not": ({"bach": 10}, "bach: a consumer has no such option"),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_is_told_at_once(what: str) -> None:
    """The error says which word it is, and what belongs there; and no password."""
    wrong, told = NONSENSE[what]
    words: dict[str, Any] = {"client": redis.Redis(), "stream": "orders", "group": "billing"}
    words |= {"receiver": Receiver("memory://")} | wrong
    client, stream = words.pop("client"), words.pop("stream")
    with pytest.raises(UsageError, match=told) as error:
        redis_streams.Consumer(client, stream, **words)
    assert "secret" not in str(error.value)


def make(broker: str, receiver: Receiver, place: Any, dead_letter: str) -> Any:
    words: dict[str, Any] = {"receiver": receiver, "dead_letter": dead_letter}
    if broker == "kafka":
        return kafka.Consumer({"bootstrap.servers": "nobody", "group.id": "billing"}, place, **words)
    if broker == "transformer":
        configuration = {"bootstrap.servers": "nobody", "group.id": "billing", "transactional.id": "b"}
        return kafka.Transformer(configuration, place, **words)
    if broker == "rabbitmq":
        return rabbitmq.Consumer(object(), place, **words)
    if broker == "nats":
        return nats.Consumer(object(), place, durable="billing", **words)  # type: ignore[arg-type]
    return sqs.Consumer(object(), place, **words)


@pytest.mark.parametrize("broker", ["kafka", "transformer", "rabbitmq", "nats", "sqs"])
def test_no_broker_takes_its_own_dead_letters(broker: str) -> None:
    """Nor a place without a name; the same words are checked the same way for every one of them."""
    receiver = Receiver("memory://")
    with pytest.raises(UsageError, match="come back for ever"):
        make(broker, receiver, "orders", "orders")
    with pytest.raises(UsageError, match="must be a name"):
        make(broker, receiver, None, "")


@pytest.mark.parametrize(
    ("topics", "dead_letter", "told"),
    [
        ("^orders", "", "Say where they go"),
        (["clicks", "^orders"], "orders.dead", "come back for ever"),
        (["orders", "clicks"], "clicks", "come back for ever"),
    ],
)
def test_a_pattern_of_topics_does_not_mean_dead_letters(topics: Any, dead_letter: str, told: str) -> None:
    """What they are called has to be said, and must not be meant by it."""
    with pytest.raises(UsageError, match=told):
        make("kafka", Receiver("memory://"), topics, dead_letter)


@pytest.mark.parametrize("handler", [lambda: None, lambda message, connection: None], ids=["none", "two"])
def test_a_handler_that_can_not_be_called_with_a_message(handler: Any) -> None:
    """It would fail with each of them, until all have been put aside."""
    consumer = redis_streams.Consumer(
        redis.Redis(port=1), "orders", group="billing", receiver=Receiver("memory://")
    )
    with pytest.raises(UsageError, match="one argument"):
        consumer.run(handler)


@pytest.mark.parametrize(
    ("filters", "is_meant"),
    [
        ((), True),
        (("ORDERS.>",), True),
        (("ORDERS.*",), True),
        (("*.dead",), True),
        (("ORDERS.new", "ORDERS.dead"), True),
        (("ORDERS.new",), False),
        (("ORDERS.*.paid",), False),
        (("ORDERS",), False),
        (("ORDERS.dead.>",), False),
    ],
)
def test_which_subjects_a_durable_is_given(filters: tuple[str, ...], is_meant: bool) -> None:
    """By the patterns of NATS: all of them, those of one filter, or of one of several."""
    one, several = (filters[0], None) if len(filters) == 1 else (None, list(filters) or None)
    config = ConsumerConfig(filter_subject=one, filter_subjects=several)
    assert nats.is_meant(config, "ORDERS.dead") is is_meant
