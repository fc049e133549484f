"""The transactional outbox: events are committed with the change they tell of, and a relay publishes them.

outbox = Outbox()
with connection.transaction():
    ...                                             # the change
    outbox.on(connection).add("orders", {"id": 1}, key="order-1")

Relay("postgresql://…", "redis://…").run()          # elsewhere: ``effectonce relay``
"""

from ._batch import Poison
from ._database import Lag
from ._events import DeadEvent, Event, Publisher, Results, Unsent
from ._outbox import Outbox, Writer
from .relay import Figures, Relay

__all__ = [
    "DeadEvent",
    "Event",
    "Figures",
    "Lag",
    "Outbox",
    "Poison",
    "Publisher",
    "Relay",
    "Results",
    "Unsent",
    "Writer",
]
