-- Named statements of the outbox in SQLite. What the columns mean is told in postgres.sql. One connection writes at a
-- time, so ids are in the order of commits, and nobody else leases rows while a statement looks for some.
-- name: schema
CREATE TABLE {table} (
    seq        INTEGER PRIMARY KEY AUTOINCREMENT,
    created_at REAL    NOT NULL,
    due_at     REAL    NOT NULL DEFAULT 0,
    token      INTEGER,
    attempts   INTEGER NOT NULL DEFAULT 0,
    state      INTEGER NOT NULL DEFAULT 0,
    id         TEXT    NOT NULL UNIQUE,
    topic      TEXT    NOT NULL,
    aggregate  TEXT,
    payload    BLOB    NOT NULL,
    headers    TEXT,
    reason     TEXT
);

CREATE INDEX {name}_waiting ON {table} (seq) WHERE state <= 1;

CREATE INDEX {name}_held ON {table} (due_at, aggregate) WHERE state <= 2;

CREATE INDEX {name}_over ON {table} (state, due_at) WHERE state >= 2;

-- name: columns
SELECT name FROM pragma_table_info(?);

-- name: add
INSERT INTO {table} (id, topic, aggregate, payload, headers, created_at)
VALUES ($1, $2, $3, $4, $5, (julianday('now') - 2440587.5) * 86400) ON CONFLICT (id) DO NOTHING;

-- An aggregate with a row that is leased, waits for its retry or was given up has to wait. No row before that one is left.
-- name: claim
UPDATE {table} SET due_at = :now + :lease, token = :token, attempts = attempts + 1
WHERE seq IN (
    SELECT seq FROM {table}
    WHERE state <= 1 AND due_at <= :now
      AND (aggregate IS NULL OR aggregate NOT IN (
          SELECT aggregate FROM {table} WHERE state <= 2 AND due_at > :now AND aggregate IS NOT NULL))
    ORDER BY seq LIMIT :limit)
RETURNING seq, id, topic, aggregate, payload, headers, attempts, created_at;

-- name: delete
DELETE FROM {table} WHERE seq = :seq AND token = :token AND state <= 1;

-- name: publish
UPDATE {table} SET state = 4, token = NULL, due_at = :now, reason = NULL
WHERE seq = :seq AND token = :token AND state <= 1;

-- name: release
UPDATE {table} SET due_at = 0, token = NULL, attempts = attempts - 1
WHERE seq = :seq AND token = :token AND state <= 1;

-- name: retry
UPDATE {table} SET state = 1, token = NULL, due_at = :now + :pause, reason = :reason,
    attempts = attempts - CASE WHEN :counts THEN 0 ELSE 1 END
WHERE seq = :seq AND token = :token AND state <= 1;

-- name: give_up
UPDATE {table} SET state = :state, token = NULL, due_at = CASE :state WHEN 2 THEN 9e999 ELSE :now END, reason = :reason
WHERE seq = :seq AND token = :token AND state <= 1;

-- name: lag
SELECT count(*), coalesce(max(:now - min(created_at), 0), 0), (SELECT count(*) FROM {table} WHERE state IN (2, 3))
FROM {table} WHERE state <= 1;

-- name: dead
SELECT seq, id, topic, aggregate, payload, headers, attempts, created_at, reason, state = 2
FROM {table} WHERE state IN (2, 3) ORDER BY seq LIMIT :limit;

-- name: replay
UPDATE {table} SET state = 1, due_at = 0, attempts = 0 WHERE state IN (2, 3) AND (:id IS NULL OR id = :id);

-- name: forget
DELETE FROM {table} WHERE state IN (2, 3) AND id = :id;

-- name: purge
DELETE FROM {table} WHERE seq IN (
    SELECT seq FROM {table} WHERE state = 4 AND due_at < :now - :age ORDER BY due_at LIMIT :limit);
