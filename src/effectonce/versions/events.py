"""Events of one entity in their order, however they arrive: repeated, late, or ahead of those before them.

Whoever changes an order, an account, a document numbers its events 1, 2, 3 …, and each consumer remembers, in its own
database, how far it has come with each entity. What is not above that is skipped. The next one is applied. One that is
further ahead came too early: it is refused (``gaps="report"``), so that its broker delivers it again; or kept beside
the position (``gaps="park"``) until those before it have come, and then handed out in order; or, where every event
carries the whole state, applied at once (``gaps="allow"``), and those that it overtook are skipped.

Position, parked events and what the consumer does to its own tables are one transaction: yours. After a rollback or a
crash all of it is as if the event had not come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple, get_args

from .. import codec
from ..errors import UsageError, VersionGap
from ._rules import Arrival, decide_event, run_after
from ._sql import Line, check_text, check_version, plain, shown

Gaps = Literal["report", "park", "allow"]

WINDOW: Final = 100
"""How many parked events are read at a time."""


class Gap(NamedTuple):
    """An entity that waits: it is at ``applied``, and of its ``parked`` events the first is of version ``lowest``."""

    entity: str
    applied: int
    lowest: int
    parked: int


class EventOrder:
    """How far one consumer has come with each entity.

    consumer   who applies the events; two consumers of one database keep apart by it
    gaps       what an event that came too early gets: "report" (default), "park" or "allow"
    first      the version of an entity's first event
    event      the type of the events, as of a function's result, if they are of classes of yours
    """

    def __init__(self, consumer: str, *, gaps: Gaps = "report", first: int = 1, event: Any = Any) -> None:
        if gaps not in get_args(Gaps):
            raise UsageError(f"gaps={shown(gaps)} is not a choice. Say one of {', '.join(get_args(Gaps))}.")
        self.consumer = check_text("consumer", consumer)
        self.gaps, self.event = gaps, event
        self.first = check_version("first", first)

    def on(self, connection: Any) -> EntityEvents:
        """The order of events over a connection or session of yours, in the transaction that is open there."""
        return EntityEvents(self, Line(connection))


class EntityEvents:
    """``order.on(connection)``. Methods with ``a`` are for async connections."""

    def __init__(self, order: EventOrder, line: Line) -> None:
        self._order, self._line = order, line

    def take(self, entity: str, version: int, event: Any) -> list[Any]:
        """The events to apply now, in order: this one if it is due, and those parked ones that it lets go.

        None if it is old, or parked. ``VersionGap`` if it came too early and gaps are reported.
        """
        return self._line.blocking(self._take(entity, version, event), instead="atake")

    async def atake(self, entity: str, version: int, event: Any) -> list[Any]:
        """``take`` for async connections."""
        return await self._line.awaiting(self._take(entity, version, event), instead="take")

    def position(self, entity: str) -> int:
        """The version of the entity's last event that was applied; one below the first, if none was."""
        return self._line.blocking(self._position(entity), instead="aposition")

    async def aposition(self, entity: str) -> int:
        """``position`` for async connections."""
        return await self._line.awaiting(self._position(entity), instead="position")

    def skip_to(self, entity: str, version: int) -> list[Any]:
        """Give up all events up to this version, as after loading a snapshot; what is due thereby, as ``take`` does."""
        return self._line.blocking(self._skip_to(entity, version), instead="askip_to")

    async def askip_to(self, entity: str, version: int) -> list[Any]:
        """``skip_to`` for async connections."""
        return await self._line.awaiting(self._skip_to(entity, version), instead="skip_to")

    def gaps(self) -> list[Gap]:
        """The entities whose events wait for one that has not come: for an alert, and for a person to look at."""
        return self._line.blocking(self._gaps(), instead="agaps")

    async def agaps(self) -> list[Gap]:
        """``gaps`` for async connections."""
        return await self._line.awaiting(self._gaps(), instead="gaps")

    async def _take(self, entity: str, version: int, event: Any) -> list[Any]:
        order, who = self._order, self._who(entity)
        check_version("version", version, order.first)
        # Encoded in any case: an event that can't be parked should be heard of before the first gap.
        parcel = codec.encode(event, order.event) if order.gaps == "park" else b""
        if await self._advanced(who, version):
            return [event]
        applied, parked = await self._held(who)
        verdict = decide_event(applied, version)
        if verdict is Arrival.OLD:
            return []
        if verdict is Arrival.DUE or order.gaps == "allow":
            return [event, *await self._moved(who, version, parked)]
        if order.gaps == "report":
            raise _gap(entity, applied, version)
        if await self._do("park", *who, version, parcel):
            await self._do("count", *who)
        return []

    async def _advanced(self, who: tuple[Any, ...], version: int) -> bool:
        """The usual case, in one statement: the position was one below, or there was none and this is the first."""
        if version == self._order.first and await self._do("begin", *who, version) == 1:
            return True
        return await self._do("advance", version, *who, version - 1) == 1

    async def _held(self, who: tuple[Any, ...]) -> tuple[int, int]:
        """The position and how many are parked, which nobody else can change before this transaction ends.

        It is held by a write, not by a read: whoever applies the missing event at the same moment has to see what is
        parked here, or has to be told by the database to begin again.
        """
        await self._do("begin", *who, self._order.first - 1)
        await self._do("hold", *who)
        ((applied, parked),) = await self._ask("position", *who, latest=True)
        return int(applied), int(parked)

    async def _moved(self, who: tuple[Any, ...], version: int, parked: int) -> list[Any]:
        """Go to that version, and on from there through what is parked: the events that are due thereby, in order."""
        due = await self._waiting(who, version) if parked else []
        last = version + len(due)
        freed = await self._do("unpark", *who, last) if parked else 0
        await self._do("place", last, freed, *who)
        return [codec.decode(parcel, self._order.event) for parcel in due]

    async def _waiting(self, who: tuple[Any, ...], applied: int) -> list[bytes]:
        """The parked events that follow without a gap."""
        due: list[bytes] = []
        more = True
        while more:
            last = applied + len(due)
            rows = await self._ask("waiting", *who, last, last + WINDOW, latest=True)
            run = run_after(last, ((int(version), bytes(parcel)) for version, parcel in rows))
            due += [parcel for _, parcel in run]
            more = len(run) == WINDOW
        return due

    async def _position(self, entity: str) -> int:
        rows = await self._ask("position", *self._who(entity))
        return int(rows[0][0]) if rows else self._order.first - 1

    async def _skip_to(self, entity: str, version: int) -> list[Any]:
        who = self._who(entity)
        check_version("version", version, self._order.first)
        applied, parked = await self._held(who)
        return [] if version <= applied else await self._moved(who, version, parked)

    async def _gaps(self) -> list[Gap]:
        rows = await self._ask("gaps", self._line.text(self._order.consumer))
        return [Gap(plain(row[0]), *map(int, row[1:])) for row in rows]

    def _who(self, entity: str) -> tuple[Any, ...]:
        return self._line.text(self._order.consumer), self._line.text(check_text("entity", entity))

    async def _do(self, name: str, *values: Any) -> int:
        return (await self._line.ours(name, values)).changed

    async def _ask(self, name: str, *values: Any, latest: bool = False) -> Sequence[Any]:
        return (await self._line.ours(name, values, latest=latest)).rows


def _gap(entity: str, applied: int, version: int) -> VersionGap:
    return VersionGap(
        f"Event {version} of {shown(entity)} came too early: {applied} was the last one applied. Roll back and let it"
        " be delivered again later, or park such events with EventOrder(…, gaps='park').",
        entity=entity,
        applied=applied,
        version=version,
    )
