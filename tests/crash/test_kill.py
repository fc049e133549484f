"""kill -9 at hundreds of different points: a retry ends with the right answer, no key is stuck, one effect is accepted.

SIGKILL takes a process's memory and leaves the kernel's caches, so this shows what the crash of a process does. What
power loss does depends on the disk as well; ``test_torn_wal`` shows a part of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from tests.crash.conftest import Executioner, Kill
from tests.crash.talking import ROOT
from tests.crash.workloads import WORKLOADS

STEPS, SYSCALLS = 14, 20
"""Points per script in an ordinary run, evenly spread over its life."""
MOMENTS = 20
SOAK_POINTS = 5_000


def spread(length: int, points: int) -> list[int]:
    """So many different points from the first to the last."""
    return sorted({1 + (length - 1) * number // (points - 1) for number in range(points)})


def kill_along(executioner: Executioner, whole: Kill, points: int) -> None:
    """Kill at points spread over a script's life; nearly all have to be reached."""
    wanted = spread(executioner.length(whole), points)
    reached = sum(executioner.execute(whole._replace(at=at)) for at in wanted)
    # Some may lie behind the end: how often a thread waits is not the same in every life.
    assert reached >= 0.7 * len(wanted)


def needs_tracing(executioner: Executioner) -> None:
    if not executioner.can_trace:
        pytest.skip("this machine does not let a process trace its child; kills by step are run all the same")


@pytest.mark.parametrize("workload", WORKLOADS)
def test_killed_at_any_step(executioner: Executioner, workload: str) -> None:
    """Between any two lines of effectonce, or instructions of SQLite, in any thread."""
    kill_along(executioner, Kill(workload, "step", None), STEPS)


@pytest.mark.parametrize("workload", sorted(WORKLOADS.keys() - {"threads"}))
def test_killed_at_any_system_call(executioner: Executioner, workload: str) -> None:
    """Before and after any write, sync, lock or rename: in the middle of a commit, a checkpoint, a file's creation.

    Where threads share all the work, the main thread alone, which is the one that is followed, does too little of it.
    """
    needs_tracing(executioner)
    kill_along(executioner, Kill(workload, "syscall", None), SYSCALLS)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_killed_at_any_step_at_most_once(executioner: Executioner, workload: str) -> None:
    """With on_crash="in_doubt" no handler starts twice; what may have started waits for ``resolve``."""
    kill_along(executioner, Kill(workload, "step", None, once=True), STEPS)


@pytest.mark.parametrize("workload", ["creating", "processing", "releasing"])
def test_killed_at_any_system_call_at_most_once(executioner: Executioner, workload: str) -> None:
    """The same at the borders of system calls."""
    needs_tracing(executioner)
    kill_along(executioner, Kill(workload, "syscall", None, once=True), SYSCALLS)


@pytest.mark.parametrize("by", ["step", "syscall"])
def test_a_neighbour_on_the_same_file_is_unharmed(executioner: Executioner, by: str) -> None:
    """A process that has the file open all the while goes on, and takes over what the dead one held."""
    if by == "syscall":
        needs_tracing(executioner)
    kill_along(executioner, Kill("processing", by, None, beside=True), STEPS)


def test_killed_at_any_moment_on_a_disk(executioner: Executioner, tmp_path: Path) -> None:
    """By the clock, on a real disk where most of a write's time is its sync, threads sharing commits."""
    random = Random(9)
    killed = [
        executioner.execute(Kill("threads", "time", random.randrange(60_000)), tmp_path)
        for _ in range(MOMENTS)
    ]
    assert any(killed)


@pytest.mark.parametrize(
    ("fault", "workload", "finding"),
    [
        ("answers before it records", "processing", "answered too early"),
        ("starts before it claims", "processing", "without a durable claim"),
        ("forgets fences", "releasing", "taken back"),
    ],
)
def test_a_store_with_a_bug_is_found_out(
    executioner: Executioner, fault: str, workload: str, finding: str
) -> None:
    """The examiner can say no: each bug is caught by the rule that it breaks."""
    with pytest.raises(AssertionError, match=finding):
        kill_along(executioner, Kill(workload, "step", None, fault=fault), 40)


OPENER = """
import sys
from effectonce.stores.sqlite import SQLiteStore
print(flush=True)
sys.stdin.readline()
for _ in range(20):
    SQLiteStore(sys.argv[1]).close()
"""


def test_processes_open_one_file_together(tmp_path: Path) -> None:
    """Workers that start at once on a file that is not there yet, and close and open it again, all get in."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", OPENER, str(tmp_path / "effects.db")]
    openers = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(6)
    ]
    for opener in openers:
        assert opener.stdout is not None
        opener.stdout.readline()
    for opener in openers:
        assert opener.stdin is not None
        opener.stdin.write("\n")
        opener.stdin.flush()
    assert [opener.communicate()[1] for opener in openers] == [""] * 6


@pytest.mark.soak
def test_soak(executioner: Executioner) -> None:
    """Thousands of different points, drawn from every script, mode and way to die."""
    random = Random(int(os.environ.get("EFFECTONCE_SEED", "0")))
    ways = ["step", "syscall"] if executioner.can_trace else ["step"]
    killed: set[Kill] = set()
    while len(killed) < SOAK_POINTS:
        workload = random.choice(list(WORKLOADS))
        beside = random.random() < 0.2 and not WORKLOADS[workload].from_nothing
        whole = Kill(workload, random.choice(ways), None, random.random() < 0.3, beside)
        kill = whole._replace(at=random.randint(1, executioner.length(whole)))
        if kill not in killed and executioner.execute(kill):
            killed.add(kill)
