"""Kafka: a member of a consumer group that commits an offset when all effects before it are recorded.

::

    consumer = kafka.Consumer({"bootstrap.servers": "…", "group.id": "billing"}, "orders", receiver=receiver)
    consumer.run(handler)                # on an event loop: await consumer.arun(handler)

    client = AIOKafkaConsumer(bootstrap_servers="…", group_id="billing", enable_auto_commit=False)     # aiokafka
    await kafka.Consumer(client, "orders", receiver=receiver, producer=producer).arun(handler)

With confluent-kafka the consumer takes the configuration, because nobody can ask its client afterwards whether it
commits by itself; ``run`` makes its Consumer and ``arun`` its AIOConsumer. With aiokafka it takes a consumer and a
producer that were started, and subscribes the consumer.

A record's id is its header ``id``, else its partition and offset. Records of a partition are handled in order; what
runs side by side are partitions. A failure stops its partition until its pause is over, and others go on. What can't
be processed is produced to the topic ``dead_letter``, with the reason in its headers, before its offset is committed.

With ``cursor=True`` the offset is in your database, in the transaction of the effects, and a partition that is assigned
is read from there. What is committed to the group then only tells others how far it is. A ``Transformer`` is for
effects that are records of Kafka, too: they are produced in one transaction with the offset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from ..codec import read_json
from ..errors import UsageError
from . import _consumer
from ._consumer import Broker, Options
from ._kafka import Output, decoding
from ._options import check

if TYPE_CHECKING:
    from .._receiver import Receiver


class Consumer(_consumer.Consumer):
    """Handles each record of topics once.

    client        the configuration of a consumer of confluent-kafka, or a started AIOKafkaConsumer
    topics        a topic, or several
    producer      for dead letters, with aiokafka: a started AIOKafkaProducer
    dead_letter   the topic for what can't be processed; by default the record's topic with ``.dead``
    options       see ``Options``
    """

    def __init__(
        self,
        client: Any,
        topics: str | Sequence[str],
        *,
        receiver: Receiver,
        producer: Any = None,
        dead_letter: str = "",
        **options: Unpack[Options],
    ) -> None:
        check(receiver, options, dead_letter, topics=topics)
        names = [topics] if isinstance(topics, str) else list(topics)
        wanted = options.get("id")
        broker: Broker
        if isinstance(client, Mapping):
            from ._confluent import Confluent

            broker = Confluent(dict(client), names, dead_letter, wanted)
        elif type(client).__module__.partition(".")[0] == "aiokafka":
            from ._aiokafka import AioKafka

            broker = AioKafka(client, names, producer, dead_letter, wanted)
        else:
            raise UsageError(
                f"{type(client).__name__}: that is neither a configuration for confluent-kafka, a dictionary, nor an "
                "AIOKafkaConsumer. A consumer of confluent-kafka does not tell whether it commits by itself: give its "
                "configuration."
            )
        options["decode"] = decoding(options.get("decode", read_json))
        super().__init__(broker, receiver, options)

    def _chosen(self, handler: Callable[..., Any] | None, *, awaits: bool) -> Callable[..., Any]:
        use = getattr(self._broker, "use", None)
        if use is not None:  # confluent-kafka's clients of both colours take the same configuration
            use(awaits=awaits)
        return super()._chosen(handler, awaits=awaits)


class Transformer(Consumer):
    """From Kafka to Kafka, exactly once: a handler returns the records to produce.

    They are produced in one transaction with the offsets of what was handled, so that consumers which read only what is
    committed see each once. No store is asked: a receiver has the policy and the events.

    configuration  of confluent-kafka, with a ``transactional.id`` that no other process has
    topics, dead_letter, options    as a Consumer has them; ``transaction`` and ``cursor`` are of no use here
    """

    def __init__(
        self,
        configuration: Mapping[str, Any],
        topics: str | Sequence[str],
        *,
        receiver: Receiver,
        dead_letter: str = "",
        **options: Unpack[Options],
    ) -> None:
        if not isinstance(configuration, Mapping):
            raise UsageError(
                "A Transformer takes a configuration for confluent-kafka. aiokafka's transactions don't tell the broker"
                " which generation of the group they belong to, so a consumer that lost its partitions could still"
                " commit, and outputs would come twice."
            )
        if options.get("transaction") or options.get("cursor"):
            raise UsageError("A Transformer's transactions are Kafka's: leave out transaction= and cursor=.")
        check(receiver, options, dead_letter, topics=topics)
        from ._transform import Outputs, Transforming

        names = [topics] if isinstance(topics, str) else list(topics)
        broker = Transforming(dict(configuration), names, dead_letter, options.get("id"))
        options["decode"] = decoding(options.get("decode", read_json))
        _consumer.Consumer.__init__(self, broker, receiver, options)
        self._handling = Outputs(receiver, self._concurrency, broker.largest)


__all__ = ["Consumer", "Options", "Output", "Transformer"]
