"""Whoever calls has one of these colours, and the flow treats them alike. Read by mypy and pyright, never run."""

from __future__ import annotations

from effectonce._asyncio import Asyncio
from effectonce._blocking import Blocking
from effectonce._colours import Colour
from effectonce.testing.simulation._colour import Simulated
from effectonce.transactions._flow import InTransaction


def all_colours(
    blocking: Blocking, asyncio: Asyncio, in_transaction: InTransaction, simulated: Simulated
) -> list[Colour]:
    return [blocking, asyncio, in_transaction, simulated]
