"""The hostile cases: each is a function of a ``Stage``, and says in its docstring what has to hold.

A case that does not hold raises ``Failed`` with what happened instead. No case looks at how a boundary does it: only at
what clients get, and at how often the effect happened in the world outside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

from tests.http.site import Pending, Reply, Site
from tests.http.world import World

from benchmarks.peers.kitchen import LARGE, STREAMED

BUSY = (409, 423, 425)
"""Told to come back: the first is still running, or what became of it is not known yet."""
LEASE, KEEP = 2.0, 2.0
"""Seconds, for the cases that need a short one."""
PATIENCE = 20.0
"""For so long a client comes back; what takes longer is stuck."""
PAUSE = 0.05


class Failed(Exception):
    """What a case found."""


class Stage(Protocol):
    """A contender's servers, as many as a case asks for, on one store and one world."""

    world: World

    def site(self, *, lease: float = ..., keep: float = ..., waits: bool = ...) -> Site:
        """A server of its own; all of a stage share a store."""

    def kill(self, site: Site) -> None:
        """End it as a crash would, with SIGKILL."""


Case = Callable[[Stage], None]


def need(holds: bool, instead: str) -> None:
    """Fail, unless it holds."""
    if not holds:
        raise Failed(instead)


def post(site: Site, path: str, key: str, body: bytes = b"{}", caller: str = "ann", **more: str) -> Reply:
    """Send a POST whose key names its effect, and wait for the answer."""
    return begin(site, path, key, body, caller, **more).reply()


def begin(
    site: Site,
    path: str,
    key: str,
    body: bytes = b"{}",
    caller: str = "ann",
    *,
    name: str = "",
    method: str = "POST",
    **headers: str,
) -> Pending:
    """Send a request, without waiting. ``name`` is its effect, if that is not the key."""
    lines = [
        ("Idempotency-Key", key),
        ("Content-Type", "application/json"),
        ("X-Caller", caller),
        ("Authorization", f"Bearer {caller}"),
        *((header.replace("_", "-"), value) for header, value in headers.items()),
    ]
    return site.begin(method, f"{path}?n={name or key}", lines, body)


def settled(send: Callable[[], Reply], seconds: float = PATIENCE) -> Reply:
    """Come back for as long as told to; the last answer."""
    deadline = time.monotonic() + seconds
    reply = send()
    while reply.status in BUSY and time.monotonic() < deadline:
        time.sleep(PAUSE)
        reply = send()
    return reply


def need_same(first: Reply, repeat: Reply, count: int) -> None:
    """A repeat gets the first answer, and the effect happened once."""
    need(count == 1, f"the effect happened {count} times")
    need(repeat.status == first.status, f"{first.status}, then {repeat.status}")
    need(repeat.body == first.body, "another body")


def twice(stage: Stage, path: str, status: int) -> tuple[Reply, Reply]:
    """A request and its repeat: one effect, one answer."""
    site = stage.site()
    key = site.new()
    first, repeat = post(site, path, key), post(site, path, key)
    need(first.status == status, f"the first answer is {first.status}")
    need_same(first, repeat, stage.world.count(key))
    return first, repeat


# -- What passes, and what is answered --------------------------------------------------------------------------------


def streamed_get(stage: Stage) -> None:
    """A streamed GET of 20 kB without a key arrives complete."""
    reply = stage.site().send("GET", "/stream")
    need(reply.body == b"".join(STREAMED), f"{len(reply.body)} of {len(b''.join(STREAMED))} bytes arrived")


def base_http_middleware(stage: Stage) -> None:
    """An app with a BaseHTTPMiddleware, whose answers come in pieces: the repeat is the same."""
    twice(stage, "/inner/pay", 201)


def status_204(stage: Stage) -> None:
    """204: remembered, and repeated."""
    twice(stage, "/nothing", 204)


def status_303(stage: Stage) -> None:
    """303: remembered, and repeated with its Location."""
    first, repeat = twice(stage, "/elsewhere", 303)
    need(first.all("location") == repeat.all("location"), "another Location")


def status_500(stage: Stage) -> None:
    """500: a repeat gets it again, or runs; then that answer stays. Nobody is stuck."""
    site = stage.site()
    key = site.new()
    first = post(site, "/flaky", key)
    need(first.status == 500, f"the first answer is {first.status}")
    second = settled(lambda: post(site, "/flaky", key))
    third, count = post(site, "/flaky", key), stage.world.count(key)
    told = (second.status, count)
    need(told in ((500, 1), (201, 2)), f"500, then {second.status} after {count} runs")
    need((third.status, third.body) == (second.status, second.body), f"then {third.status}, another answer")


def large(stage: Stage) -> None:
    """A body and an answer of 1.5 MiB: complete; the repeat is the same, or refused, and never runs."""
    site = stage.site()
    key, body = site.new(), b'"' + b"y" * (LARGE - 2) + b'"'
    first, repeat = post(site, "/large", key, body), post(site, "/large", key, body)
    need(first.status == 201 and len(first.body) == LARGE, f"{first.status}, {len(first.body)} bytes")
    count = stage.world.count(key)
    need(count == 1, f"the effect happened {count} times")
    same = repeat.status == 201 and repeat.body == first.body
    need(same or 400 <= repeat.status < 500, f"the repeat gets {repeat.status}, {len(repeat.body)} bytes")


def several_headers(stage: Stage) -> None:
    """Two lines of one header are two on the replay, in order."""
    first, repeat = twice(stage, "/parts", 201)
    need(first.all("x-part") == ["one", "two"], f"the first answer has {first.all('x-part')}")
    need(repeat.all("x-part") == ["one", "two"], f"the repeat has {repeat.all('x-part')}")


# -- Time and clients -------------------------------------------------------------------------------------------------


def longer_than_lease(stage: Stage) -> None:
    """A handler that takes longer than its lease: duplicates meanwhile don't run, and its answer counts."""
    site, world = stage.site(lease=LEASE), stage.world
    key = site.new()
    world.hold(key)
    first = begin(site, "/pay", key)
    world.wait_for(key)
    deadline = time.monotonic() + 2.5 * LEASE
    duplicates = []
    while time.monotonic() < deadline and world.count(key) == 1:
        duplicates.append(begin(site, "/pay", key))
        time.sleep(LEASE / 4)
    count = world.count(key)
    world.let_go(key)
    answer = first.reply()
    for duplicate in duplicates:
        with suppress(OSError):
            duplicate.reply()
    need(count == 1, f"{count} ran at once")
    need(answer.status == 201, f"its own answer is {answer.status}")
    need_same(answer, settled(lambda: post(site, "/pay", key)), world.count(key))


def client_leaves(stage: Stage) -> None:
    """A client goes away while the handler runs: it ends once, and the retry gets its answer."""
    site, world = stage.site(), stage.world
    key = site.new()
    world.hold(key)
    pending = begin(site, "/pay", key)
    world.wait_for(key)
    pending.vanish()
    world.let_go(key)
    reply, count = settled(lambda: post(site, "/pay", key)), world.count(key)
    need(reply.status == 201, f"the retry gets {reply.status}")
    need(count == 1, f"the effect happened {count} times")


def client_leaves_early(stage: Stage) -> None:
    """A client goes away in the middle of its body: nothing was asked, and the whole request works."""
    site, world = stage.site(), stage.world
    key = site.new()
    lines = [("Idempotency-Key", key), ("Content-Type", "application/json"), ("X-Caller", "ann"),
             ("Authorization", "Bearer ann")]  # fmt: skip
    site.begin("POST", f"/pay?n={key}", lines, b'{"half":', length=1000).vanish()
    reply, count = settled(lambda: post(site, "/pay", key, b'{"whole": 1}')), world.count(key)
    need(reply.status == 201, f"the whole request gets {reply.status}")
    need(count == 1, f"the effect happened {count} times")


def send_error(stage: Stage) -> None:
    """The answer can't be sent after the effect: the retry gets it, and nothing runs again."""
    site = stage.site()
    key = site.new()
    with suppress(OSError):
        post(site, "/pay", key, X_Break="send")
    reply, count = settled(lambda: post(site, "/pay", key)), stage.world.count(key)
    need(count == 1, f"the effect happened {count} times")
    need(reply.status == 201, f"the retry gets {reply.status}")


# -- One key, another request -----------------------------------------------------------------------------------------


def _other(stage: Stage, path: str = "/pay", body: bytes = b"{}", method: str = "POST") -> None:
    site = stage.site()
    key = site.new()
    first = post(site, "/pay", key)
    need(first.status == 201, f"the first answer is {first.status}")
    other = begin(site, path, key, body, method=method).reply()
    count = stage.world.count(key)
    need(count == 1, f"it ran as well ({other.status})")
    need(400 <= other.status < 500, f"it gets {other.status}, the answer to another request")


def other_path(stage: Stage) -> None:
    """The same key on another path: refused."""
    _other(stage, path="/parts")


def other_method(stage: Stage) -> None:
    """The same key with another method: refused."""
    _other(stage, method="PATCH")


def other_body(stage: Stage) -> None:
    """The same key with another body: refused."""
    _other(stage, body=b'{"cents": 1}')


def other_user(stage: Stage) -> None:
    """The same key of another user is another key: both run, and nobody sees the other's answer."""
    site = stage.site()
    key, anns, bobs = site.new(), site.new(), site.new()
    ann = post(site, "/pay", key, name=anns, caller="ann")
    bob = post(site, "/pay", key, name=bobs, caller="bob")
    need(ann.status == 201, f"the first answer is {ann.status}")
    need(anns.encode() not in bob.body, "bob gets ann's answer")
    need(bob.status == 201 and stage.world.count(bobs) == 1, f"bob gets {bob.status}")


def other_body_after_crash(stage: Stage) -> None:
    """The same key with another body, after the first one's server crashed: refused, also when the lease is over."""
    site, world = stage.site(lease=LEASE), stage.world
    key = site.new()
    world.hold(key)
    pending = begin(site, "/pay", key)
    world.wait_for(key)
    stage.kill(site)
    pending.vanish()
    world.let_go(key)
    survivor = stage.site(lease=LEASE)
    deadline = time.monotonic() + 2 * LEASE
    while time.monotonic() < deadline:
        reply, count = post(survivor, "/pay", key, b'{"cents": 1}'), world.count(key)
        need(count == 1, f"it ran ({reply.status})")
        need(400 <= reply.status < 500, f"it gets {reply.status}")
        time.sleep(PAUSE)


# -- Two processes ----------------------------------------------------------------------------------------------------


def racing(stage: Stage) -> None:
    """Twenty keys, each sent to two processes at the same moment: one effect each, and one answer."""
    sites = stage.site(), stage.site()
    for _ in range(20):
        _race(stage, sites, sites[0].new())


def _race(stage: Stage, sites: Sequence[Site], key: str) -> None:
    with ThreadPoolExecutor(len(sites)) as clients:
        first, second = clients.map(lambda site: settled(lambda: post(site, "/pay", key)), sites)
    need(first.status == 201, f"a client gets {first.status}")
    need_same(first, second, stage.world.count(key))


def killed(stage: Stage) -> None:
    """Kill -9 between effect and record: soon the retry is answered, or told that nobody knows; nobody is stuck."""
    site, world = stage.site(lease=LEASE), stage.world
    key = site.new()
    world.hold(key)
    pending = begin(site, "/pay", key)
    world.wait_for(key)
    stage.kill(site)
    pending.vanish()
    world.let_go(key)
    survivor = stage.site(lease=LEASE)
    reply = settled(lambda: post(survivor, "/pay", key))
    need(reply.status == 201, f"still {reply.status} after {PATIENCE:.0f} s: stuck")
    repeat, count = post(survivor, "/pay", key), world.count(key)
    need((repeat.status, repeat.body) == (reply.status, reply.body), "then another answer")
    need(count == 2, f"the effect happened {count} times")


# -- Ends -------------------------------------------------------------------------------------------------------------


def release_while_waiting(stage: Stage) -> None:
    """The first fails while a duplicate waits: the duplicate, or its retry, runs; nobody is stuck."""
    site, world = stage.site(waits=True), stage.world
    key = site.new()
    world.hold(key)
    first = begin(site, "/flaky", key)
    world.wait_for(key)
    second = begin(site, "/flaky", key)
    world.let_go(key)
    failed, waited = first.reply(), second.reply()
    need(failed.status == 500, f"the first gets {failed.status}")
    reply = waited if waited.status == 201 else settled(lambda: post(site, "/flaky", key))
    count = world.count(key)
    need((reply.status, count) == (201, 2), f"the duplicate gets {reply.status} after {count} runs")


def expired(stage: Stage) -> None:
    """After the time that an answer is kept, a request with the same key is new: it runs, and is answered."""
    site, world = stage.site(keep=KEEP), stage.world
    key = site.new()
    first = post(site, "/pay", key)
    need(first.status == 201, f"the first answer is {first.status}")
    time.sleep(KEEP)  # without a word: some count from the last repeat
    deadline = time.monotonic() + PATIENCE
    reply = first
    while time.monotonic() < deadline and world.count(key) == 1:
        reply = post(site, "/pay", key)
        time.sleep(KEEP / 2)
    need(world.count(key) == 2, f"it did not run again, and gets {reply.status}")
    need(reply.status == 201, f"it gets {reply.status}")


CASES: dict[str, Case] = {
    "streamed GET, 20 kB": streamed_get,
    "BaseHTTPMiddleware inside": base_http_middleware,
    "204": status_204,
    "303": status_303,
    "500": status_500,
    "1.5 MiB both ways": large,
    "several header lines": several_headers,
    "longer than the lease": longer_than_lease,
    "client leaves": client_leaves,
    "client leaves early": client_leaves_early,
    "send error": send_error,
    "key, other path": other_path,
    "key, other method": other_method,
    "key, other user": other_user,
    "key, other body": other_body,
    "… after a crash": other_body_after_crash,
    "racing, two processes": racing,
    "kill -9": killed,
    "release while waiting": release_while_waiting,
    "retry after expiry": expired,
}
"""Every case by the name of its row."""
