"""The HTTP boundary under real servers, against the app alone: what a request costs the server's process."""

from __future__ import annotations

from functools import partial

from benchmarks.cases.base import Case, Row

FLOORS = {"new": 0.45, "dup": 0.65, "get": 0.97}
"""Of the app alone; a request that is not covered may cost 3 % more."""

_case = partial(
    Case,
    group="http",
    store="http",
    server="valkey",
    step=64,
    operations=6_400,
    budget_seconds=0.3,
    slices=3,
)


def _rows(server: str, op: str) -> tuple[Row, ...]:
    floor = FLOORS[op] if server == "uvicorn" else None
    bare = Row("bare app", "web", f"{server} bare none", baseline="bare app")
    redis = Row("effectonce, Redis", "web", f"{server} effectonce redis", floor=floor, baseline="bare app")
    if op == "get":
        return bare, redis
    return (
        bare,
        redis,
        _row("effectonce, Redis, a scope each", f"{server} effectonce_scoped redis"),
        _row("effectonce, SQLite", f"{server} effectonce sqlite"),
        _row("effectonce, memory", f"{server} effectonce memory"),
        _peer("idemkit, Redis", f"{server} idemkit redis"),
        _peer("asgi-idempotency-header, Redis", f"{server} asgi_idempotency_header redis"),
        _peer("fastapi-idempotency-key, SQLite", f"{server} fastapi_idempotency_key file"),
    )


def _row(label: str, variant: str) -> Row:
    return Row(label, "web", variant, baseline="bare app")


def _peer(label: str, variant: str) -> Row:
    return Row(label, "web_peer", variant, baseline="bare app")


CASES = tuple(
    _case(
        name=f"http-{server}-{op}",
        title=f"ASGI under {server}, {op}, time of the server's process",
        op=op,
        rows=_rows(server, op),
        prefill=0 if op == "get" else 512,
    )
    for server in ("uvicorn", "granian")
    for op in ("new", "dup", "get")
)
