"""Versions: who may write, what comes next, and which of two states is newer.

Three guards for data that several hands touch, and a last one for the row that is the effect itself::

    VersionGuard    rows of yours, written only at the version that was read       (guard.py)
    EventOrder      events of an entity, applied once each and in order            (events.py)
    VersionVector   states of several writers: newer, older, equal or in conflict  (vectors.py)
    UniqueEffect    a unique column that refuses the second row of one effect      (unique.py)

The rules are tables in ``_rules.py`` and ``vectors.py``. The SQL forms speak over a connection or session of yours, in
the transaction that is open there: ``guard.on(connection)``. They never commit.
"""

from ..errors import StaleVersion, VersionGap
from ._sql import schema
from .events import EventOrder, Gap
from .guard import Change, VersionGuard
from .unique import UniqueEffect
from .vectors import VersionVector

__all__ = [
    "Change",
    "EventOrder",
    "Gap",
    "StaleVersion",
    "UniqueEffect",
    "VersionGap",
    "VersionGuard",
    "VersionVector",
    "schema",
]
