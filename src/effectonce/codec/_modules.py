"""The names of modules, as everybody would import them.

Python calls the module that it starts with ``__main__``, and ``multiprocessing`` calls it ``__mp_main__`` in a
process that it spawns. Keys, fingerprints and remembered errors carry names of functions and classes: under three
names, a function would have its effect three times.
"""

from __future__ import annotations

import sys
from pathlib import PurePath
from typing import Any

STARTED = ("__main__", "__mp_main__")


def module_of(thing: Any) -> str:
    """The name of the module that a function or a class is in; at a prompt there is none better than ``__main__``."""
    name: str = thing.__module__
    if name not in STARTED:
        return name
    module = sys.modules.get(name)
    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    if spec is not None:  # python -m
        return str(spec.name)
    return PurePath(file).stem if file else STARTED[0]
