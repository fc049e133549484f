"""DynamoDB, by an engine of its own making, against boto3's client."""

from __future__ import annotations

from functools import partial

from benchmarks.cases.base import RAW, Case, Row, ours

_case = partial(
    Case,
    group="dynamodb",
    store="dynamodb",
    server="dynamodb",
    rows=(RAW, *ours(floor=0.95), Row("Powertools", "powertools")),
    budget_seconds=0.5,
)

CASES = (
    _case(name="dynamodb-new", title="DynamoDB, 1 caller, new", op="new"),
    _case(name="dynamodb-dup", title="DynamoDB, 1 caller, dup", op="dup", prefill=100),
)
