"""effectonce's client sessions: the same requests as with a key each, numbered and acknowledged by their clients."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from benchmarks.workers.base import Counter, Setup, Subject
from benchmarks.workers.effectonce import _url
from benchmarks.workers.forms import Forms, subject
from effectonce import Receiver
from effectonce.sessions import ClientSession, Sessions


def open_subject(setup: Setup) -> Subject:
    """Open one case of sessions. Each caller has a session of its own, opened once."""
    receiver = Receiver(_url(setup))
    sessions = Sessions(receiver)
    counter = Counter()
    idle = deque(ClientSession(sessions.open()) for _ in range(max(1, setup.tasks)))
    process, aprocess = sessions.process, sessions.aprocess

    def run(keys: Iterable[str]) -> None:
        client = idle.popleft()
        for _ in keys:
            with client.request() as request:
                process(request, counter.handle)
        idle.append(client)

    async def arun(keys: Iterable[str]) -> None:
        client = idle.popleft()
        for _ in keys:
            with client.request() as request:
                await aprocess(request, counter.ahandle)
        idle.append(client)

    def close() -> None:
        sessions.close()
        receiver.close()

    return subject(setup, Forms(counter=counter, run=run, arun=arun, close=close))
