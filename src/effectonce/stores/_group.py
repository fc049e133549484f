"""Group commit: callers who arrive while a write is on its way to the disk share the next one.

There is no writer thread. The first caller leads: it writes on its own thread, at once and alone. Those who come
meanwhile queue up; when the leader is done it hands over to the first of them, who writes for all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

C = TypeVar("C")
A = TypeVar("A")

MOST_AT_ONCE = 1024
"""Commands in one write, so that the last caller of a long queue does not wait for all of it."""


class _Ticket(Generic[C, A]):
    """A caller in the queue."""

    __slots__ = ("_turn", "answers", "commands", "error", "leads")

    def __init__(self, commands: list[C]) -> None:
        self.commands = commands
        self.answers: list[A] = []
        self.error: BaseException | None = None
        self.leads = False
        self._turn = threading.Lock()
        self._turn.acquire()

    def call(self) -> None:
        self._turn.release()

    def wait(self) -> None:
        self._turn.acquire()


class Group(Generic[C, A]):
    """Runs ``write`` for one caller at a time, with everything that has queued up.

    ``common`` are failures that no single command is to blame for: all who share the write get them at once.
    """

    def __init__(self, write: Callable[[list[C]], list[A]], common: tuple[type[Exception], ...]) -> None:
        self._write = write
        self._common = common
        self._lock = threading.Lock()  # guards the queue
        self._leading = threading.Lock()  # held by the leader
        self._queue: list[_Ticket[C, A]] = []

    def try_lead(self) -> bool:
        """Become the leader if there is none. Whoever gets True calls ``hand_over`` afterwards."""
        return self._leading.acquire(blocking=False)

    def lead(self) -> None:
        """Wait to become the leader, for something other than writing. ``hand_over`` ends it."""
        ticket: _Ticket[C, A] = _Ticket([])
        if self._queue_up(ticket):
            self._wait(ticket)
        if ticket.leads:
            with self._lock:
                self._queue.remove(ticket)
        else:  # a leader found it in the queue and answered its nothing
            self.lead()

    def hand_over(self) -> None:
        """Let the first in the queue lead, if there is one."""
        if not self._queue:
            self._leading.release()
            if not self._queue or not self.try_lead():  # nobody came meanwhile, or whoever came leads already
                return
        with self._lock:
            if not self._queue:
                self._leading.release()
                return
            heir = self._queue[0]
            heir.leads = True
        heir.call()

    def _queue_up(self, ticket: _Ticket[C, A]) -> bool:
        """Stand in the queue: True if there is a leader to wait for, else this ticket leads."""
        with self._lock:
            ticket.leads = not self._queue and self.try_lead()
            self._queue.append(ticket)
        return not ticket.leads

    def submit(self, commands: list[C]) -> list[A]:
        """Have commands written together with others', and wait for the answers."""
        ticket: _Ticket[C, A] = _Ticket(commands)
        if self._queue_up(ticket):
            self._wait(ticket)
        if ticket.leads:
            self._lead(ticket)
        if ticket.error is not None:
            raise ticket.error
        return ticket.answers

    def _wait(self, ticket: _Ticket[C, A]) -> None:
        try:
            ticket.wait()
        except BaseException:  # Ctrl-C in the queue: leave it, and don't take the lead along
            with self._lock:
                queued = ticket in self._queue
                if queued:
                    self._queue.remove(ticket)
            if queued and ticket.leads:
                self.hand_over()
            raise

    def _lead(self, mine: _Ticket[C, A]) -> None:
        with self._lock:
            size, count = 0, 0
            for ticket in self._queue:
                size += len(ticket.commands)
                if count and size > MOST_AT_ONCE:
                    break
                count += 1
            served, self._queue = self._queue[:count], self._queue[count:]
        try:
            self._serve(served)
        except BaseException:  # Ctrl-C in this thread is nobody else's: the next leader writes for them
            served.remove(mine)
            with self._lock:
                self._queue[:0] = served
            served = []
            raise
        finally:
            self.hand_over()
            for ticket in served:
                if ticket is not mine:
                    ticket.call()

    def _serve(self, tickets: list[_Ticket[C, A]]) -> None:
        """Write for all; if a command is to blame for a failure, for each alone, so that only its caller hears it."""
        try:
            answers = iter(self._write([command for ticket in tickets for command in ticket.commands]))
        except Exception as error:
            if len(tickets) == 1 or isinstance(error, self._common):
                for ticket in tickets:
                    ticket.error = error
            else:
                for ticket in tickets:
                    self._serve([ticket])
            return
        for ticket in tickets:
            ticket.answers = [next(answers) for _ in ticket.commands]
