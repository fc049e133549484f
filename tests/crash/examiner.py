"""What has to be true after a kill, whatever was killed and wherever. Retries until all is settled.

1. What was answered is recorded, with that answer; a handler that started had a durable claim.
2. A live lease is respected, a dead one is taken over: no key is stuck.
3. A retry gives the right answer, which is the one effect that the sink has; every further retry replays it.
4. Fences only grow. Keys that had no part in it are as they were. Both files are sound.
5. At most once: a key whose handler may have started is in doubt until somebody settles it, and never runs by itself.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.crash.workloads import (
    AFTERWARDS,
    OPERATION,
    SETTLED,
    START,
    Declined,
    Workload,
    World,
    journal,
    key_of,
    message,
    sink_key,
)

from effectonce import InDoubt, InProgress, Record, State
from effectonce._blocking import run
from effectonce.codec import decode

Stage = Literal["before the claim", "in the handler", "after the effect", "after completion"]
DONE = (State.COMPLETED, State.FAILED)


class Notes:
    """The journal of the dead, by id."""

    def __init__(self, directory: Path) -> None:
        self.started: defaultdict[str, list[int]] = defaultdict(list)
        self.answered: dict[str, str] = {}
        self.refusals: defaultdict[str, int] = defaultdict(int)
        for what, id, detail in journal(directory):
            if what == "started":
                self.started[id].append(detail)
            elif what == "refusing":
                self.refusals[id] += 1
            else:
                assert self.answered.setdefault(id, detail) == detail, "a repeat got another answer"


class Examiner:
    """Examines one directory that a kill has left behind."""

    def __init__(
        self, directory: Path, workload: Workload, *, once: bool, furnished: dict[str, Record]
    ) -> None:
        self.directory, self.workload, self.once = directory, workload, once
        self.furnished = {} if workload.from_nothing else furnished
        self.notes = Notes(directory)

    def examine(self, world: World | None = None) -> Stage:
        """Check everything, in a world that was open all the while or in a fresh one; say where the kill fell."""
        world = world or World(self.directory, START, once=self.once, durability="off")
        try:
            found = {id: self.found(world, id) for id in self.workload.ids}
            stage = self.stage(world, found)
            for id, record in found.items():
                self.check_record(world, id, record)
                if record is not None and record.state is State.PENDING:
                    self.check_live_lease(world, id)
            world.now = AFTERWARDS
            for id, record in found.items():
                self.settle(world, id, record)
                self.retry(world, id)
            self.check_others(world)
        finally:
            world.close()
        self.check_files()
        return stage

    def found(self, world: World, id: str) -> Record | None:
        """What the store remembers; what it may forget counts as forgotten."""
        record = world.receiver.get(key_of(id))
        return None if record == self.furnished.get(id) else record

    def stage(self, world: World, found: dict[str, Record | None]) -> Stage:
        """Where the kill fell, by what it left unfinished."""
        pending = [id for id, record in found.items() if record is not None and record.state is State.PENDING]
        if pending:
            effects = [id for id in pending if id not in self.furnished and world.sink.effect(sink_key(id))]
            return "after the effect" if effects else "in the handler"
        done = [id for id, record in found.items() if record is not None and record.state in DONE]
        unanswered = set(done) - set(self.notes.answered)
        return "after completion" if unanswered or len(done) == len(found) else "before the claim"

    def check_record(self, world: World, id: str, record: Record | None) -> None:
        fences, answer = self.notes.started[id], self.notes.answered.get(id)
        assert fences == sorted(set(fences)), "a fence was given out twice"
        if self.once:
            assert len(fences) - self.notes.refusals[id] <= 1, "at most once, but started again"
        if fences:
            assert record is not None, "a handler started without a durable claim"
            assert record.fence >= fences[-1], "a fence was taken back"
            released = record.state is State.ABSENT
            assert not released or self.notes.refusals[id], "released without the handler's word"
        if answer is not None:
            assert record is not None
            assert record.state is (State.FAILED if answer == "declined" else State.COMPLETED), (
                "answered too early"
            )
            assert answer == "declined" or (record.result and decode(record.result, str) == answer)

    def check_live_lease(self, world: World, id: str) -> None:
        world.now = START + 1.0
        with pytest.raises(InProgress):
            self.process(world, id)

    def settle(self, world: World, id: str, record: Record | None) -> None:
        """In doubt, a person looks at the sink and says what happened."""
        if not self.once or record is None or record.state is not State.PENDING:
            return
        starts = self.starts(id)
        for _ in range(2):
            with pytest.raises(InDoubt):
                self.process(world, id)
        assert self.starts(id) == starts, "in doubt, but run again"
        effect = None if id in self.furnished else world.sink.effect(sink_key(id))
        if effect is not None:
            assert world.receiver.resolve(key_of(id), "completed", effect)
        else:
            assert world.receiver.resolve(key_of(id), "not_applied")

    def retry(self, world: World, id: str) -> None:
        answer, fence = self.process(world, id)
        starts = self.starts(id)
        if id in self.notes.answered:
            assert answer == self.notes.answered[id], "the retry got another answer"
            assert starts == self.notes.started[id], "answered, but run again"
        assert answer == ("declined" if id.startswith("declined") else world.sink.effect(sink_key(id)))
        assert starts == sorted(set(starts)), "a fence was given out twice"
        assert fence is None or fence >= starts[-1]
        if id in self.furnished:
            assert starts[-1] > self.furnished[id].fence, "the fence began anew after expiry"
        assert self.process(world, id)[0] == answer
        assert self.starts(id) == starts, "a repeat ran again"

    def check_others(self, world: World) -> None:
        assert run(world.store.scan(State.PENDING)) == run(world.store.scan(State.IN_DOUBT)) == []
        for id in SETTLED if self.furnished else ():
            assert world.receiver.get(key_of(id)) == self.furnished[id]
            assert self.process(world, id)[0] == world.sink.effect(sink_key(id))
            assert not self.starts(id)

    def check_files(self) -> None:
        for name in ("effects.db", "sink.db"):
            with closing(sqlite3.connect(self.directory / name)) as connection:
                assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        with closing(sqlite3.connect(self.directory / "sink.db")) as connection:
            accepted: list[Any] = connection.execute("SELECT key, accepted FROM effects").fetchall()
        effective = {sink_key(id) for id in self.workload.ids if not id.startswith("declined")}
        assert effective <= {key for key, _ in accepted}
        assert {count for _, count in accepted} == {1}

    def process(self, world: World, id: str) -> tuple[str, int | None]:
        """The answer to a message and, where it has one, its fence."""
        try:
            outcome = world.receiver.process(message(id), world.handle, operation=OPERATION)
        except Declined:
            return "declined", None
        return str(outcome.value), outcome.fence

    def starts(self, id: str) -> list[int]:
        return Notes(self.directory).started[id]
