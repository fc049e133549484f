"""effectonce: a request, a message, a job or a call may arrive many times; its effect happens once.

from effectonce import Receiver

receiver = Receiver("sqlite:///effects.db")

@receiver.idempotent(key="order_id")
def charge(order_id: str, cents: int) -> str: ...
"""

from ._attempt import Attempt as Attempt  # for annotations; no everyday name
from ._attempt import current
from ._messages import Message, Outcome
from ._receiver import Receiver
from ._records import Record, State
from .errors import (
    EffectOnceError,
    InDoubt,
    InProgress,
    KeyReused,
    LateArrival,
    LeaseLost,
    NotApplied,
    StoreUnavailable,
)
from .policy import Policy

__version__ = "0.1.0"

__all__ = [
    "EffectOnceError",
    "InDoubt",
    "InProgress",
    "KeyReused",
    "LateArrival",
    "LeaseLost",
    "Message",
    "NotApplied",
    "Outcome",
    "Policy",
    "Receiver",
    "Record",
    "State",
    "StoreUnavailable",
    "current",
]
