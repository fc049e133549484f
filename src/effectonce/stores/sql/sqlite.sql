-- Named statements of the SQLite store. `-- name:` begins each.

-- name: schema
CREATE TABLE IF NOT EXISTS effectonce_meta (
    name  TEXT PRIMARY KEY NOT NULL,
    value ANY
) STRICT, WITHOUT ROWID;

-- The long column comes last, so that a purge reads no results.
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

-- Doubts are few and wait for people. Running attempts are not indexed: every claim would pay for it with a page.
CREATE INDEX IF NOT EXISTS effectonce_in_doubt ON effectonce_records (key) WHERE state = 4;

INSERT OR IGNORE INTO effectonce_meta VALUES ('schema', 1), ('floor', 0), ('hand', '');

-- name: tables
SELECT name FROM sqlite_master WHERE type = 'table';

-- name: version
SELECT value FROM effectonce_meta WHERE name = 'schema';

-- `migrate_1` will bring schema 1 to 2, when there is one.
-- name: migrated
UPDATE effectonce_meta SET value = ? WHERE name = 'schema';

-- Never committed: it only makes the log larger.
-- name: room
INSERT INTO effectonce_meta VALUES ('room', zeroblob(?));

-- name: read
SELECT state, owner, fence, fingerprint, lease_until, attempts, result, expires_at, once
FROM effectonce_records WHERE key = ?;

-- name: floor
SELECT value FROM effectonce_meta WHERE name = 'floor';

-- A new record, if the key is unknown and the floor is what it was: no record was deleted since.
-- name: insert
INSERT OR IGNORE INTO effectonce_records
    (key, state, owner, fence, fingerprint, lease_until, attempts, result, expires_at, once)
SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10 FROM effectonce_meta WHERE name = 'floor' AND value = ?11;

-- The same inside a user's transaction, where nobody can change the floor meanwhile: a row with the fence, or none.
-- name: add
INSERT INTO effectonce_records (key, state, owner, fence, fingerprint, lease_until, attempts, expires_at, once)
SELECT ?1, 1, ?2, value + 1, ?3, ?4, 1, ?5, ?6 FROM effectonce_meta WHERE name = 'floor'
ON CONFLICT DO NOTHING RETURNING fence;

-- Only if the record still is the one that was read.
-- name: replace
UPDATE effectonce_records
SET state = ?2, owner = ?3, fence = ?4, fingerprint = ?5, lease_until = ?6, attempts = ?7, result = ?8,
    expires_at = ?9, once = ?10
WHERE key = ?1 AND fence = ?11 AND state = ?12 AND owner IS ?13 AND lease_until IS ?14;

-- The untroubled end of a claim, by its holder. Whatever else a completion meets is read and decided: so is a journal
-- that has to be kept.
-- name: end
UPDATE effectonce_records
SET state = ?4, owner = NULL, lease_until = NULL, result = ?5, expires_at = ?6
WHERE key = ?1 AND owner = ?2 AND fence = ?3 AND state = 1 AND (?4 IN (2, 3) OR result IS NULL);

-- The same for a renewal: with a journal (?6) that is longer than the one that is there, or none.
-- name: hold
UPDATE effectonce_records
SET lease_until = ?4, expires_at = ?5, result = coalesce(?6, result)
WHERE key = ?1 AND owner = ?2 AND fence = ?3 AND state = 1
  AND (?6 IS NULL OR result IS NULL OR length(result) < length(?6));

-- name: hand
SELECT value FROM effectonce_meta WHERE name = 'hand';

-- Where the hand will be when it has passed ?2 + 1 rows; no row if there are fewer.
-- name: next_hand
SELECT key FROM effectonce_records WHERE key > ?1 ORDER BY key LIMIT 1 OFFSET ?2;

-- What may have expired between two places of the hand.
-- name: passed
SELECT key, state, fence, lease_until, attempts, expires_at, once
FROM effectonce_records WHERE key > ?1 AND key <= ?2 AND expires_at <= ?3;

-- name: forget
DELETE FROM effectonce_records WHERE key = ?;

-- name: raise_floor
UPDATE effectonce_meta SET value = max(value, ?) WHERE name = 'floor';

-- name: keep_hand
UPDATE effectonce_meta SET value = ? WHERE name = 'hand';

-- name: scan
SELECT key, state, owner, fence, fingerprint, lease_until, attempts, result, expires_at, once
FROM effectonce_records WHERE key > ? ORDER BY key LIMIT ?;

-- name: scan_in_doubt
SELECT key, state, owner, fence, fingerprint, lease_until, attempts, result, expires_at, once
FROM effectonce_records WHERE state = 4 AND key > ?1 ORDER BY key LIMIT ?2;

-- name: scan_state
SELECT key, state, owner, fence, fingerprint, lease_until, attempts, result, expires_at, once
FROM effectonce_records WHERE state = ?1 AND key > ?2 ORDER BY key LIMIT ?3;

-- name: census
SELECT state, count(*), sum(expires_at <= ?1 AND state <> 4 AND (state <> 1 OR (lease_until <= ?1 AND once = 0))),
       min(lease_until)
FROM effectonce_records GROUP BY state;
