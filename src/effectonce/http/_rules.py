"""What can be said of how requests are treated: rules for a boundary, for some paths, for a single handler."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from inspect import iscoroutinefunction
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack

from .._durations import Duration, seconds
from .._receiver import Receiver
from ..errors import UsageError
from ..policy import Policy
from ._exchange import NOT_YET, SPECIFICATION, Fingerprint, Header, OnServerError, ServerFault

T = TypeVar("T")

COVERED = frozenset({"POST", "PATCH"})
SAFE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
Busy = Literal["wait", 409, 425, 202]
ClaimedBy = Literal["boundary", "handler"]


@lru_cache(maxsize=256)
def _encoded(name: str) -> bytes:
    return name.lower().encode("latin-1", "replace")


class Headers(Mapping[str, str]):
    """Header lines by name, decoded when somebody asks. Several lines of a name are one, as RFC 9110 joins them."""

    __slots__ = ("_lines",)

    def __init__(self, lines: Sequence[Header]) -> None:
        self._lines = lines

    def __getitem__(self, name: str) -> str:
        wanted, joined = _encoded(name), None
        for header, value in self._lines:
            if header == wanted:
                joined = (
                    value if joined is None else joined + (b"; " if wanted == b"cookie" else b", ") + value
                )
        if joined is None:
            raise KeyError(name)
        return joined.decode("latin-1")

    def __iter__(self) -> Iterator[str]:
        return iter({name.decode("latin-1"): None for name, _ in self._lines})

    def __len__(self) -> int:
        return len({name for name, _ in self._lines})


class Request(NamedTuple):
    """A request as scope and key functions see it."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    """By lower-case name."""
    raw: Any
    """What the framework has: an ASGI scope, a WSGI environ, a Django request."""


Scope = Callable[[Request], Any] | str | None
"""Whose keys these are: a function of the request, or ``PUBLIC``; None where handlers claim and say it themselves."""
NaturalKey = Callable[[Request, bytes], str | None]


class RuleWords(TypedDict, total=False):
    """What can be said of how requests are treated: see ``Rules``."""

    methods: Iterable[str]
    required: bool
    strict: bool
    busy: Busy
    on_server_error: OnServerError
    not_yet: Iterable[int]
    keep: Duration | None
    policy: Policy | None
    fingerprint: Fingerprint
    key: NaturalKey | None
    claim: ClaimedBy
    max_request: int
    max_response: int
    body_timeout: Duration
    max_new_keys: int | None
    header: str
    replayed_header: str
    documentation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How requests are treated. Every word can be said for the whole boundary, and for a route again.

    methods          which methods are covered
    required         whether a covered request without a key is refused (else it passes through)
    strict           accept a key only as a string in double quotes
    busy             a repeat of a running request: 409, 425 or 202 at once, or "wait" for its answer
    on_server_error  after a 5xx: "release" (a retry may run), "remember" (it is the answer) or "in_doubt"
    not_yet          further statuses of 4xx that are no answers: a retry may run, as after 408, 425 and 429
    keep             how long an answer is remembered; by default as the receiver's policy says
    policy           everything else about it; by default the receiver's
    fingerprint      what of the body counts: "body", its bytes; "json", what it says
    key              makes a key of a request that has none: ``key(request, body)``
    claim            who claims the key: "boundary", before the app; or "handler", when it knows who is calling
    max_request      a larger body is refused (413)
    max_response     a larger response is sent, but not remembered
    body_timeout     how long a request's body may take to arrive
    max_new_keys     so many new keys may a caller use in a minute, in each process; more are refused (429), while
                     repeats get their answers
    header, replayed_header, documentation
                     names of the headers, and where clients can read about them
    """

    methods: frozenset[str] = COVERED
    required: bool = True
    strict: bool = False
    busy: Busy = 409
    on_server_error: OnServerError = "release"
    not_yet: frozenset[int] = NOT_YET
    keep: Duration | None = None
    policy: Policy | None = None
    fingerprint: Fingerprint = "body"
    key: NaturalKey | None = None
    claim: ClaimedBy = "boundary"
    max_request: int = 16 << 20
    max_response: int = 1 << 20
    body_timeout: Duration = "60s"
    max_new_keys: int | None = None
    header: str = "Idempotency-Key"
    replayed_header: str = "X-Idempotency-Replayed"
    documentation: str = SPECIFICATION
    terms: Policy = field(init=False, repr=False, compare=False)
    header_name: bytes = field(init=False, repr=False, compare=False)
    replayed: Header = field(init=False, repr=False, compare=False)
    exposed: Header = field(init=False, repr=False, compare=False)
    patience: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        words = {"busy": ("wait", 409, 425, 202), "on_server_error": ("release", "remember", "in_doubt"),
                 "fingerprint": ("body", "json"), "claim": ("boundary", "handler")}  # fmt: skip
        for name, allowed in words.items():
            if getattr(self, name) not in allowed:
                raise UsageError(
                    f"{name}={getattr(self, name)!r}: choose one of {', '.join(map(repr, allowed))}."
                )
        for name in ("header", "replayed_header"):
            if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", getattr(self, name)):
                raise UsageError(f"{name}={getattr(self, name)!r} can't be the name of a header.")
        if not re.fullmatch(r"[!-;=?-~]+", self.documentation):  # what a Link can carry
            raise UsageError(
                f"documentation={self.documentation!r} must be a URL, escaped where it is not ASCII."
            )
        said: Any = self.methods
        methods = frozenset(method.upper() for method in said)
        if isinstance(said, str) or methods & SAFE:
            raise UsageError(
                f"methods={self.methods!r}: name methods that change something, such as ['POST', 'PATCH', 'PUT']."
            )
        not_yet: Any = self.not_yet
        not_yet = tuple(not_yet) if isinstance(not_yet, Iterable) else (not_yet,)
        if not all(isinstance(status, int) and 400 <= status < 500 for status in not_yet):
            raise UsageError(f"not_yet={self.not_yet!r}: name statuses from 400 to 499, such as (401,).")
        if self.policy is not None and not isinstance(self.policy, Policy):
            raise UsageError(f'policy={self.policy!r} is not a Policy. Write Policy(lease="1m", ...).')
        key: Any = self.key
        if key is not None and (not callable(key) or iscoroutinefunction(key)):
            raise UsageError(f"key={self.key!r} must be a plain function: key(request, body) gives the key.")
        for name in ("max_request", "max_response", "max_new_keys"):
            number = getattr(self, name)
            if number is not None and (type(number) is not int or number < 0):
                raise UsageError(f"{name}={number!r} must be a whole number, 0 or more.")
        object.__setattr__(self, "methods", methods)
        object.__setattr__(self, "not_yet", NOT_YET.union(not_yet))
        object.__setattr__(self, "header_name", self.header.lower().encode())
        object.__setattr__(self, "replayed", (self.replayed_header.lower().encode(), b"true"))
        exposed = f"{self.header}, {self.replayed_header}".encode()
        object.__setattr__(self, "exposed", (b"access-control-expose-headers", exposed))
        object.__setattr__(self, "patience", seconds(self.body_timeout, "body_timeout"))

    @property
    def busy_status(self) -> int:
        """What a repeat of a running request gets."""
        return 409 if self.busy == "wait" else self.busy

    def with_terms(self, receiver: Receiver) -> Rules:
        """These rules, and the policy that they mean."""
        policy = receiver.policy if self.policy is None else self.policy
        changes: dict[str, Any] = {
            "busy": "wait" if self.busy == "wait" else "reject",
            "max_result": self.max_response + (64 << 10),
            "remember": (),
        }
        if self.on_server_error == "in_doubt":
            changes["in_doubt"] = (*policy.in_doubt, ServerFault, Exception)
        if self.keep is not None:
            changes["keep"] = self.keep
        complete = replace(self)
        object.__setattr__(complete, "terms", policy.but(**changes))
        return complete


class Route:
    """Rules of some paths: ``Route("/payments/*", keep="7d")``, ``Route("/health", covered=False)``.

    ``*`` stands for a part of a path between slashes, ``**`` for any number of parts.
    """

    def __init__(self, path: str, *, covered: bool = True, **rules: Unpack[RuleWords]) -> None:
        if not path.startswith(("/", "*")):
            raise UsageError(f"Route({path!r}) would match nothing: a path begins with a slash.")
        self._pattern = _pattern_of(path)
        rules_of(rules)  # what is wrong with them is better known here, where they stand
        self.covered, self.words = covered, rules

    def matches(self, path: str) -> bool:
        """Whether a path is meant."""
        return self._pattern.fullmatch(path) is not None


def _pattern_of(path: str) -> re.Pattern[str]:
    """What a route's path matches. A path may have line breaks, and is not to slip through by them.

    What stands between two ``**`` is taken where it is first found, for good: to try every other place, too, would take
    time that grows with a power of the path's length, which strangers choose.
    """
    first, *others = (re.escape(part).replace(r"\*", "[^/]*?") for part in path.split("**"))
    between = "".join(f"(?>.*?{part})" for part in others[:-1])
    return re.compile(first + between + "".join(f".*{part}" for part in others[-1:]), re.DOTALL)


def checked_route(route: Any) -> Route:
    if not isinstance(route, Route):
        raise UsageError(f"routes has {route!r}, which is not a Route. Write Route(path, ...).")
    return route


def rules_of(words: Mapping[str, Any]) -> Rules:
    known = {each.name for each in fields(Rules) if each.init}
    if unknown := sorted(words.keys() - known):
        raise UsageError(f"{', '.join(unknown)}: no such rule. Known are {', '.join(sorted(known))}.")
    return Rules(**words)


def refuse_claims_by_handlers(each: Iterable[Rules]) -> None:
    """For adapters that always claim before the handler runs."""
    if any(rules.claim == "handler" for rules in each):
        raise UsageError('claim="handler" is for ASGI. Here the boundary claims, for whom scope= says.')


def mark(handler: T, *, covered: bool = True, **words: Any) -> T:
    """Have a handler say its own rules, for frameworks that find it before they run it."""
    refuse_claims_by_handlers([rules_of(words)])
    said: Any = handler
    said.effectonce = Route("**", covered=covered, **words)
    return handler


def mark_of(handler: Any) -> Route | None:
    """What a handler says of itself."""
    return getattr(handler, "effectonce", None)
