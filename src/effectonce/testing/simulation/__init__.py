"""Every schedule of a small system: the real receiver against the real memory store, in a world that goes wrong.

    async def script(receiver):
        return await receiver.aprocess(message, handler)

    ada, bob, eve = (Task(name, "charge", (Asked(key, fingerprint),), script) for name in ("ada", "bob", "eve"))
    print(explore(Scenario("two and a crash", ((ada,), (bob,)), retries=(eve,), crashes=1)))

Workers crash, are cancelled, or stand still while time passes; the network loses, delays and repeats; clocks differ.
At every step of every order in which that can happen, the invariants have to hold. A schedule that breaks one is told
as a numbered story, and ``replay`` goes through it again.
"""

from __future__ import annotations

from ._invariants import INVARIANTS
from ._moments import Action, Scenario, Step, Violation
from ._requests import Asked, Cancelled, Task, effect, think
from ._search import Counterexample, Explored, explore, find, replay

__all__ = [
    "INVARIANTS",
    "Action",
    "Asked",
    "Cancelled",
    "Counterexample",
    "Explored",
    "Scenario",
    "Step",
    "Task",
    "Violation",
    "effect",
    "explore",
    "find",
    "replay",
    "think",
]
