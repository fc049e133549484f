"""The notifications of the examples: what the README says, and what customers get, through kills and rebalances."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import urlopen
from uuid import uuid4

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from tests.examples.running import ENVIRONMENT, Example
from tests.servers.ports import reserve_port

from effectonce.testing.clocks import wait_until

CHANNELS = ("email", "sms", "push")
ORDERS, PARTITIONS = 60, 3
MORTAL = """
import os, signal, sys
import channels, notify

channel = sys.argv[1]
send = channels.CHANNELS[channel]

def send_and_die(order, key):
    send(order, key)
    os.kill(os.getpid(), signal.SIGKILL)

channels.CHANNELS[channel] = send_and_die
notify.main(channel)
"""
"""A consumer that dies when it has sent something, before it can record that."""


@pytest.fixture
def example(tmp_path: Path) -> Example:
    made = Example("notifications", tmp_path)
    (made.folder / "mortal.py").write_text(MORTAL)
    return made


def test_a_first_look_needs_no_broker(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two commands of the README; with a store in a file, another run sends nothing."""
    install, look, *_ = example.commands
    example.run(install)
    lines = [line.split() for line in example.run(look).splitlines()]
    assert [(words[0], words[3], words[5]) for words in lines] == [
        (channel, "20", "20") for channel in CHANNELS
    ]
    monkeypatch.setenv("EFFECTONCE_STORE", "sqlite:///effects.db")
    example.run(look)
    again = [line.split() for line in example.run(look).splitlines()]
    assert [words[3] for words in again] == ["0", "0", "0"]


class Stage:
    """A topic, the sinks, and consumers to kill."""

    def __init__(self, example: Example, servers: str, stack: ExitStack) -> None:
        self._example, self._stack = example, stack
        self._servers, self._topic = servers, f"orders-{uuid4().hex}"
        made = AdminClient({"bootstrap.servers": servers, "log_level": 0})
        made.create_topics([NewTopic(self._topic, PARTITIONS, 1)])[self._topic].result(30)
        smtp, reservation = reserve_port()
        stack.callback(reservation.close)
        self._own = {"KAFKA": servers, "TOPIC": self._topic, "SMTP_PORT": str(smtp)}
        sinks = stack.enter_context(example.serve("python sinks.py 8000", self._own))
        self._own["SINKS"] = sinks.url

    @property
    def environment(self) -> Mapping[str, str]:
        return os.environ | ENVIRONMENT | self._own

    def start(self, channel: str, script: str = "notify.py") -> subprocess.Popen[bytes]:
        """A consumer of a channel."""
        command = [sys.executable, script, channel]
        process = subprocess.Popen(command, cwd=self._example.folder, env=self.environment)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def send(self, count: int) -> None:
        command = [sys.executable, "orders.py", str(count)]
        subprocess.run(command, cwd=self._example.folder, env=self.environment, check=True, timeout=60)

    def counts(self, what: str = "kept") -> dict[str, int]:
        """What each sink has kept, or dropped."""
        with urlopen(self._own["SINKS"], timeout=10) as answer:
            found: dict[str, dict[str, int]] = json.load(answer)
        return {channel: figures[what] for channel, figures in found.items()}

    def is_done(self, channel: str) -> bool:
        """Whether a channel's group has committed all there is."""
        settings: dict[str, Any] = {
            "bootstrap.servers": self._servers,
            "group.id": f"notify-{channel}",
            "log_level": 0,
        }
        looker = Consumer(settings)
        places = [TopicPartition(self._topic, number) for number in range(PARTITIONS)]
        try:
            ends = [looker.get_watermark_offsets(place, timeout=10)[1] for place in places]
            return [max(each.offset, 0) for each in looker.committed(places, timeout=10)] == ends
        finally:
            looker.close()


@pytest.fixture
def stage(kafka: Any, example: Example) -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(example, kafka.url.removeprefix("kafka://"), stack)


def test_everybody_is_told_once_through_kills_and_rebalances(stage: Stage) -> None:
    """Consumers are killed in the middle, and one right after it has sent something; partitions move to others.

    Each order is kept once by each sink. What was sent twice had the same key, and only what a kill had caught was.
    """
    mortal = stage.start("push", "mortal.py")
    emails = [stage.start("email"), stage.start("email")]
    texting = stage.start("sms")
    stage.send(ORDERS)
    assert mortal.wait(60) == -signal.SIGKILL
    running = [stage.start("push")]
    wait_until(lambda: stage.counts()["email"] > ORDERS // 4, seconds=60)
    emails[0].kill()
    running += [emails[1], stage.start("email")]  # one joins while another is missed: two rebalances
    wait_until(lambda: stage.counts()["sms"] > ORDERS // 4, seconds=60)
    texting.kill()
    running.append(stage.start("sms"))
    wait_until(lambda: all(map(stage.is_done, CHANNELS)), seconds=120)
    for consumer in running:
        consumer.terminate()
    assert [consumer.wait(60) for consumer in running] == [0] * len(running)
    assert stage.counts() == dict.fromkeys(CHANNELS, ORDERS)
    repeats = stage.counts("repeats")
    assert 1 <= repeats["push"] <= 10
    assert repeats["email"] <= 10
    assert repeats["sms"] <= 10
