"""URLs in error messages: enough to recognise them by, and nothing that may be a password."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    from urllib.parse import SplitResult


def shown(url: str) -> str:
    """A URL without what stands before an ``@`` and without the values of its query.

    A password may have any character, escaped or not: everything up to the last ``@`` is taken for one.
    """
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    login, at, place = rest.rpartition("@")
    plain, question, query = place.partition("?")
    hidden = "…@" if at or login else ""
    return scheme + separator + hidden + plain + question + re.sub(r"=[^&]*", "=…", query)


def split(url: str) -> SplitResult:
    """The parts of a URL. The error of ``urlsplit`` would show the password that it stumbles over."""
    from urllib.parse import urlsplit

    try:
        return urlsplit(url)
    except ValueError:
        raise UsageError(
            f"{shown(url)!r} can't be read as a URL. Percent-encode the / ? # [ ] and @ of user and password, "
            "such as %5B for [, and everything that is not ASCII."
        ) from None
