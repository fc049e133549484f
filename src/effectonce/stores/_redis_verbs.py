"""What a Redis store does, whoever carries its requests: the verbs, and the questions of operators.

The usual verb is one step, so one round trip, and is decided here from its answer. What is neither new nor known goes
on as a conversation. Steps of a batch go together where one server has all keys, and so do conversations that go on.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Iterable, Sequence
from typing import Any, Final, TypeVar, cast

from .._protocol import decide_claim, is_expired
from .._records import Claim, Completion, Decision, Ending, Record, State
from ..errors import StoreError
from ._redis_commands import Commands, Order, answers, command, found, order_of, understood
from ._redis_records import OUTLINE_SIZE, outline, told
from ._redis_routes import Dialogue, Routes, all_of
from ._redis_wire import Address, Answers, ReplyError, Requests, complaint
from ._steps import DONE, Conversation, Step, SteppingStore, claiming, ending
from .base import Features, StoreStats, all_answered

T = TypeVar("T")

PAGE: Final = 1000
"""Keys in one page of a SCAN."""
SAMPLE: Final = 10_000
"""Keys of each server that ``stats`` looks at."""
WEIGHED: Final = 32
"""Records of each server whose size in memory it asks for."""


class Verbs(SteppingStore):
    """The verbs, once: the two colours differ in who carries requests to servers."""

    features = Features()
    routes: Routes
    commands: Commands

    suspends: bool
    """Whether ``take`` promises an answer, or has it."""

    def take(self, order: Order) -> Any:
        """Take one step if the way is known. An error may be its answer; then ``deliver`` knows what to do."""
        raise NotImplementedError

    async def exchange(self, requests: Requests) -> Answers:
        """Ask servers, all at once."""
        raise NotImplementedError

    async def listen(self, server: Address, channel: bytes, request: bytes, seconds: float) -> Any:
        """Send a request to be told something on a channel, and wait until it is."""
        raise NotImplementedError

    def place_of(self, key: str) -> Hashable:
        """The server of a cluster that has a key."""
        return self.routes.home(key)

    async def send(self, steps: Sequence[Step]) -> list[Any]:
        """Take steps: in one round trip, unless a server has lost its scripts or a key has moved."""
        orders = list(map(order_of, steps))
        return list(map(understood, orders, await self._take_all(orders)))

    async def send_each(self, steps: Sequence[Step]) -> list[Any]:
        """The same; of a cluster, each server may fail by itself."""
        orders = list(map(order_of, steps))
        taken = await self._take_all(orders, each=True)
        return [
            answer if isinstance(answer, StoreError) else understood(order, answer)
            for order, answer in zip(orders, taken, strict=True)
        ]

    async def claim(self, claim: Claim) -> Decision:
        """Decide one claim. New or known, it is one round trip; only what is neither goes on as a conversation."""
        if not claim.may_create:
            return await self._converse(claiming(claim))
        answer = self.take(claim)
        if self.suspends:
            answer = await answer
        return self.decided(claim, answer) or await self.claim_on(claim, answer)

    async def claim_on(self, claim: Claim, answer: Any) -> Decision:
        """Go on with a claim that its first answer has not decided."""
        if type(answer) is ReplyError:
            (answer,) = await self._deliver([claim])
            if (decision := self.decided(claim, answer)) is not None:
                return decision
        (decision,) = await self._go_on([(claiming(claim), found(claim.key, answer))])
        return decision

    async def complete(self, completion: Completion) -> Ending:
        """End a claim in one round trip, if it is held."""
        if not completion.owner or not completion.began:
            return await self._converse(ending(completion))
        answer = self.take(completion)
        if self.suspends:
            answer = await answer
        return self.ended(completion, answer) or await self.end_on(completion, answer)

    async def end_on(self, completion: Completion, answer: Any) -> Ending:
        """Go on with an ending that its first answer has not decided."""
        if type(answer) is ReplyError:
            (answer,) = await self._deliver([completion])
            if self.ended(completion, answer):
                return DONE
        (other,) = await self._go_on([(ending(completion), found(completion.key, answer))])
        return other

    def decided(self, claim: Claim, answer: Any) -> Decision | None:
        """What the first step of a claim has decided; None if there is more to do, or there was no answer."""
        if type(answer) is bytes:
            record, now = told(claim.key, answer)
            decision = decide_claim(record, claim, now, 0)
            return decision if decision.record is record else None
        if type(answer) is int:
            return decide_claim(None, claim, answer / 1_000_000, answer // 1000 - 1)
        return None

    def ended(self, completion: Completion, answer: Any) -> Ending | None:
        """What the first step of a completion has ended; None if there is more to do."""
        return DONE if type(answer) is int else None

    async def claim_many(self, claims: Sequence[Claim]) -> list[Decision]:
        """Decide many claims in one round trip. A server that is away must not cost those that others have granted."""
        orders = [claim if claim.may_create else claim.key for claim in claims]
        taken = await self._take_all(orders, each=True)
        decisions = list(map(self.decided, claims, taken))
        undecided = [number for number, decision in enumerate(decisions) if decision is None]
        if not undecided:
            return cast("list[Decision]", decisions)
        errors = {n: taken[n] for n in undecided if isinstance(taken[n], StoreError)}
        going = [number for number in undecided if number not in errors]
        talks = [(claiming(claims[n]), found(claims[n].key, taken[n])) for n in going]
        try:
            for number, decision in zip(going, await self._go_on(talks), strict=True):
                decisions[number] = decision
        except StoreError as error:
            errors |= dict.fromkeys(going, error)
        return all_answered([decision or errors[n] for n, decision in enumerate(decisions)])

    async def complete_many(self, completions: Sequence[Completion]) -> list[Ending]:
        """End many claims in one round trip."""
        orders = [each if each.owner and each.began else each.key for each in completions]
        taken = await self._take_all(orders, each=True)
        endings: list[Ending | StoreError] = [DONE] * len(orders)
        for number, answer in enumerate(taken):
            if isinstance(answer, StoreError):
                endings[number] = answer
        others = [n for n, answer in enumerate(taken) if endings[n] is DONE and type(answer) is not int]
        talks = [(ending(completions[n]), found(completions[n].key, taken[n])) for n in others]
        for number, other in zip(others, await self._go_on(talks), strict=True):
            endings[number] = other
        return all_answered(endings)

    async def get(self, key: str) -> Record | None:
        """Read a record."""
        (there,) = await self._take_all([key])
        return found(key, there).record

    async def watch(self, record: Record, seconds: float) -> bool:
        """Mark a record as waited for, and wait until its server tells of a change: of no other record it does."""
        name, request = self.commands.name(record.key), self.commands.watching(record)
        server = await self._hold(self.routes.finding(record.key))
        reply = await self.listen(server, name, request, seconds)
        if isinstance(reply, ReplyError):  # the script is not there, or the key; the next claim finds out
            await self._ask(server, *self.commands.load)
            return False
        return reply is not None

    async def purge(self, limit: int = 256) -> int:
        """Nothing to do: Redis forgets what has expired by itself."""
        await self.now()
        return 0

    async def scan(self, state: State | None = None, after: str = "", limit: int = 256) -> list[Record]:
        """Records in key order. Redis has its keys in no order, so every page is a way through all of them."""
        prefix, first = self.commands.name(""), self.commands.name(after)
        chosen: list[bytes] = []
        for server in await self._hold(self.routes.servers()):
            async for page in self._pages(server):
                names = [name for name in page if name > first and name.startswith(prefix)]
                outlines = await self._outlines(server, names)
                wanted = [name for name, record in outlines.items() if state in (None, record.state)]
                chosen = sorted({*chosen, *wanted})[: max(limit, 0)]
        keys = [name[len(prefix) :].decode("utf-8", "replace") for name in chosen]
        founds = map(found, keys, await self._take_all(keys))
        records = [each.record for each in founds if each.record is not None]
        return [record for record in records if state in (None, record.state)]

    async def now(self) -> float:
        """The clock of the server; of a cluster's first one."""
        address, *_ = await self._hold(self.routes.servers(anew=False))
        seconds, microseconds = await self._demand(address, command(b"TIME"))
        return (int(seconds) * 1_000_000 + int(microseconds)) / 1_000_000

    async def stats(self) -> StoreStats:
        """Count what is there: exactly up to ten thousand keys, beyond that as a sample of as many suggests.

        The keys of other programs in the same database count for this limit.
        """
        servers, now = await self._hold(self.routes.servers()), await self.now()
        samples = [await self._sample(server) for server in servers]
        by_state = Counter[str]()
        for scale, _, records in samples:
            counts = Counter(record.state.name for record in records)
            by_state.update({state: round(count * scale) for state, count in counts.items()})
        pending = [
            r.lease_until - now for _, _, records in samples for r in records if r.state is State.PENDING
        ]
        return StoreStats(
            keys=by_state.total(),
            bytes=round(sum(scale * weight * len(records) for scale, weight, records in samples)),
            by_state=dict(by_state),
            oldest_pending_lease=min(pending, default=None),
            expired=sum(is_expired(record, now) for _, _, records in samples for record in records),
        )

    async def _sample(self, server: Address) -> tuple[float, float, list[Record]]:
        """Some records of a server, each for so many, and how many bytes each of them takes."""
        prefix, looked = self.commands.name(""), 0
        records, weights = dict[bytes, Record](), list[int]()
        async for page in self._pages(server, SAMPLE):
            looked += len(page)
            outlines = await self._outlines(server, [name for name in page if name.startswith(prefix)])
            records |= outlines
            weighed = [
                command(b"MEMORY", b"USAGE", name) for name in list(outlines)[: WEIGHED - len(weights)]
            ]
            weights += [weight for weight in await self._ask(server, *weighed) if type(weight) is int]
        size = await self._demand(server, command(b"DBSIZE"))
        scale = max(1.0, size / looked) if looked >= SAMPLE else 1.0
        return scale, sum(weights) / max(len(weights), 1), list(records.values())

    async def _pages(self, server: Address, most: int = sys.maxsize) -> AsyncIterator[list[bytes]]:
        """The names of keys, in no order, until there are no more or enough."""
        cursor, seen = b"0", 0
        while True:
            cursor, names = await self._demand(server, command(b"SCAN", cursor, b"COUNT", b"%d" % PAGE))
            yield names
            seen += len(names)
            if cursor == b"0" or seen >= most:
                return

    async def _outlines(self, server: Address, names: Sequence[bytes]) -> dict[bytes, Record]:
        """Those of some keys that hold records."""
        last = b"%d" % (OUTLINE_SIZE - 1)
        starts = await self._ask(server, *[command(b"GETRANGE", name, b"0", last) for name in names])
        outlines = zip(names, map(outline, starts), strict=True)
        return {name: record for name, record in outlines if record is not None}

    async def _ask(self, server: Address, *commands: bytes) -> list[Any]:
        """Ask a server; its replies, some of which may be errors."""
        if not commands:
            return []
        answer = (await self.exchange({server: (b"".join(commands), len(commands))}))[server]
        if isinstance(answer, StoreError):
            raise answer
        return answer

    async def _demand(self, server: Address, command: bytes) -> Any:
        """Ask a server something that it must be able to answer."""
        (reply,) = await self._ask(server, command)
        if isinstance(reply, ReplyError):
            raise complaint(server, reply)
        return reply

    async def _take_all(self, orders: Sequence[Order], each: bool = False) -> list[Any]:
        """Take steps, all at once where one server has all keys; ``each`` may have an error for an answer."""
        only, deliver = self.routes.only, self._deliver_each if each else self._deliver
        if only is None or not orders:
            return await deliver(orders)
        bundles = self.commands.bundled(orders)
        replies = await self._ask(only, *[bundle.command for bundle in bundles])
        if len(bundles) == 1 and type(replies[0]) is int:  # nearly always: one answer for all
            return replies * len(orders)
        taken: list[Any] = [None] * len(orders)
        for bundle, reply in zip(bundles, replies, strict=True):
            for number, answer in zip(bundle.whose, answers(reply, len(bundle.whose)), strict=True):
                taken[number] = answer
        if ReplyError in map(type, taken):
            failed = [number for number, answer in enumerate(taken) if type(answer) is ReplyError]
            again = await deliver([orders[number] for number in failed])
            for number, answer in zip(failed, again, strict=True):
                taken[number] = answer
        return taken

    async def _go_on(self, talks: Iterable[tuple[Conversation[T], Any]]) -> list[T]:
        """Go on with conversations whose first step has been answered: all of them share each round trip."""
        ended: dict[int, T] = {}
        going = [(number, talk, reply) for number, (talk, reply) in enumerate(talks)]
        for _, talk, _ in going:
            next(talk)
        while going:
            steps: list[tuple[int, Conversation[T], Step]] = []
            for number, talk, reply in going:
                try:
                    steps.append((number, talk, talk.send(reply)))
                except StopIteration as done:
                    ended[number] = done.value
            replies = await self.send([step for _, _, step in steps])
            going = [(number, talk, reply) for (number, talk, _), reply in zip(steps, replies, strict=True)]
        return [ended[number] for number in sorted(ended)]

    async def _deliver(self, orders: Sequence[Order]) -> list[Any]:
        """Take steps one by one, wherever that leads. What was done before may be done again."""
        return all_of(await self._deliver_each(orders))

    async def _deliver_each(self, orders: Sequence[Order]) -> list[Any]:
        """The same; an error is the answer where one was met."""
        return await self._hold(self.routes.delivering(orders)) if orders else []

    async def _hold(self, dialogue: Dialogue[T]) -> T:
        try:
            requests = next(dialogue)
            while True:
                requests = dialogue.send(await self.exchange(requests))
        except StopIteration as done:
            return cast("T", done.value)
