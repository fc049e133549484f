"""A broker of taskiq on RabbitMQ with queues of its own, for workers and clients alike."""

from __future__ import annotations

from taskiq_aio_pika import AioPikaBroker, Exchange, Queue


def on_rabbitmq(url: str, name: str) -> AioPikaBroker:
    """Unless it is told otherwise, every broker has the same queues."""
    return AioPikaBroker(
        url,
        exchange=Exchange(name=name),
        task_queues=[Queue(name=name)],
        delay_queue=Queue(name=f"{name}.delay"),
        dead_letter_queue=Queue(name=f"{name}.dead"),
    )
