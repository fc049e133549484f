"""Group commit: callers who arrive while a write is on its way to the disk share the next one.

There is no writer thread. The first caller leads: it writes on its own thread, at once and alone. Those who come
meanwhile queue up. The first of them waits for the lead itself and then writes for all; the others wait to be told.

A signal may end a caller with an exception at any moment. The lead is a lock taken by ``with``, which gives it back
whatever happens, and it never passes from hand to hand. What a signal can still lose is a word to those who wait; so
they don't rely on it for ever.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import repeat
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

C = TypeVar("C")
A = TypeVar("A")

LOOK_AFTER_SECONDS = 0.5
"""After so long without a word, who waits looks for itself."""
MOST_AT_ONCE = 1024
"""Commands in one write, so that the last caller of a long queue does not wait for all of it."""


class _Ticket(Generic[C, A]):
    """A caller in the queue."""

    __slots__ = ("answers", "commands", "error", "served", "word")

    def __init__(self, commands: list[C]) -> None:
        self.commands = commands
        self.answers: list[A] = []
        self.error: BaseException | None = None
        self.served = False
        self.word: SimpleQueue[None] = SimpleQueue()

    def wait(self) -> bool:
        """Wait for a word; False if none came."""
        try:
            self.word.get(timeout=LOOK_AFTER_SECONDS)
        except Empty:
            return False
        return True


class Group(Generic[C, A]):
    """Runs ``write`` for one caller at a time, with everything that has queued up.

    ``lead`` is held by whoever writes; ``with group.lead`` is also the way to keep everybody from writing.
    ``common`` are failures that no single command is to blame for: all who share the write get them at once.
    """

    def __init__(self, write: Callable[[list[C]], list[A]], common: tuple[type[Exception], ...]) -> None:
        self._write = write
        self._common = common
        self.lead = threading.Lock()
        self.queue: deque[_Ticket[C, A]] = deque()

    @property
    def busy(self) -> bool:
        """Whether somebody leads, or waits to: then whoever comes had better queue up too."""
        return self.lead.locked() or bool(self.queue)

    def submit(self, commands: list[C]) -> list[A]:
        """Have commands written together with others', and wait for the answers."""
        ticket: _Ticket[C, A] = _Ticket(commands)
        self.queue.append(ticket)
        try:
            while not ticket.served:
                if self._is_first(ticket) or not ticket.wait():
                    self._lead(ticket)
        except BaseException:  # Ctrl-C: nobody is to wait for one who left
            self._leave(ticket)
            raise
        if ticket.error is not None:
            raise ticket.error
        return ticket.answers

    def _is_first(self, ticket: _Ticket[C, A]) -> bool:
        try:
            return self.queue[0] is ticket
        except IndexError:
            return False

    def _lead(self, mine: _Ticket[C, A]) -> None:
        """Write for all in the queue, unless another leader has served this ticket meanwhile."""
        batch: list[_Ticket[C, A]] = []
        try:
            with self.lead:
                if not mine.served:
                    self._take(mine, batch)
                    self._serve(batch)
        finally:  # who was not served, because a signal ended this leader, is first in the queue again
            self.queue.extendleft(
                ticket for ticket in reversed(batch) if not ticket.served and ticket is not mine
            )
            self._tell([ticket for ticket in batch if ticket is not mine])

    def serve_all(self) -> None:
        """Write for everybody who waits. For who has the lead, and will not give it back as it was."""
        with suppress(IndexError):  # nobody is left
            while True:
                batch: list[_Ticket[C, A]] = []
                self._take(self.queue.popleft(), batch)
                self._serve(batch)
                self._tell(batch)

    def _take(self, mine: _Ticket[C, A], batch: list[_Ticket[C, A]]) -> None:
        """Take those who share the next write from the queue."""
        batch.append(mine)
        size = len(mine.commands)
        while self.queue:
            size += 0 if self.queue[0] is mine else len(self.queue[0].commands)
            if size > MOST_AT_ONCE:
                break
            ticket = self.queue.popleft()
            if ticket is not mine:
                batch.append(ticket)

    def _leave(self, ticket: _Ticket[C, A]) -> None:
        with suppress(ValueError):  # a leader has taken it
            self.queue.remove(ticket)
        self._tell([])

    def _tell(self, tickets: list[_Ticket[C, A]]) -> None:
        """Say a word to those who were served, and to the first in the queue. No signal can come between."""
        words = [ticket.word for ticket in (*tickets, *list(self.queue)[:1])]
        deque(map(SimpleQueue.put, words, repeat(None)), maxlen=0)

    def _serve(self, tickets: list[_Ticket[C, A]]) -> None:
        """Write for all; if a command is to blame for a failure, for each alone, so that only its caller hears it."""
        try:
            answers = iter(self._write([command for ticket in tickets for command in ticket.commands]))
        except Exception as error:
            if len(tickets) > 1 and not isinstance(error, self._common):
                for ticket in tickets:
                    self._serve([ticket])
                return
            for ticket in tickets:
                ticket.error = error
                ticket.served = True
            return
        for ticket in tickets:
            ticket.answers = [next(answers) for _ in ticket.commands]
            ticket.served = True
