-- Named statements of the MySQL and MariaDB store. `-- name:` begins each.
--
-- {table} is the table, {clock} the server's clock, {record} all there is to a record with the clock before it. %s stands
-- for a literal: a number, or bytes in hexadecimal. So nothing that is stored can be taken for SQL, whatever the server's
-- settings are, and no character set is involved.

-- In microseconds, in no time zone, and the same all through a statement.
-- name: clock
TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))

-- name: record
%s AS clock, state, once, attempts, fence, lease_until, expires_at, owner, fingerprint,
IFNULL(whole_key, `key`) AS key_text, result

-- Gaps between keys are not locked; what does not fit is an error; whoever waits for a lock does not wait for long.
-- name: session
SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED;
SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', innodb_lock_wait_timeout = 1,
    lock_wait_timeout = 1;

-- name: server
SELECT VERSION(), @@max_allowed_packet, @@innodb_flush_log_at_trx_commit = 1 AND (NOT @@log_bin OR @@sync_binlog = 1);

-- name: whose
SELECT engine, table_comment FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = '{name}';

-- The key is bytes, so that no collation takes two keys for one. One that is too long for an index is kept whole beside
-- its beginning and its hash. What a finished record no longer has is NULL, which takes no room. Nothing is indexed but
-- the key, which never changes.
-- name: schema
CREATE TABLE {table} (
    `key`       VARBINARY(767)   NOT NULL PRIMARY KEY,
    state       TINYINT UNSIGNED NOT NULL COMMENT '0 absent, 1 pending, 2 completed, 3 failed, 4 in doubt',
    once        TINYINT UNSIGNED NOT NULL,
    attempts    INT UNSIGNED     NOT NULL,
    fence       BIGINT           NOT NULL,
    lease_until DOUBLE,
    expires_at  DOUBLE           NOT NULL,
    owner       VARBINARY(255),
    fingerprint VARBINARY(255)   NOT NULL,
    whole_key   VARBINARY(4096),
    result      LONGBLOB
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC COMMENT = 'effectonce schema 1: effects that happened, one row per key';

-- A new record's fence is the clock. What is there stays as it is; setting its key to itself does nothing but keep other
-- errors apart from this one, which INSERT IGNORE would not.
-- name: add
INSERT INTO {table} (`key`, whole_key, state, once, attempts, fence, lease_until, expires_at, owner, fingerprint)
VALUES %s ON DUPLICATE KEY UPDATE `key` = {table}.`key`;

-- Before a claim, on MariaDB: what somebody has locked is refused at once.
-- name: at_once
SET STATEMENT innodb_lock_wait_timeout = 0 FOR

-- The same, on MySQL, whose smallest time is a second.
-- name: free
SELECT 1 FROM {table} WHERE `key` IN (%s) FOR UPDATE NOWAIT;

-- name: new
(%s, %s, 1, %s, 1, LAST_INSERT_ID({clock}), fence / 1e6 + %s, lease_until + %s, %s, %s)

-- With `add`, on MariaDB: what is there then. The clock is the one that `new` has read.
-- name: returning
RETURNING {record_added};

-- After `add`, on MySQL, in one transaction with it: the same.
-- name: there
SELECT {record_added} FROM {table} WHERE `key` IN (%s);

-- The last value is 1 if the record gets an answer. One that gets none has to keep its journal.
-- name: end
UPDATE {table} SET state = %s, owner = NULL, lease_until = NULL, result = %s, expires_at = {clock} / 1e6 + %s
WHERE `key` = %s AND state = 1 AND owner = %s AND fence = %s AND (%s OR result IS NULL);

-- name: hold
UPDATE {table} SET lease_until = {clock} / 1e6 + %s, expires_at = {clock} / 1e6 + %s + %s
WHERE `key` = %s AND state = 1 AND owner = %s AND fence = %s;

-- With a journal, and its size.
-- name: save
UPDATE {table} SET lease_until = {clock} / 1e6 + %s, expires_at = {clock} / 1e6 + %s + %s, result = %s
WHERE `key` = %s AND state = 1 AND owner = %s AND fence = %s AND IFNULL(LENGTH(result), 0) < %s;

-- Many of these. The records are found in the order in which they are asked for.
-- name: end_many
UPDATE (
    SELECT 0 AS next_state, X'' AS next_result, 0e0 AS keep, X'' AS asked, X'' AS holder, 0 AS held, 0 AS answers
    UNION ALL %s
) AS ends STRAIGHT_JOIN {table} AS record ON record.`key` = asked
SET state = next_state, owner = NULL, lease_until = NULL, result = next_result,
    expires_at = LAST_INSERT_ID({clock}) / 1e6 + keep
WHERE state = 1 AND owner = holder AND fence = held AND (answers OR result IS NULL);

-- The same for those that are alike, as the ends of a batch are: no table has to be made of them.
-- name: end_alike
UPDATE {table} SET state = %s, owner = NULL, lease_until = NULL, result = %s, expires_at = LAST_INSERT_ID({clock}) / 1e6 + %s
WHERE `key` IN (%s) AND state = 1 AND owner = %s AND fence = %s AND (%s OR result IS NULL);

-- name: hold_many
UPDATE (
    SELECT 0e0 AS lease, 0e0 AS same, 0e0 AS keep, X'' AS asked, X'' AS holder, 0 AS held UNION ALL %s
) AS holds STRAIGHT_JOIN {table} AS record ON record.`key` = asked
SET lease_until = LAST_INSERT_ID({clock}) / 1e6 + lease, expires_at = {clock} / 1e6 + lease + keep
WHERE state = 1 AND owner = holder AND fence = held;

-- name: save_many
UPDATE (
    SELECT 0e0 AS lease, 0e0 AS same, 0e0 AS keep, X'' AS next_result, X'' AS asked, X'' AS holder, 0 AS held, 0 AS size
    UNION ALL %s
) AS saves STRAIGHT_JOIN {table} AS record ON record.`key` = asked
SET lease_until = LAST_INSERT_ID({clock}) / 1e6 + lease, expires_at = {clock} / 1e6 + lease + keep, result = next_result
WHERE state = 1 AND owner = holder AND fence = held AND IFNULL(LENGTH(result), 0) < size;

-- name: swap
UPDATE {table} SET state = %s, owner = %s, fence = %s, fingerprint = %s, lease_until = %s, attempts = %s, result = %s,
    expires_at = %s, once = %s
WHERE `key` = %s AND state = %s AND owner <=> %s AND fence = %s AND attempts = %s AND lease_until <=> %s
  AND expires_at = %s;

-- name: read
SELECT {record} FROM {table} WHERE `key` IN (%s);

-- Where the hand will be when it has passed so many rows and one more; no row if there are fewer.
-- name: next_hand
SELECT `key` FROM {table} WHERE `key` > %s ORDER BY `key` LIMIT 1 OFFSET %s;

-- What may have expired among those. Only a derived table keeps the server from going on to the end.
-- name: passed
SELECT `key`, state, once, lease_until, expires_at FROM (
    SELECT `key`, state, once, lease_until, expires_at FROM {table} WHERE `key` > %s ORDER BY `key` LIMIT %s
) AS passed WHERE expires_at <= %s;

-- Whoever revives a record makes it expire later.
-- name: forget
DELETE FROM {table} WHERE `key` IN (%s) AND expires_at <= %s;

-- name: scan
SELECT {record} FROM {table} WHERE `key` > %s ORDER BY `key` LIMIT %s;

-- name: scan_state
SELECT {record} FROM {table} WHERE `key` > %s AND state = %s ORDER BY `key` LIMIT %s;

-- name: now
SELECT {clock};

-- name: census
SELECT state, COUNT(*), SUM(expires_at <= {clock} / 1e6 AND state <> 4 AND NOT (state = 1 AND
       (once OR lease_until > {clock} / 1e6))), MIN(lease_until) - {clock} / 1e6
FROM {table} GROUP BY state;

-- name: size
SELECT data_length + index_length FROM information_schema.tables
WHERE table_schema = DATABASE() AND table_name = '{name}';
