"""What every adapter shares: which requests are covered, by which rules, and the way of one of them through the flow.

The methods of ``Exchange`` are coroutines in the adapter's own colour, so that ASGI and WSGI share every line.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, Unpack

from .._answers import Call, call_of, completion_of, replayed
from .._attempt import CURRENT, Attempt, Unprotected
from .._colours import Colour
from .._flow import BUSY, CLAIMED, FENCED, NO_ANSWER, REPLAY
from .._messages import Outcome
from .._receiver import Receiver
from .._records import Claim, Completion, Decision, Ending, make
from ..errors import InProgress, LateArrival, NotApplied, StoreError, UsageError
from ..keys import composite, prefix
from ._exchange import (
    ANSWER,
    NOT_REPLAYABLE,
    PUBLIC,
    Answer,
    Header,
    Problem,
    ServerFault,
    answer_in,
    echoed,
    key_of,
    problem_of,
    quoted,
    remembered,
    word_on,
)
from ._names import MOST_NAMES, OPERATION
from ._quota import Quota, Share
from ._rules import (
    SAFE,
    Request,
    Route,
    Rules,
    RuleWords,
    Scope,
    checked_route,
    refuse_claims_by_handlers,
    rules_of,
)
from ._wishes import WISH, Wish

MOST_WARNINGS = 50
SECONDS_BETWEEN_COMPLAINTS = 1.0
log = logging.getLogger("effectonce.http")


class Boundary:
    """The rules of all routes, and the receiver behind them."""

    def __init__(
        self, receiver: Receiver, scope: Scope, routes: Iterable[Route] = (), **words: Unpack[RuleWords]
    ) -> None:
        if not isinstance(receiver, Receiver):  # whose text may be a URL with a password
            raise UsageError(f"A {type(receiver).__name__} is not a Receiver. Write Receiver(url).")
        routes = list(map(checked_route, routes))
        self.receiver, self.scope = receiver, scope
        self.rules = rules_of(words).with_terms(receiver)
        self.routes = [
            (route, rules_of(words | route.words).with_terms(receiver) if route.covered else None)
            for route in routes
        ]
        by_handlers = all(
            rules is None or rules.claim == "handler" for rules in (self.rules, *(r for _, r in self.routes))
        )
        if not (callable(scope) or scope == PUBLIC or (scope is None and by_handlers)):
            raise UsageError(
                f"scope={scope!r}: say whose keys these are, by a function of the request that gives their name, or "
                "say scope=PUBLIC if all callers may see each other's answers."
            )
        self.methods = self.rules.methods.union(*(rules.methods for _, rules in self.routes if rules))
        self.everywhere = {} if self.routes else dict.fromkeys(self.rules.methods, self.rules)
        """The rules by method, where the path does not matter."""
        self.quota = Quota(receiver.flow.monotonic)
        self.operation = composite(OPERATION, receiver.consumer) if receiver.consumer else OPERATION
        self.prefixes: dict[str, str] = {}
        """What begins the keys of callers, by their names."""
        self._warned: set[tuple[str, str]] = set()
        self._complained = -inf
        self._words = words
        self._own: dict[tuple[Route | None, Route], Rules] = {}

    def prefix_of(self, scope: str) -> str:
        """What begins the keys of a caller; of two services that share a store, each has its own."""
        if len(self.prefixes) >= MOST_NAMES:
            self.prefixes.clear()
        self.prefixes[scope] = begins = prefix(scope, self.operation)
        return begins

    def concerns(self, method: str) -> bool:
        """Whether requests with this method may be covered, if only by what a handler says of itself."""
        return method not in SAFE

    def rules_for(self, method: str, path: str, own: Route | None = None) -> Rules | None:
        """The rules for a request; None if it is not covered. What its handler says of itself (``own``) goes first."""
        method = method.upper()  # some frameworks take "post" for what it means
        if own is not None:
            rules = self._own_rules(path, own) if own.covered else None
            if rules is None or method in rules.methods:
                return rules
            if method not in SAFE:
                self.warn_of_method(method, path, rules)
            return None
        if method not in self.methods:
            return None
        for route, rules in self.routes:
            if route.matches(path):
                return rules if rules is not None and method in rules.methods else None
        return self.rules if method in self.rules.methods else None

    def _own_rules(self, path: str, own: Route) -> Rules:
        route = next((route for route, _ in self.routes if route.matches(path)), None)
        if (route, own) not in self._own:
            words = self._words | (route.words if route else {}) | own.words
            self._own[route, own] = rules_of(words).with_terms(self.receiver)
        return self._own[route, own]

    def warn_of_unclaimed(self, method: str, path: str) -> None:
        """A client sent a key and counts on it, but its handler has not claimed it. Said once of each place."""
        self._warn(
            method,
            path,
            "it has a key, and its handler claims none. Claim it there, or give the boundary a scope",
        )

    def warn_of_method(self, method: str, path: str, rules: Rules) -> None:
        """A handler says that it is idempotent, but not for this method. Said once of each place."""
        covered = ", ".join(sorted(rules.methods))
        self._warn(
            method,
            path,
            f"its handler is marked, but only {covered} are covered. Add it to the rule methods=",
        )

    def _warn(self, method: str, path: str, why: str) -> None:
        if (method, path) not in self._warned and len(self._warned) < MOST_WARNINGS:
            self._warned.add((method, path))
            # The path is quoted, for it may have line breaks.
            log.warning("%s %r was done without protection: %s.", method, path, why)

    def complain(self, error: Exception) -> None:
        """Say why requests are refused, since those who send them are not told. Said once in a while."""
        now = self.receiver.flow.monotonic()
        if now - self._complained >= SECONDS_BETWEEN_COMPLAINTS:
            self._complained = now
            log.warning("Requests get 503: %s", error)

    def scope_of(self, request: Request) -> Any:
        """What the scope function gives: a name, nothing, or something to await."""
        return self.scope(request) if callable(self.scope) else PUBLIC


def claimed_here(boundary: Boundary) -> Boundary:
    """A boundary of an adapter that always claims before the handler runs."""
    refuse_claims_by_handlers([boundary.rules, *(rules for _, rules in boundary.routes if rules)])
    return boundary


# -- One request ---------------------------------------------------------------------------------------------------


UNDECIDED = Answer(0, (), None)
"""Stands for the answer to a request that is neither new nor known: the flow has to look into it."""


class Exchange:
    """One request with a key, on its way through the flow. ``lines`` are what the key was read from, if it was."""

    attempt: Attempt
    call: Call
    wish: Wish
    _kept: Answer
    _started = 0.0

    def __init__(
        self,
        boundary: Boundary,
        rules: Rules,
        colour: Colour,
        key: str,
        scope: str,
        lines: Sequence[bytes] = (),
    ) -> None:
        self.boundary, self.rules, self.colour = boundary, rules, colour
        self.flow = boundary.receiver.flow
        self.key, self.scope = key, scope
        self._share = Share(boundary.quota, scope, rules.max_new_keys)
        self.marks: tuple[Header, ...] = (rules.header_name, echoed(key, lines)), rules.exposed
        """The headers that say which key an answer belongs to."""

    @property
    def quota(self) -> Quota:
        """How many new keys callers may use."""
        return self.boundary.quota

    async def open(self, fingerprint: bytes) -> Answer | None:
        """Claim the key: the answer to give at once, or None if the handler has to run."""
        claim, colour = self._ask(fingerprint), self.colour
        decision: Decision | BaseException | None = None
        if not self.call.policy.local_cache:
            try:
                decision = await colour.store.claim(claim)
            except colour.trouble as error:
                decision = error
        answer = self._hear(decision)
        return await self._look_into(decision) if answer is UNDECIDED else answer

    def _ask(self, fingerprint: bytes) -> Claim:
        """What to ask the store for."""
        rules, boundary, scope = self.rules, self.boundary, self.scope
        terms, may_create = rules.terms, self._share.take()
        if not may_create:
            terms = terms.but(late="reject", dead_letter=None)
        name = (boundary.prefixes.get(scope) or boundary.prefix_of(scope)) + self.key
        self.call = call = call_of(name, fingerprint, terms, ANSWER, may_create)
        self._started = self.flow.monotonic()
        return call[0]

    def _hear(self, decision: Decision | BaseException | None) -> Answer | None:
        """What the store has decided: the answer to give at once, None if the handler has to run, or UNDECIDED.

        The straight ways are written out, since every request pays for each step of them. The flow knows all ways.
        """
        flow, call, started = self.flow, self.call, self._started
        verdict, record, left = decision if type(decision) is Decision else NO_ANSWER
        try:
            if verdict is REPLAY and record is not None:
                self._share.give_back()
                flow.note_replay(call, record, left)
                known = answer_in(record)
                return self.given(replayed(call, record)) if known is None else self.again(known)
            if verdict is CLAIMED and record is not None and flow.monotonic() - started < call[0].lease:
                return self._admit(flow.begin(call, CLAIMED, record, started))
        except BaseException:
            self.abandon()
            raise
        return UNDECIDED

    async def _look_into(self, decision: Decision | BaseException | None) -> Answer | None:
        """Go on after a decision that is neither of the straight ways."""
        try:
            if type(decision) is Decision and decision.verdict is BUSY:
                self._share.give_back()  # while it waits for another's key, new ones may come
            opened = await self.flow.open(self.colour, self.call, decision, self._started)
            if isinstance(opened, Unprotected):
                log.warning('The store is away, and by fallback="open" this runs unprotected: %s', opened.key)
            return self._admit(opened)
        except BaseException:
            self._share.give_back()
            self.abandon()
            raise

    def _admit(self, opened: Attempt | Outcome[Answer]) -> Answer | None:
        """None if the handler has to run, or what to answer instead."""
        if isinstance(opened, Attempt):
            self.attempt, self.wish = opened, Wish()
            return None
        self._share.give_back()
        return self._refusal(opened)

    def _refusal(self, outcome: Outcome[Answer]) -> Answer:
        if isinstance(outcome.error, LateArrival):
            raise self.quota.refusal()
        if isinstance(outcome.error, InProgress) and self._is_inside_itself():
            raise UsageError(
                "This request is behind two boundaries of one receiver, and the inner one would wait for the outer "
                "one. Leave one of them out.",
                key=self.call.key,
            )
        return self.given(outcome)

    def _is_inside_itself(self) -> bool:
        running = self.flow.keeper.running(self.call.key)
        return running is not None and running is CURRENT.get(None)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Where the handler runs: ``current()`` and its words about its answer work inside."""
        attempt, wish = CURRENT.set(self.attempt), WISH.set(self.wish)
        try:
            yield
        finally:
            CURRENT.reset(attempt)
            WISH.reset(wish)

    async def end(self, answer: Answer) -> Answer:
        """Record what the handler answered; then it may be sent. Another attempt's answer counts if it was first."""
        return await self.record(answer) or self.first(answer)

    async def record(self, answer: Answer) -> Answer | None:
        """Record what the handler answered. Gives an answer if there is one that counts more than the handler's."""
        completion, colour = self._conclude(answer), self.colour
        if completion is None:
            return await self._record_otherwise(answer)
        ending: Ending | BaseException
        try:
            ending = await colour.store.complete(completion)
        except colour.trouble as error:
            ending = error
        return None if self._is_recorded(completion, ending) else await self._overruled(ending)

    def _conclude(self, answer: Answer) -> Completion | None:
        """What to tell the store of an answer that is to be remembered; None for any other, which ``record`` knows."""
        attempt, wish = self.attempt, self.wish
        rules = self.rules
        if wish.nothing_happened or word_on(answer[0], rules.on_server_error, rules.not_yet) != "remember":
            return None
        if wish.keep is not None:
            attempt.claim = attempt.claim._replace(keep=wish.keep)
        self._kept = kept = remembered(answer if wish.store else Answer(answer[0], (), None))
        if type(attempt) is not Attempt:
            return None
        attempt.ending = True
        return completion_of(self.call, attempt, kept)

    def _is_recorded(self, completion: Completion, ending: Ending | BaseException) -> bool:
        """Whether the store has it: the straight way, as the flow's own, which knows the others."""
        if type(ending) is not Ending or ending is FENCED:
            return False
        self.flow.recorded(self.call, self.attempt, completion, self._kept)
        return True

    async def _overruled(self, ending: Ending | BaseException) -> Answer | None:
        """Go on when the store has refused it, or not answered: what counts more than the handler's answer."""
        flow, colour, call, attempt = self.flow, self.colour, self.call, self.attempt
        if isinstance(ending, Ending):
            return self._counting(await flow.overtaken(colour, call, attempt))
        return self._counting(await flow.finish(colour, call, attempt, self._kept, ending))

    async def _record_otherwise(self, answer: Answer) -> Answer | None:
        """Record what is no result, or by an attempt that has no lease."""
        flow, colour, call, attempt = self.flow, self.colour, self.call, self.attempt
        failure = self._failure(answer.status)
        if failure is None:
            return self._counting(await flow.finish(colour, call, attempt, self._kept))
        outcome = await flow.fail(colour, call, attempt, failure)
        return None if outcome.error is failure else self.given(outcome)

    def _counting(self, outcome: Outcome[Answer]) -> Answer | None:
        """What counts more than what the handler answered; None if that was recorded."""
        return self.given(outcome) if outcome.error is not None or outcome.replayed else None

    async def fail(self, error: BaseException) -> Answer | None:
        """Record that the handler raised. Gives an answer if there is one that counts more than the error."""
        is_answer = isinstance(error, Exception) and not isinstance(error, NotApplied)
        if self.rules.on_server_error == "remember" and is_answer:
            fault = Answer(500, ((b"content-type", b"text/plain; charset=utf-8"),), b"Internal Server Error")
            return await self.end(fault)
        outcome = await self.flow.fail(self.colour, self.call, self.attempt, error)
        return None if outcome.error is error else self.given(outcome)

    def abandon(self) -> None:
        """Nobody brings this to its end any more: its lease must not be kept. Nothing, if it has ended."""
        self.flow.keeper.abandon(self.call.claim)

    def given(self, outcome: Outcome[Answer]) -> Answer:
        """The answer that an outcome of the flow stands for."""
        answer, error = outcome.value, outcome.error
        if answer is not None and error is None:
            if answer.body is not None:
                return self.again(answer)
            error = NOT_REPLAYABLE
        assert error is not None
        if isinstance(error, StoreError):
            self.boundary.complain(error)
        problem = problem_of(error, self.rules.busy_status)
        if problem is None:
            raise error
        return self.first(problem.answer(self.rules.documentation))

    def again(self, answer: Answer) -> Answer:
        """A remembered answer, as a repeat gets it."""
        status, headers, body = answer
        return make(Answer, (status, [*headers, self.rules.replayed, *self.marks], body))

    def first(self, answer: Answer) -> Answer:
        """An answer with the key it belongs to."""
        status, headers, body = answer
        return make(Answer, (status, [*headers, *self.marks], body))

    def _failure(self, status: int) -> Exception | None:
        """What an answer's status stands for, where the flow wants a handler's exception; None for a result."""
        wish = self.wish
        if wish.nothing_happened:
            return NotApplied()
        word = word_on(status, self.rules.on_server_error, self.rules.not_yet)
        if word == "remember":
            return None
        if status >= 500 and wish.raised is not None:
            return wish.raised
        return NotApplied() if word == "release" else ServerFault(f"status {status}")


def key_in(rules: Rules, lines: list[bytes]) -> str | None:
    """The key of a request; None if it has none and need not have one, or gets it elsewhere."""
    key = key_of(lines, rules.strict)
    if key is None and rules.required and rules.key is None and rules.claim == "boundary":
        raise key_missing(rules)
    return key


def natural_key(rules: Rules, request: Request, body: bytes) -> str:
    """The key that the natural-key function makes."""
    assert rules.key is not None
    key = rules.key(request, body)
    if not key:
        raise key_missing(rules)
    if not isinstance(key, str):
        raise UsageError(f"The key function gave a {type(key).__name__}. Have it give a string.")
    text = key.encode("unicode_escape").decode("ascii")  # a header has to carry it, and no two may become one
    return key_of([quoted(text)]) or text


def refused(problem: Problem, rules: Rules, lines: Sequence[bytes]) -> Answer:
    """The answer to a request that is refused before it is on its way, with its key, if what it has is one."""
    answer = problem.answer(rules.documentation)
    if not lines or problem.code.startswith("key-"):
        return answer
    marks = (rules.header_name, echoed("", lines)), rules.exposed
    return answer._replace(headers=(*answer.headers, *marks))


def key_missing(rules: Rules) -> Problem:
    """What a request without a key is answered with."""
    detail = f"Send this request with the header {rules.header}, and repeats of it with the same."
    return Problem("key-missing", detail)
