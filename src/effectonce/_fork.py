"""Forking: who holds threads, locks or connections is told before a process forks and after."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class Forkable(Protocol):
    """Something that must not be used by two processes at once."""

    def before_fork(self) -> None:
        """Come to rest."""

    def after_fork(self, *, in_child: bool) -> None:
        """Go on; in the child with nothing of the parent's threads."""


_known: weakref.WeakSet[Forkable] = weakref.WeakSet()
_resting: list[Forkable] = []
_turn = threading.RLock()
"""Threads fork one after the other: who brings holders to rest has to wait for them, and others run meanwhile."""


def tell_of_forks(holder: Forkable) -> None:
    """Have ``holder`` told, as long as it lives."""
    with _turn:
        _known.add(holder)


def _before() -> None:
    _turn.acquire()
    _resting[:] = list(_known)
    for holder in _resting:
        holder.before_fork()


def _after(*, in_child: bool) -> None:
    for holder in _resting:
        holder.after_fork(in_child=in_child)
    _resting.clear()
    _turn.release()


os.register_at_fork(
    before=_before,
    after_in_parent=lambda: _after(in_child=False),
    after_in_child=lambda: _after(in_child=True),
)
