-- Named statements of the outbox on MySQL and MariaDB. What the columns mean is told in postgres.sql.
--
-- `waits`, `counts` and `troubles` stand for partial indexes, which these engines don't have. Ids and aggregates are
-- bytes, because 'a' and 'a ' are equal as texts.
-- name: schema
CREATE TABLE {table} (
    seq        BIGINT         NOT NULL AUTO_INCREMENT PRIMARY KEY,
    created_at DOUBLE         NOT NULL,
    due_at     DOUBLE         NOT NULL DEFAULT 0,
    token      BIGINT,
    attempts   INT            NOT NULL DEFAULT 0,
    state      TINYINT        NOT NULL DEFAULT 0,
    id         VARBINARY(1020) NOT NULL,
    topic      VARCHAR(255)   NOT NULL,
    aggregate  VARBINARY(1020),
    payload    LONGBLOB       NOT NULL,
    headers    LONGTEXT,
    reason     TEXT,
    waits      TINYINT        AS (IF(state <= 1, 1, NULL)) STORED,
    counts     TINYINT        AS (IF(state <= 2, 1, NULL)) STORED,
    troubles   TINYINT        AS (IF(state IN (1, 2), 1, NULL)) STORED,
    UNIQUE KEY (id),
    KEY (waits, seq),
    KEY (counts, aggregate, seq),
    KEY (troubles, aggregate),
    KEY (state, due_at)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin
COMMENT = 'effectonce outbox schema 1: events to be published';

-- name: whose
SELECT table_comment FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = %s;

-- name: add
INSERT INTO {table} (id, topic, aggregate, payload, headers, created_at)
VALUES (CAST(CONVERT($1 USING utf8mb4) AS BINARY), $2, CAST(CONVERT($3 USING utf8mb4) AS BINARY), $4, $5,
        UNIX_TIMESTAMP(NOW(6)))
ON DUPLICATE KEY UPDATE seq = seq;

-- Whoever leases reads what others have not committed yet. So an event that is added by a transaction still running, or
-- that another relay is just leasing, is seen, and stops those of its aggregate behind it; locked rows are skipped.
-- name: isolation
SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED;

-- name: ready
SELECT seq, id, topic, aggregate, payload, headers, attempts + 1, created_at, UNIX_TIMESTAMP(NOW(6))
FROM {table} FORCE INDEX (waits)
WHERE waits = 1 AND due_at <= UNIX_TIMESTAMP(NOW(6)) AND (aggregate IS NULL OR aggregate NOT IN (
    SELECT held.aggregate FROM {table} AS held
    WHERE held.troubles = 1 AND held.due_at > UNIX_TIMESTAMP(NOW(6)) AND held.aggregate IS NOT NULL))
ORDER BY seq LIMIT %(limit)s FOR UPDATE SKIP LOCKED;

-- name: earlier
SELECT aggregate, seq FROM {table} FORCE INDEX (counts)
WHERE counts = 1 AND aggregate IN %(aggregates)s AND seq < %(last)s ORDER BY seq;

-- name: lease
UPDATE {table} SET due_at = %(until)s, token = %(token)s, attempts = attempts + 1 WHERE seq IN %(seqs)s;

-- name: delete
DELETE FROM {table} WHERE seq IN %(seqs)s AND token = %(token)s AND state <= 1;

-- name: publish
UPDATE {table} SET state = 4, token = NULL, due_at = UNIX_TIMESTAMP(NOW(6)), reason = NULL
WHERE seq IN %(seqs)s AND token = %(token)s AND state <= 1;

-- name: release
UPDATE {table} SET due_at = 0, token = NULL, attempts = attempts - 1
WHERE seq IN %(seqs)s AND token = %(token)s AND state <= 1;

-- name: retry
UPDATE {table} SET state = 1, token = NULL, due_at = UNIX_TIMESTAMP(NOW(6)) + %(pause)s, reason = %(reason)s,
    attempts = attempts - IF(%(counts)s, 0, 1)
WHERE seq = %(seq)s AND token = %(token)s AND state <= 1;

-- name: give_up
UPDATE {table} SET token = NULL, due_at = IF(%(state)s = 2, 1e18, UNIX_TIMESTAMP(NOW(6))), reason = %(reason)s,
    state = %(state)s
WHERE seq = %(seq)s AND token = %(token)s AND state <= 1;

-- name: lag
SELECT count(*), coalesce(UNIX_TIMESTAMP(NOW(6)) - min(created_at), 0),
       (SELECT count(*) FROM {table} WHERE state IN (2, 3))
FROM {table} WHERE waits = 1;

-- name: dead
SELECT seq, id, topic, aggregate, payload, headers, attempts, created_at, reason, state = 2
FROM {table} WHERE state IN (2, 3) ORDER BY seq LIMIT %(limit)s;

-- name: replay
UPDATE {table} SET state = 1, due_at = 0, attempts = 0 WHERE state IN (2, 3) AND (%(id)s IS NULL OR id = %(id)s);

-- name: forget
DELETE FROM {table} WHERE state IN (2, 3) AND id = %(id)s;

-- name: purge
DELETE FROM {table} WHERE state = 4 AND due_at < UNIX_TIMESTAMP(NOW(6)) - %(age)s ORDER BY due_at LIMIT %(limit)s;
