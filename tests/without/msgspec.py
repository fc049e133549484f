"""Stands in the way of msgspec in ``./test --without-extras``: everything has to work where it isn't installed, too."""

raise ModuleNotFoundError("msgspec is left out of this run", name="msgspec")
