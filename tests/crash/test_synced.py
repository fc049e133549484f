"""Nothing is said before the disk has said so: with durability="full" every word waits for its sync."""

from __future__ import annotations

import platform

import pytest
from tests.crash.conftest import Executioner, Kill
from tests.crash.tracing import CALLS
from tests.crash.workloads import WORKLOADS

LOG = "effects.db-wal"


def spoken_early(executioner: Executioner, workload: str, durability: str) -> tuple[int, int]:
    """How often the script was told something, and how often that was before the log had been synced."""
    kill = Kill(workload, "watch", None, durability=durability)
    with executioner.scene(kill) as (directory, _):
        calls = executioner.order(kill, directory)["calls"]
    told = early = 0
    unsynced = False
    for call, file in calls:
        if file == LOG:
            unsynced = call == "write"
        elif file == "journal":
            told += 1
            early += unsynced
    assert [LOG, "write"] in [[file, call] for call, file in calls], "the log was never written"
    return told, early


@pytest.fixture(autouse=True)
def tracing(executioner: Executioner) -> None:
    if not executioner.can_trace or platform.machine() not in CALLS:
        pytest.skip("this machine does not let a process trace its child")


# In the others the main thread, which alone is followed, leaves some of the writing to other threads.
@pytest.mark.parametrize("workload", sorted(WORKLOADS.keys() - {"batches", "threads", "loops"}))
def test_a_handler_starts_and_an_answer_is_given_after_the_sync(
    executioner: Executioner, workload: str
) -> None:
    """A claim is on the disk before its handler starts, a result before it is given."""
    told, early = spoken_early(executioner, workload, "full")
    assert told >= 2
    assert early == 0


def test_relaxed_durability_is_seen_to_be_relaxed(executioner: Executioner) -> None:
    """With durability="normal" the log is not synced at each commit, which this suite would notice."""
    told, early = spoken_early(executioner, "processing", "normal")
    assert early == told
