"""Sagas: steps that all happen, or are all undone, whatever crashes.

A saga is one key of a receiver. What it has done so far is the journal in that key's record, one conditional write for
each step, so that any process with the same definition can go on where another one died.

    _definition  step, pivot, together: how a saga is written down, and what is checked before it runs
    _outline     the frozen data of a definition
    _decisions   PURE: what is next, from the journal alone
    _driver      does it, and records what became of it
    _saga        Saga, the object people hold         _form     the journal as bytes
    _barrier     actions and compensations that meet  _state    where a saga is, for dashboards
"""

from ..errors import Compensated
from ._barrier import Barrier, barrier
from ._definition import pivot, step, together
from ._saga import Saga
from ._state import Failure, SagaState, StepState

__all__ = [
    "Barrier",
    "Compensated",
    "Failure",
    "Saga",
    "SagaState",
    "StepState",
    "barrier",
    "pivot",
    "step",
    "together",
]
