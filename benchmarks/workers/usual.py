"""The usual code by hand: look for an answer, leave a marker, work, write the answer. As in articles, and unfenced.

Who outlives the others' patience overwrites what the next one did; who dies before the answer leaves a marker behind.
"""

from __future__ import annotations

from importlib import import_module

from benchmarks.workers.base import Setup, Subject
from benchmarks.workers.forms import Forms, subject


def open_subject(setup: Setup) -> Subject:
    """Open one case of the usual code."""
    return subject(setup, open_forms(setup))


def open_forms(setup: Setup) -> Forms:
    """What is usual on a server, in `usual_<store>.py`."""
    forms: Forms = import_module(f"benchmarks.workers.usual_{setup.store}").open_forms(setup)
    return forms
