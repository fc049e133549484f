"""Sessions in Redis or Valkey, also in a cluster: one hash for each session, one EVALSHA for the verbs of a moment.

The server's clock decides, and its expiry collects: a session's hash lives as long as its lease. What is neither new
nor known goes on as a conversation, like that of every store on a server, and the protocol decides between its steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha1
from math import inf
from pathlib import Path
from struct import Struct
from typing import Any, Final, NamedTuple, TypeVar, cast

from .._records import Claim, Completion, Decision, Record, State, make
from ..errors import StoreUnavailable, UsageError
from ..stores._redis_commands import Parts, Shape, arguments, command
from ..stores._redis_routes import Dialogue, Routes, all_of
from ..stores._redis_verbs import Verbs
from ..stores._steps import DONE, Add, Added, End, Found, Step, SteppingStore, Swap
from ..stores.base import Features, Store, StoreStats
from ..stores.redis import RedisStore
from ._rules import Contact, Session, SessionClaim, expired, parts_of, refusal_of, stale
from ._store import SessionStore

T = TypeVar("T")

SCRIPTS: Final = {"claim": 7, "end": 6, "swap": 3, "read": 1, "contact": 4}
"""And how many arguments each of their steps has."""
ANSWER, SESSION, LOW = Struct(">Bd"), Struct(">dddd"), Struct(">d")
REQUEST: Final = Struct(">BBIIdBHB")
ENDED: Final = (State.COMPLETED, State.FAILED)


class Order(NamedTuple):
    """A step about a session, in the pieces that travel in one command with those of others."""

    key: str
    parts: Parts


class Commands:
    """What ``Routes`` wants to know of commands: where they go, and which scripts they need."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        folder = Path(__file__).parent / "lua"
        texts = {
            name: b"".join([(folder / f"{part}.lua").read_bytes() for part in ("opening", name, "closing")])
            for name in SCRIPTS
        }
        self.load = [command(b"SCRIPT", b"LOAD", text) for text in texts.values()]
        self._shapes = {
            name: Shape(sha1(text, usedforsecurity=False).hexdigest().encode(), SCRIPTS[name])
            for name, text in texts.items()
        }

    def name(self, session: str) -> bytes:
        """What a session's key is called in Redis."""
        return self._store.commands.name(f"session:{session}")

    def order(self, script: str, session: str, *texts: bytes) -> Order:
        """What a script is to do for a session."""
        return Order(session, (self._shapes[script], self.name(session), arguments(*texts)))

    def of(self, order: Order) -> bytes:
        """The command that does it alone."""
        shape, name, argument = order.parts
        return shape.command(name, argument)


class RedisSessions(SteppingStore, SessionStore):
    """The sessions beside the records of a Redis store, over its connections."""

    features = Features()

    def __init__(self, store: RedisStore, verbs: Verbs, commands: Commands, routes: Routes) -> None:
        self._store, self._verbs, self._commands, self._routes = store, verbs, commands, routes

    @classmethod
    def beside(cls, store: RedisStore) -> RedisSessions:
        """The sessions in the server or cluster that a store's records are in."""
        commands: Any = Commands(store)
        return cls(store, store, commands, Routes(store._target, commands))

    async def contact(self, contact: Contact) -> Session:
        """Open, resume, touch or end a session."""
        kind, name, epoch, low, lease = contact
        texts = (kind.encode(), b"%d" % epoch, b"%d" % low, repr(lease).encode())
        code, now, data = await self._ask(self._commands.order("contact", name, *texts))
        if code == 2:
            raise refusal_of(_session(name, data), epoch, now) or expired()
        return cast("Session", _session(name, data))

    async def claim(self, claim: Claim) -> Decision:
        """Decide one request, with everything that its contact means for its session."""
        return await SteppingStore.claim(self, claim)

    async def send(self, steps: Sequence[Step]) -> list[Any]:
        """Have steps done, all at once."""
        answers = await self._answers([self._order(step) for step in steps])
        return [
            _reply(step, *_parted(cast("bytes", answer))) for step, answer in zip(steps, answers, strict=True)
        ]

    def _order(self, step: Step) -> Order:
        """A step as a command. What is not known here is read, and then swapped by the conversation."""
        session, number = parts_of(step.key)
        name = b"%d" % number
        if type(step) is Add:
            place = cast("SessionClaim", step.claim).place
            numbers = (b"%d" % place.low, b"%d" % place.epoch, repr(step.claim.lease).encode())
            texts = (b"%d" % step.claim.once, step.claim.owner, step.claim.fingerprint)
            return self._commands.order("claim", session, name, *numbers, *texts)
        if type(step) is End and step.completion.state in ENDED:
            return self._commands.order("end", session, name, *_ending(step.completion))
        if type(step) is Swap:
            return self._commands.order("swap", session, name, packed(step.before), packed(step.after))
        return self._commands.order("read", session, name)

    async def _ask(self, order: Order) -> tuple[int, float, bytes]:
        (answer,) = await self._answers([order])
        return _parted(cast("bytes", answer))

    async def _answers(self, orders: list[Order]) -> list[Any]:
        """What servers say: one command by the straight way if that is known, else wherever it leads."""
        if len(orders) == 1:
            answer = await self._straight(orders[0])
            if type(answer) is bytes:
                return [answer]
        return all_of(await self._hold(self._routes.delivering(cast("Any", orders))))

    async def _straight(self, order: Order) -> Any:
        """What its server says, by the way that the store's own steps go: together with others of the same moment."""
        server = self._routes.guess(order.key)
        if server is None:
            return None
        is_alone = self._routes.only is None  # in a cluster a command may name keys of one slot only
        try:
            if self._verbs.suspends:
                link = self._store.lines().links.get(server)
                if link is None:
                    return None
                return await (link.ask(self._commands.of(order)) if is_alone else link.take(order.parts))
            return self._store._pool.to(server).ask(self._commands.of(order))
        except StoreUnavailable:
            self._routes.forget()
            raise

    async def _hold(self, dialogue: Dialogue[T]) -> T:
        try:
            requests = next(dialogue)
            while True:
                requests = dialogue.send(await self._verbs.exchange(requests))
        except StopIteration as done:
            return cast("T", done.value)

    async def purge(self, limit: int = 256) -> int:
        """Nothing to do: Redis forgets sessions whose lease is over by itself."""
        return 0

    async def now(self) -> float:
        """The clock of the server."""
        return await self._verbs.now()

    async def stats(self) -> StoreStats:
        """Refused: it would mean to read every session."""
        raise UsageError("Sessions in Redis are not counted; INFO keyspace says how many keys there are.")

    def for_asyncio(self) -> Store:
        """The same over the connections of event loops."""
        verbs = cast("Verbs", self._store.for_asyncio())
        return RedisSessions(self._store, verbs, self._commands, self._routes)


def _reply(step: Step, code: int, now: float, data: bytes) -> Any:
    """The reply to a step. A refusal is raised: it stands for the only step there is."""
    if type(step) is Add:
        place = cast("SessionClaim", step.claim).place
        if code == 2:
            raise refusal_of(_session(place.session, data), place.epoch, now) or expired()
        if code == 3:
            raise stale(step.key, place.number, int(LOW.unpack(data)[0]))
        if code == 0:
            return Added(1, now)
    elif type(step) is Swap:
        return code == 0
    elif code == 0:
        return DONE
    return Found(unpacked(step.key, data) if data else None, now)


def _parted(answer: bytes) -> tuple[int, float, bytes]:
    code, now = ANSWER.unpack_from(answer)
    return code, now, answer[ANSWER.size :]


def _session(name: str, data: bytes) -> Session | None:
    if not data:
        return None
    epoch, low, lease, until = SESSION.unpack(data)
    return Session(name, int(epoch), int(low), lease, until)


def _ending(completion: Completion) -> tuple[bytes, ...]:
    has_result = b"0" if completion.result is None else b"1"
    numbers = (b"%d" % completion.fence, b"%d" % completion.state, has_result)
    return (completion.owner, *numbers, completion.result or b"")


def packed(record: Record) -> bytes:
    """A request as it is stored. Every one has one form only, and so a swap compares them whole."""
    result = record.result
    start = REQUEST.pack(
        record.state, record.once, record.attempts, record.fence, record.lease_until, len(record.owner),
        len(record.fingerprint), result is not None,
    )  # fmt: skip
    return b"".join((start, record.owner, record.fingerprint, result or b""))


def unpacked(key: str, data: bytes) -> Record:
    """The request that is stored. It never expires: it leaves by the mark, or with its session."""
    state, once, attempts, fence, until, size, print_size, has_result = REQUEST.unpack_from(data)
    start = REQUEST.size + size
    owner, fingerprint = data[REQUEST.size : start], data[start : start + print_size]
    result = data[start + print_size :] if has_result else None
    fields = (key, State(state), owner, fence, fingerprint, until, attempts, result, inf, bool(once))
    return make(Record, fields)
