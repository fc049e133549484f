"""What stands outside any store: imports, and the parts of a call."""

from __future__ import annotations

from benchmarks.cases.base import Case, Row

CASES = (
    Case(
        name="import",
        title="import",
        group="import",
        store="none",
        op="import",
        rows=(
            Row("effectonce", "effectonce", limit=40e-3),
            Row("exactly-once", "exactly_once"),
            Row("idemkit", "idemkit"),
            Row("DBOS", "dbos"),
        ),
        operations=3,
        slices=1,
        is_fixed=True,
    ),
    Case(
        name="micro",
        title="parts of a call (for information)",
        group="micro",
        store="none",
        op="micro",
        rows=(
            Row("uuid4().hex", "raw", "uuid4", baseline=""),
            Row("json + sha256, 1 KB", "raw", "content-id", baseline=""),
            Row("Message.with_content_id, 1 KB", "effectonce", "content-id", baseline="json + sha256, 1 KB"),
            Row("keys.fingerprint, 1 KB", "effectonce", "fingerprint", baseline="json + sha256, 1 KB"),
            Row("keys.uuid7", "effectonce", "uuid7", baseline="uuid4().hex"),
            Row("Message(id)", "effectonce", "message", baseline=""),
            Row("json encode of a result", "raw", "encode", baseline=""),
            Row("codec.encode", "effectonce", "encode", baseline="json encode of a result"),
            Row("json decode of a result", "raw", "decode", baseline=""),
            Row("codec.decode", "effectonce", "decode", baseline="json decode of a result"),
        ),
        budget_seconds=0.03,
    ),
)
