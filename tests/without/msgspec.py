"""Stands in the way of msgspec in ``./test --without-extras``: everything has to work as well where it isn't installed."""

raise ModuleNotFoundError("msgspec is left out of this run", name="msgspec")
