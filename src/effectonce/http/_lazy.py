"""Classes for packages that may not be there: a module has their names, and loads them when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def loading(module: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's ``__getattr__``. ``places`` says which of its neighbours has a name."""
    package = module.rpartition(".")[0]

    def load(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{places[name]}"), name)

    return load
