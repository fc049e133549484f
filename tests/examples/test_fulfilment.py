"""The fulfilment of the examples: what its README says; goods, money and parcels through ``kill -9`` of all."""

from __future__ import annotations

import re
from pathlib import Path

from tests.examples.running import Example


def test_the_commands_of_the_readme(tmp_path: Path) -> None:
    """They run as they stand there, and the storm's own audit finds every order shipped or undone, never half."""
    example = Example("fulfilment", tmp_path)
    install, storm = example.commands
    example.run(install)
    lines = example.run(storm).splitlines()
    assert lines[-1] == "the books balance"
    shipped, undone = map(int, re.findall(r"(\d+) shipped, (\d+) undone", lines[0])[0])
    charged, refunded, kept = map(
        int, re.findall(r"(\d+) charges, (\d+) of them refunded, (\d+) cents", lines[1])[0]
    )
    assert shipped and undone and refunded
    assert (shipped + undone, charged - refunded, kept) == (40, shipped, 1250 * shipped)


def test_an_order_that_is_left_behind(tmp_path: Path) -> None:
    """The shop dies after the bank has charged: the sweeper, and nobody else, brings the order to its end."""
    example = Example("fulfilment", tmp_path)
    (example.folder / "mortal.py").write_text(MORTAL)
    command = "env FULFILMENT_LEASE=1s"
    example.run(f"{command} python mortal.py", status=-9)
    for _ in range(2):  # the second finds nothing to do
        swept = example.run(f"{command} python -c '{SWEEP_ENDED}'")
    assert swept.splitlines()[-1] == "completed True {'charge': 1, 'parcel': 1} 0"


MORTAL = """
import os, signal
import outside, shop

outside.LOST = 0
charge = outside.charge

def charge_and_die(*args):
    charge(*args)
    os.kill(os.getpid(), signal.SIGKILL)

outside.charge = charge_and_die
shop.prepare()
shop.fulfil.run("o-1", shop.Order("o-1", "umbrella", 1250))
"""
SWEEP_ENDED = """
import sqlite3
from collections import Counter
import outside, shop
from effectonce.testing.clocks import wait_until
outside.LOST = 0
wait_until(lambda: shop.fulfil.state("o-1").status != "running")
done = shop.sweeper.run_once()
state = shop.fulfil.state("o-1")
lines = Counter(what for (what,) in sqlite3.connect("outside.db").execute("SELECT what FROM lines"))
print(state.status, state.attempt == 2, dict(lines), done.failed)
""".replace("'", '"')
