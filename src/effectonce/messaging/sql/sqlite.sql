-- Named statements of the cursors in SQLite. What the columns mean is told in postgresql.sql. A file has one lock, and
-- only a change takes it.
-- name: schema
CREATE TABLE IF NOT EXISTS effectonce_cursors (
    consumer TEXT    NOT NULL,
    source   TEXT    NOT NULL,
    fence    INTEGER NOT NULL,
    version  INTEGER NOT NULL,
    low      INTEGER NOT NULL,
    above    TEXT    NOT NULL,
    PRIMARY KEY (consumer, source)
) WITHOUT ROWID;

-- name: take
INSERT INTO effectonce_cursors (consumer, source, fence, version, low, above) VALUES ($1, $2, 1, 1, 0, '')
ON CONFLICT (consumer, source) DO UPDATE SET fence = fence + 1, version = version + 1;

-- name: lock
UPDATE effectonce_cursors SET version = version WHERE consumer = $1 AND source = $2
RETURNING fence, version, low, above;

-- name: move
UPDATE effectonce_cursors SET low = $4, above = $5, version = version + 1
WHERE consumer = $1 AND source = $2 AND version = $3;
