"""Whose keys these are: the name that a scope function gave, and what is kept of it."""

from __future__ import annotations

import re
from typing import Any

from ..errors import UsageError
from ..keys import content_id, prefix
from ._exchange import Problem

OPERATION = "http"
LONGEST_NAME = 64
MOST_NAMES = 4096
_fit_names: set[str] = set()
"""Names that were found fit to be names, and are no secrets."""
_UUID = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"
_CREDENTIALS = re.compile(
    r"(basic|bearer|digest|negotiate|token|api-?key|session(id)?)[ :=]"  # a whole header, or a cookie
    r"|(sk|pk|rk|gh[a-z]|github_pat|glpat|xox[a-z]|whsec|api|key|tok|pat)[_-]"  # beginnings that tokens have
    rf"|(?!{_UUID})(?=.*[0-9])(?=.*[a-z])[^ @]{{20,}}$"  # what nobody would choose for a name
    r"|[0-9a-f]{64}$",  # one of our own hashes: as it stands, it would be the name of whom it was made for
    re.IGNORECASE,
)
_MARKS = ("is_authenticated", "pk", "__pydantic_fields__", "_sa_instance_state")
"""What users, models and rows have. Their texts are no names: whoever isn't logged in may be "AnonymousUser", two may
be called the same, and one that tells all that it holds is another when that changes."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>$")
"""How an object ends that stands for one without a text of its own."""


def checked_scope(scope: Any) -> str:
    """The name that a scope function gave. One that gives nothing refuses the request.

    What looks like credentials, or is too long for a name, is stored and logged as a hash of it.
    """
    if type(scope) is str and scope in _fit_names:
        return scope
    name = _name_in(scope)
    if not name or name.isspace():
        raise Problem("scope-missing", "Send the credentials that this API asks for.")
    try:
        if len(name) > LONGEST_NAME or _CREDENTIALS.match(name):
            name = content_id(name)
        prefix(name, OPERATION)  # which checks it
    except UsageError:
        raise Problem("scope-missing", "These credentials can't name anybody.") from None
    if name == scope:
        if len(_fit_names) >= MOST_NAMES:
            _fit_names.clear()
        _fit_names.add(name)
    return name


def _name_in(scope: Any) -> str:
    """What a scope function gave, as text; "" for nothing."""
    if type(scope) is str:
        return scope
    if not scope:
        return ""
    if isinstance(scope, bytes):  # a header, as ASGI has it
        return scope.decode("latin-1")
    text: Any = type(scope).__str__
    nameless = scope is True or (text is object.__str__ and not isinstance(scope, int))
    if nameless or any(hasattr(scope, mark) for mark in _MARKS) or _ADDRESS.search(name := str(scope)):
        # It has an address instead of a name, so that no repeat would be known; or it changes with what it holds.
        raise UsageError(
            f"The scope function gave a {type(scope).__name__}. Have it give a name: a string or a whole number, such "
            "as the id of a user."
        )
    return name
