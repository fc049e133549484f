"""URLs in error messages: enough to recognise them by, and nothing that may be a password."""

from __future__ import annotations

import re


def shown(url: str) -> str:
    """A URL without what stands before an ``@`` and without the values of its query.

    A password may have any character, escaped or not: everything up to the last ``@`` is taken for one.
    """
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    login, at, place = rest.rpartition("@")
    plain, question, query = place.partition("?")
    hidden = "…@" if at or login else ""
    return scheme + separator + hidden + plain + question + re.sub(r"=[^&]*", "=…", query)
