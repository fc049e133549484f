-- Named statements of the SQLite store. `-- name:` begins each; columns are in the order of Record.

-- name: schema
CREATE TABLE IF NOT EXISTS effectonce_meta (
    name  TEXT PRIMARY KEY NOT NULL,
    value ANY
) STRICT, WITHOUT ROWID;

-- The long columns come last, so that a purge reads no results.
CREATE TABLE IF NOT EXISTS effectonce_records (
    key         TEXT PRIMARY KEY NOT NULL,
    state       INTEGER NOT NULL,
    fence       INTEGER NOT NULL,
    attempts    INTEGER NOT NULL,
    once        INTEGER NOT NULL,
    lease_until REAL,
    expires_at  REAL NOT NULL,
    owner       BLOB,
    fingerprint BLOB,
    result      BLOB
) STRICT, WITHOUT ROWID;

-- Only what is unfinished is indexed by state: it is little, and a sweep asks for nothing else.
CREATE INDEX IF NOT EXISTS effectonce_unfinished ON effectonce_records (state, key) WHERE state IN (1, 4);

INSERT OR IGNORE INTO effectonce_meta VALUES ('schema', 1), ('floor', 0), ('hand', '');

-- name: version
SELECT value FROM effectonce_meta WHERE name = 'schema';

-- name: read
SELECT state, owner, fence, fingerprint, lease_until, attempts, result, expires_at, once
FROM effectonce_records WHERE key = ?;

-- name: write
INSERT INTO effectonce_records (key, state, owner, fence, fingerprint, lease_until, attempts, result, expires_at, once)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (key) DO UPDATE SET
    state = excluded.state, owner = excluded.owner, fence = excluded.fence, fingerprint = excluded.fingerprint,
    lease_until = excluded.lease_until, attempts = excluded.attempts, result = excluded.result,
    expires_at = excluded.expires_at, once = excluded.once;

-- name: floor
SELECT value FROM effectonce_meta WHERE name = 'floor';

-- name: raise_floor
UPDATE effectonce_meta SET value = max(value, ?) WHERE name = 'floor';

-- name: hand
SELECT value FROM effectonce_meta WHERE name = 'hand';

-- name: move_hand
UPDATE effectonce_meta SET value = ? WHERE name = 'hand';

-- name: look
SELECT key, state, owner, fence, fingerprint, lease_until, attempts, NULL, expires_at, once
FROM effectonce_records WHERE key > ? ORDER BY key LIMIT ?;

-- name: forget
DELETE FROM effectonce_records WHERE key = ?;

-- name: scan
SELECT key, state, owner, fence, fingerprint, lease_until, attempts, result, expires_at, once
FROM effectonce_records WHERE key > ? ORDER BY key LIMIT ?;

-- name: scan_unfinished
SELECT key, state, owner, fence, fingerprint, lease_until, attempts, result, expires_at, once
FROM effectonce_records WHERE state = ?1 AND state IN (1, 4) AND key > ?2 ORDER BY key LIMIT ?3;

-- name: scan_state
SELECT key, state, owner, fence, fingerprint, lease_until, attempts, result, expires_at, once
FROM effectonce_records WHERE state = ?1 AND key > ?2 ORDER BY key LIMIT ?3;

-- name: census
SELECT state, count(*), sum(expires_at <= ?1 AND state <> 4 AND (state <> 1 OR (lease_until <= ?1 AND once = 0))),
       min(lease_until)
FROM effectonce_records GROUP BY state;
