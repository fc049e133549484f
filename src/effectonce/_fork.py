"""Forking: who holds threads, locks or connections is told before a process forks and after."""

from __future__ import annotations

import os
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


def tell_of_forks(holder: Forkable) -> None:
    """Have ``holder`` told, as long as it lives."""
    _known.add(holder)


def _before() -> None:
    _resting[:] = list(_known)
    for holder in _resting:
        holder.before_fork()


def _after(*, in_child: bool) -> None:
    for holder in _resting:
        holder.after_fork(in_child=in_child)
    _resting.clear()


os.register_at_fork(
    before=_before,
    after_in_parent=lambda: _after(in_child=False),
    after_in_child=lambda: _after(in_child=True),
)
