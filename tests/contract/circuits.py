"""Stores as receivers have them."""

from __future__ import annotations

from effectonce.stores import Breaker, Store
from effectonce.stores._circuit import Circuit
from effectonce.stores._guarded import guarded


def behind_a_circuit(store: Store) -> Store:
    """The store behind a circuit that never opens: what a stalled server answers is part of the contract."""
    return guarded(store, Circuit(Breaker(errors=1_000_000, calls=1_000_000)))
