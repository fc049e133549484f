"""Exceptions raised by signals, anywhere in the middle of a call: nobody is stuck, nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.integration.redis_helpers import forget
from tests.integration.sqlite_helpers import ROOT
from tests.servers.fixtures import HasURL

from effectonce.keys import uuid4

INTERRUPTS = 20_000 if os.environ.get("EFFECTONCE_SOAK") else 1_500

STORM = """
import faulthandler, random, signal, sys, threading
faulthandler.dump_traceback_later(80 + int(sys.argv[2]) // 20, exit=True)
from effectonce import Message, Policy, Receiver

class Interrupted(BaseException):
    pass

def interrupt(*_):
    raise Interrupted

def call(number):
    outcome = receiver.process(Message(str(number), source="storm"), lambda payload: {"number": number})
    assert outcome.value == {"number": number}, outcome
    answered.append(number)

def others(first):
    number = first
    while not done.is_set():
        call(number)
        number += 8

wanted = int(sys.argv[2])
receiver = Receiver(sys.argv[1], policy=Policy(lease=1.0))
done, answered, interrupted = threading.Event(), [], []
threads = [threading.Thread(target=others, args=(first,)) for first in range(1, 8)]
signal.signal(signal.SIGALRM, interrupt)
for thread in threads:
    thread.start()
number = 0
while len(interrupted) < wanted:
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00002, 0.002), 1.0)  # again, if a finalizer ate it
            while True:
                number += 8
                call(number)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Interrupted:
        interrupted.append(number)
done.set()
for thread in threads:
    thread.join()
messages = [Message(str(number), source="storm") for number in set(interrupted)]
patient = Policy(lease="1m")  # who is starved of time for a second has not lost anything yet
outcomes = receiver.process_batch(messages, lambda message: None, concurrency=64, policy=patient)
settled = {outcome.status if outcome.error is None else type(outcome.error).__name__ for outcome in outcomes}
receiver.close()
with Receiver(sys.argv[1]) as again:
    messages = [Message(str(number), source="storm") for number in answered]
    for number, outcome in zip(answered, again.process_batch(messages, lambda message: None, size=1000)):
        assert (outcome.status, outcome.value) == ("replayed", {"number": number}), (number, outcome)
print(len(interrupted), *sorted(settled))
"""


FEW_CONNECTIONS = """
from effectonce.stores import _redis_threads
_redis_threads.MOST_AT_ONCE, _redis_threads.LOOK_AFTER_SECONDS = 4, 0.01
"""


def test_a_storm_of_signals_strands_nobody(tmp_path: Path) -> None:
    """The main thread is interrupted at random places while others use the same file: all of them go on."""
    _storm(f"sqlite:///{tmp_path / 'storm.db'}?durability=normal")


def test_a_storm_of_signals_on_the_way_to_a_server(valkey: HasURL) -> None:
    """Nor is anybody stranded on connections, of which there are fewer than threads, or given another one's reply."""
    prefix = f"{uuid4()}:"
    try:
        _storm(f"{valkey.url}?prefix={prefix}", before=FEW_CONNECTIONS)
    finally:
        forget(valkey.url, prefix)


def _storm(url: str, before: str = "") -> None:
    """In a process of its own, because the timer belongs to whoever runs the tests."""
    storm = [sys.executable, "-W", "ignore::RuntimeWarning", "-c", before + STORM, url, str(INTERRUPTS)]
    ended = subprocess.run(storm, cwd=ROOT, capture_output=True, text=True, timeout=3600, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    count, *statuses = ended.stdout.split()
    assert int(count) == INTERRUPTS
    assert set(statuses) <= {"executed", "replayed"}, f"a key is stuck: {statuses}"
