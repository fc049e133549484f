"""Group commit: callers who arrive while a write is on its way to the disk share the next one.

There is no writer thread. The first caller leads: it writes on its own thread, at once and alone. Those who come
meanwhile queue up; when the leader is done it hands over to the first of them, who writes for all.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Generic, TypeVar

C = TypeVar("C")
A = TypeVar("A")

HERE = __file__.rpartition("_group")[0]
LOOK_AFTER_SECONDS = 0.5
"""How often who waits looks whether anybody still leads."""
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
        with suppress(RuntimeError):  # called before, by one that a signal ended on its way
            self._turn.release()

    def wait(self, seconds: float) -> bool:
        return self._turn.acquire(timeout=seconds)


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
            self._let_go()
            if not self._queue or not self.try_lead():  # nobody came meanwhile, or whoever came leads already
                return
        with self._lock:
            if not self._queue:
                self._let_go()
                return
            heir = self._queue[0]
            heir.leads = True
        heir.call()

    def _let_go(self) -> None:
        with suppress(RuntimeError):  # let go of before, by a hand-over that a signal ended on its way
            self._leading.release()

    def _queue_up(self, ticket: _Ticket[C, A]) -> bool:
        """Stand in the queue: True if there is a leader to wait for, else this ticket leads."""
        with self._lock:
            self._queue.append(
                ticket
            )  # first, so that a leader who lets go now either sees it or lets it lead
            ticket.leads = self._queue[0] is ticket and self.try_lead()
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
        """Wait for an answer or for the lead."""
        lost = 0
        try:
            while not ticket.wait(LOOK_AFTER_SECONDS):
                lost = 0 if self._is_led() else lost + 1
                if lost > 1:
                    self._find_a_leader(ticket)
        except BaseException:  # Ctrl-C in the queue: leave it, and don't take the lead along
            with self._lock:
                queued = ticket in self._queue
                if queued:
                    self._queue.remove(ticket)
            if queued and ticket.leads:
                self.hand_over()
            raise

    def _is_led(self) -> bool:
        """Whether some thread is at work in a store. A signal may have ended a leader between two steps of it."""
        if not self._leading.locked():
            return False
        me = threading.get_ident()
        return any(_is_working(frame) for thread, frame in sys._current_frames().items() if thread != me)

    def _find_a_leader(self, ticket: _Ticket[C, A]) -> None:
        """Nobody leads any more: put the first of the queue in charge. A command may be sent again."""
        with self._lock:
            if ticket.leads or (not self._leading.locked() and not self.try_lead()):
                return
            if ticket not in self._queue:
                self._queue.append(ticket)
            heir = self._queue[0]
            heir.leads = True
        heir.call()

    def _lead(self, mine: _Ticket[C, A]) -> None:
        served: list[_Ticket[C, A]] = []
        try:
            with self._lock:
                served, self._queue = _first(self._queue)
            self._serve(served)
        except BaseException:  # Ctrl-C in this thread is nobody else's: the next leader writes for them
            with self._lock:
                self._queue[:0] = [ticket for ticket in served if ticket is not mine]
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


def _first(queue: list[_Ticket[C, A]]) -> tuple[list[_Ticket[C, A]], list[_Ticket[C, A]]]:
    """Those who share the next write, and the rest."""
    size, count = 0, 0
    for ticket in queue:
        size += len(ticket.commands)
        if count and size > MOST_AT_ONCE:
            break
        count += 1
    return queue[:count], queue[count:]


def _is_working(frame: FrameType | None) -> bool:
    """Whether a thread is inside a store, other than waiting in its queue."""
    while frame is not None:
        if frame.f_code is Group._wait.__code__:
            return False
        if frame.f_code.co_filename.startswith(HERE):
            return True
        frame = frame.f_back
    return False
