"""effectonce: `receiver.process` and a decorated call, on the default policy of each store."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.workers.base import RESULT, Counter, Fill, Run, Setup, Subject
from benchmarks.workers.forms import Forms, subject
from benchmarks.workers.micro import PAYLOAD, Work, micro_stream
from benchmarks.workers.purging import ClaimsBesidePurge
from benchmarks.workers.startup import ImportTime
from benchmarks.workers.timing import FileSize
from benchmarks.workers.waiting import AsyncBody, Body, WaitInThreads, WaitOnLoop
from effectonce import Message, Receiver, codec, keys

DISTRIBUTION = "effectonce"
FILL = 500
"""Keys of a piece of a batch, where a store is filled."""


def open_subject(setup: Setup) -> Subject:
    """Open one case of effectonce."""
    if setup.op in ("relay", "publish"):
        from benchmarks.workers import relaying

        return relaying.open_subject(setup, "effectonce")
    if setup.op.startswith("consume"):
        from benchmarks.workers import consuming

        return consuming.open_subject(setup, "effectonce")
    if setup.variant == "session":
        from benchmarks.workers import sessions

        return sessions.open_subject(setup)
    if setup.op == "import":
        return ImportTime("effectonce")
    if setup.op == "micro":
        return micro_stream(setup, _work(setup.variant))
    if setup.op == "purge":
        return ClaimsBesidePurge(setup, _url(setup))
    if setup.op == "wait" and not setup.url:
        return _waiting(setup, Receiver(_url(setup)))
    forms = open_forms(setup)
    if setup.op == "bytes":
        return FileSize(setup, forms.fill, forms.close)
    return subject(setup, forms)


def open_forms(setup: Setup) -> Forms:
    """Every form of effectonce. A decorated call is another operation, so it fills its store by itself."""
    receiver = Receiver(_url(setup))
    counter = Counter()
    handle, ahandle, tick = counter.handle, counter.ahandle, counter.tick
    process, aprocess = receiver.process, receiver.aprocess

    # The name of a function in here would be longer than any in an application, and it is part of the key.
    @receiver.idempotent(key="order_id", operation="charge")
    def charge(order_id: str) -> dict[str, Any]:
        tick()
        return RESULT

    @receiver.idempotent(key="order_id", operation="acharge")
    async def acharge(order_id: str) -> dict[str, Any]:
        tick()
        return RESULT

    def run(keys: Iterable[str]) -> None:
        for key in keys:
            process(Message(id=key), handle)

    def run_decorated(keys: Iterable[str]) -> None:
        for key in keys:
            charge(key)

    async def arun(keys: Iterable[str]) -> None:
        for key in keys:
            await aprocess(Message(id=key), ahandle)

    async def arun_decorated(keys: Iterable[str]) -> None:
        for key in keys:
            await acharge(key)

    def batch(keys: Iterable[str]) -> None:
        receiver.process_batch([Message(id=key) for key in keys], handle)

    def batch_in_turn(keys: Iterable[str]) -> None:
        receiver.process_batch([Message(id=key) for key in keys], handle, size=FILL, concurrency=1)

    def call(key: str, body: Body) -> object:
        return process(Message(id=key), lambda _: body())

    is_decorated = setup.variant == "decorated"
    chosen: Run = run_decorated if is_decorated else run
    if setup.variant.startswith("atomic"):
        from benchmarks.workers.atomic import atomic

        chosen = atomic(setup, receiver, counter)
    return Forms(
        counter=counter,
        run=chosen,
        arun=arun_decorated if is_decorated else arun,
        batch=batch_in_turn if setup.variant == "in turn" else batch,
        call=call,
        fill=None if is_decorated else _fill(setup, batch_in_turn),
        close=receiver.close,
    )


def _fill(setup: Setup, batch: Fill) -> Fill:
    if setup.store == "dynamodb":
        from benchmarks.workers.dynamodb_table import like_the_first

        return like_the_first(setup.url, batch)
    return batch


def _url(setup: Setup) -> str:
    if setup.store == "postgres":
        options = (
            ["durability=server"] if setup.gauge else []
        )  # where no time is taken, nothing waits for the disk
        options += ["rotate=6h"] if setup.variant == "rotating" else []
        return "?".join([setup.url, "&".join(options)]).rstrip("?")
    return setup.url or ("memory://" if setup.store == "memory" else f"sqlite:///{setup.file()}")


def _waiting(setup: Setup, receiver: Receiver) -> Subject:
    """Waiting is what the default policy does with a duplicate of a running attempt."""

    def call(key: str, body: Body) -> object:
        return receiver.process(Message(id=key), lambda _: body())

    async def acall(key: str, body: AsyncBody) -> object:
        async def handle(_: object) -> dict[str, Any]:
            return await body()

        return await receiver.aprocess(Message(id=key), handle)

    return WaitOnLoop(acall) if setup.variant == "asyncio" else WaitInThreads(call, receiver.close)


def _work(name: str) -> Work:
    """The parts of a call that a caller can also use alone."""
    hint, encoded = dict[str, Any], codec.encode(RESULT, dict[str, Any])
    work: dict[str, Work] = {
        "uuid7": lambda _: keys.uuid7(),
        "fingerprint": lambda _: keys.fingerprint(PAYLOAD),
        "encode": lambda _: codec.encode(RESULT, hint),
        "decode": lambda _: codec.decode(encoded, hint),
        "message": lambda key: Message(id=key),
        "content-id": lambda _: Message.with_content_id(PAYLOAD, source="bench"),
    }
    return work[name]
