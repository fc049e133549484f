"""Stores as receivers have them."""

from __future__ import annotations

from effectonce.stores import Breaker, Store
from effectonce.stores._circuit import Circuit
from effectonce.stores._guarded import guarded


def behind_a_circuit(store: Store) -> Store:
    """The store behind a circuit that never opens: what a stalled server answers is part of the contract.

    And behind another: what the first gives a crowd can be awaited, and is no coroutine, which the suite asks for.
    """
    breaker = Breaker(errors=1_000_000, calls=1_000_000)
    return guarded(guarded(store, Circuit(breaker)), Circuit(breaker))
