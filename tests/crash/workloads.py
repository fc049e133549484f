"""What the victims do: short scripts that use every kind of write the SQLite store makes.

A script notes in a journal what it has been told, so that an examiner can hold the store to it afterwards: a started
handler means a durable claim, an answer means a durable result.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.crash.faults import FAULTS
from tests.crash.sink import Sink

from effectonce import Message, NotApplied, Policy, Receiver, current
from effectonce._blocking import run
from effectonce._records import Renewal
from effectonce.keys import Key, derived
from effectonce.stores.sqlite import SQLiteStore

START = 1_700_000_000.0
LEASE, KEEP = 60.0, 86_400.0
AFTERWARDS = START + LEASE + 1.0
"""When the examiner comes, every lease of the dead is over."""
OPERATION = "work"


class Declined(Exception):
    """An error that is a result."""


class World:
    """A store, a sink and a journal in one directory."""

    def __init__(
        self,
        directory: Path,
        now: float,
        *,
        once: bool = False,
        durability: Any = "full",
        kind: type[SQLiteStore] = SQLiteStore,
    ) -> None:
        self._journal = os.open(directory / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.sink = Sink(directory / "sink.db")
        self.now = now
        self._closed = False
        self.store = kind(directory / "effects.db", clock=lambda: self.now, durability=durability)
        policy = Policy(
            lease=LEASE,
            keep=KEEP,
            on_crash="in_doubt" if once else "retry",
            remember=(Declined,),
            busy="reject",
        )
        self.receiver = Receiver(self.store, policy=policy)

    def note(self, what: str, id: str, detail: Any = None) -> None:
        """Write to the journal at once: a killed process flushes nothing."""
        os.write(self._journal, (json.dumps([what, id, detail]) + "\n").encode())

    def handle(self, message: Message) -> str:
        """The handler: one effect at the sink."""
        attempt = current()
        self.note("started", message.id, attempt.fence)
        if message.id.startswith("declined"):
            raise Declined(message.id)
        return self.sink.apply(
            attempt.key_for("sink"), attempt.fence, f"{message.id} by fence {attempt.fence}"
        )

    def process(self, id: str, handler: Callable[[Message], str] | None = None) -> str:
        """Process a message and note the answer."""
        outcome = self.receiver.process(message(id), handler or self.handle, operation=OPERATION)
        self.note("answered", id, outcome.value)
        return str(outcome.value)

    def close(self) -> None:
        """Close everything; a second time does nothing."""
        if not self._closed:
            self._closed = True
            self.receiver.close()
            self.sink.close()
            os.close(self._journal)


def message(id: str) -> Message:
    return Message(id=id, payload={"id": id})


def key_of(id: str) -> Key:
    return Key.of(id, f"message:{OPERATION}")


def sink_key(id: str) -> str:
    return derived(key_of(id).text, "sink")


def journal(directory: Path) -> Iterator[tuple[str, str, Any]]:
    """What a dead process has noted."""
    path = directory / "journal"
    for line in path.read_text().splitlines() if path.exists() else ():
        what, id, detail = json.loads(line)
        yield what, id, detail


# The scripts


def processing(world: World) -> None:
    """A message, its repeat, and another."""
    world.process("a")
    world.process("a")
    world.process("b")


def renewing(world: World) -> None:
    """A handler that outlives its lease and renews it before and after its effect."""

    def renew() -> None:
        attempt = current()
        claim = attempt.claim
        assert run(world.store.renew(Renewal(claim.key, claim.owner, attempt.fence, claim.lease, claim.keep)))

    def slow(message: Message) -> str:
        renew()
        effect = world.handle(message)
        renew()
        return effect

    world.process("a", slow)


def releasing(world: World) -> None:
    """A handler that says nothing happened; the retry runs again."""

    def refuse(message: Message) -> str:
        world.note("started", message.id, current().fence)
        world.note("refusing", message.id)
        raise NotApplied("come back later")

    with suppress(NotApplied):
        world.process("a", refuse)
    world.process("a")


def failing(world: World) -> None:
    """An error that is remembered, and its repeat."""
    for _ in range(2):
        try:
            world.process("declined-a")
        except Declined:
            world.note("answered", "declined-a", "declined")
    world.process("b")


def blocks(world: World) -> None:
    """The claim as a block of code."""
    for id in ("a", "b"):
        with world.receiver.claim(key_of(id), payload={"id": id}) as claim:
            value = claim.complete(world.handle(message(id)))
        world.note("answered", id, value)


def batches(world: World) -> None:
    """Four messages and a repeat in one batch, then the batch again."""
    for _ in range(2):
        messages = [message(id) for id in ("a", "b", "declined-c", "d", "a")]
        outcomes = world.receiver.process_batch(messages, world.handle, operation=OPERATION, concurrency=2)
        for sent, outcome in zip(messages, outcomes, strict=True):
            world.note("answered", sent.id, outcome.value or "declined")


def threads(world: World) -> None:
    """Threads that share writes by group commit."""

    def work(name: str) -> None:
        for number in range(2):
            world.process(f"{name}{number}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, "abcd"))


def loops(world: World) -> None:
    """Tasks of an event loop, whose writes go through a thread."""

    async def work(id: str) -> None:
        outcome = await world.receiver.aprocess(message(id), world.handle, operation=OPERATION)
        world.note("answered", id, outcome.value)

    async def main() -> None:
        await asyncio.gather(*(work(id) for id in "abc"))

    asyncio.run(main())


CROWD = tuple(f"k{number}" for number in range(36))


def crowded(world: World) -> None:
    """So many new keys that the log gets its room, by pages that are never committed."""
    for id in CROWD:
        world.process(id)


def purging(world: World) -> None:
    """Forgets what has expired, then uses forgotten keys anew: their fences must not begin anew."""
    world.receiver.purge(2)
    world.receiver.purge(100)
    world.process("expired-0")


class Workload(NamedTuple):
    """A script and the ids it works on."""

    script: Callable[[World], None]
    ids: tuple[str, ...]
    from_nothing: bool = False
    """There is no store yet."""
    opening: bool = False
    """Opening the store is a part of it that may be interrupted."""


WORKLOADS = {
    "creating": Workload(processing, ("a", "b"), from_nothing=True, opening=True),
    "opening": Workload(processing, ("a", "b"), opening=True),
    "processing": Workload(processing, ("a", "b")),
    "renewing": Workload(renewing, ("a",)),
    "releasing": Workload(releasing, ("a",)),
    "failing": Workload(failing, ("declined-a", "b")),
    "blocks": Workload(blocks, ("a", "b")),
    "batches": Workload(batches, ("a", "b", "declined-c", "d")),
    "threads": Workload(threads, tuple(f"{name}{number}" for name in "abcd" for number in range(2))),
    "loops": Workload(loops, ("a", "b", "c")),
    "crowded": Workload(crowded, CROWD),
    "purging": Workload(purging, ("expired-0",)),
}

SETTLED = ("settled-0", "settled-1")
"""Keys that were done before and that no crash may touch."""
EXPIRED = ("expired-0", "expired-1", "expired-2")


def furnish(directory: Path) -> None:
    """Make the store that most workloads begin with: some keys are done, some have expired."""
    for ids, when in ((EXPIRED, START - 2 * KEEP), (SETTLED, START - KEEP / 2)):
        world = World(directory, when, durability="off")
        for id in ids:
            world.process(id)
        world.close()
    (directory / "journal").unlink()


def perform(
    name: str, directory: Path, begin: Callable[[], object], *, once: bool, fault: str, durability: str
) -> None:
    """Run a script and close the store; ``begin`` is called where the part begins that may be interrupted."""
    workload = WORKLOADS[name]
    if workload.opening:
        begin()
    kind = FAULTS[fault] if fault else SQLiteStore
    world = World(directory, START, once=once, durability=durability, kind=kind)
    if not workload.opening:
        begin()
    workload.script(world)
    world.close()
