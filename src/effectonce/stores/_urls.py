"""URLs in error messages: enough to recognise them by, and nothing that may be a password."""

from __future__ import annotations

import re


def shown(url: str) -> str:
    """A URL without what stands before an ``@`` and without the values of its query."""
    plain, question, query = url.partition("?")
    scheme = plain.partition("://")[0] + "://" if "://" in plain else ""
    if "@" in plain:
        plain = f"{scheme}…@{plain.rpartition('@')[2]}"
    return plain + question + re.sub(r"=[^&]*", "=…", query)
