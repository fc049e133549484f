-- Named statements of the PostgreSQL store. `-- name:` begins each.
--
-- {table} is the table, {put} the function and {channel} the channel that belong to it. {asked} is what is asked for: one row of parameters, or
-- many rows out of arrays, numbered in the column `place`. Its other columns stand in the line `-- asked:`. Every
-- parameter is written with its type. {may_wait} is true, and in a claim outside of a user's transaction it also sees to
-- it that the claim does not wait for somebody's. {mine} is the condition that a record is still the caller's, {settled} what ends it. {follow} and {and_unexpired} are for stores that rotate, and empty in others.

-- `id` is the beginning of the key's SHA-256: an index of keys themselves would be twice as large. Eight columns at
-- most, since a ninth would cost each row eight bytes. What is NULL takes no room: a finished record has neither lease
-- nor owner. What never changes stands first, because the log of an update leaves out how the new row begins if the old
-- one began so. Only the id is indexed, so the end of an attempt touches no index where its page has room. Pages are
-- filled up: free space for updates would cost every key more than the vacuum that follows those which find none.
--
--   state    0 absent, 1 pending, 2 completed, 3 failed, 4 in doubt; 8 is added if the key was claimed at most once, 16
--            if somebody watches it, and 32 for every attempt
--   content  the owner of a pending record, in 16 bytes, with its journal after it; the result of every other one
--
-- The function puts a record in place unless there is one, and gives its fence: the clock in microseconds, which is also
-- what its times are counted from. A statement calls it when it has found no record; one that had to be ready to write
-- from the start would cost a duplicate half as much again. It means the table that it was made with, whatever the path of
-- a user's session leads to first, so that the schema stands in it.
-- name: schema
CREATE TABLE {table} (
    fence       bigint  NOT NULL,
    id          uuid    PRIMARY KEY,
    key         text    COLLATE "C" NOT NULL,
    fingerprint bytea,
    state       integer NOT NULL,
    expires_at  float8  NOT NULL,
    lease_until float8,
    content     bytea
) WITH (autovacuum_vacuum_scale_factor = 0.05);

DO $make$ BEGIN EXECUTE format($text$
CREATE OR REPLACE FUNCTION {put}(
    id uuid, key text, fingerprint bytea, state integer, lease float8, keep float8, owner bytea
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    micros bigint := date_part('epoch', clock_timestamp()) * 1000000;
    until  float8 := micros / 1000000::float8 + lease;
BEGIN
    INSERT INTO %s.%I VALUES (micros, id, key, fingerprint, state, until + keep, until, owner) ON CONFLICT DO NOTHING;
    RETURN CASE WHEN FOUND THEN micros END;
END $$
$text$, VARIADIC (
    SELECT ARRAY[relnamespace::regnamespace::text, relname] FROM pg_class WHERE oid = '{table}'::regclass
)); END $make$;

COMMENT ON TABLE {table} IS 'effectonce schema 1: effects that happened, one row per key';

-- name: whose
-- Through pg_class, because to_regclass alone sees a table that is newer than this statement, and without its comment.
SELECT obj_description(oid, 'pg_class'), current_setting('server_encoding'), current_setting('synchronous_commit'),
       current_setting('fsync'), row_security_active(oid),
       {begins_only}, {is_meant}, relnamespace::regnamespace::text
FROM pg_class WHERE oid = to_regclass($1::text);

-- The same over a user's connection. A table that its function does not mean is left to the store itself.
-- name: look
SELECT relnamespace::regnamespace::text, obj_description(oid, 'pg_class'), {begins_only}
FROM pg_class WHERE oid = to_regclass('{table}') AND {is_meant};

-- name: now
SELECT date_part('epoch', clock_timestamp());

-- A row without a state was added. One without a fence either: somebody put a record in place after this statement began
-- to look, and it has to look again.
-- name: add
-- asked: id uuid, key text, print bytea, code integer, lease float8, keep float8, owner bytea
SELECT place, state,
       CASE WHEN fence IS NOT NULL THEN fence
            WHEN {may_wait} THEN {put}(id, asked.key, print, code, lease, keep, owner) END,
       lease_until, expires_at, fingerprint, content, date_part('epoch', clock_timestamp())
FROM {asked} LEFT JOIN {table} USING (id);

-- The same in a user's transaction, where a key is nearly always new: nobody looks before, and no function is in
-- between. A row if the record was put in place.
-- name: put
INSERT INTO {table}
SELECT micros, $1::uuid, $2::text, $3::bytea, $4::integer, until + $6::float8, until, $7::bytea
FROM (
    SELECT micros, micros / 1000000::float8 + $5::float8 AS until
    FROM (SELECT (date_part('epoch', clock_timestamp()) * 1000000)::bigint AS micros) AS clock
) AS times
ON CONFLICT DO NOTHING RETURNING fence;

-- The end of what was claimed in the same transaction: nobody else has seen that claim, and who watched what it took over
-- has been told by the swap.
-- name: settle
UPDATE {table} AS record SET {settled} WHERE id = $1::uuid AND {mine};

-- The same where COMMIT follows in one round trip, which nobody can hold back: an error if there is nothing to end. (A
-- count of what an UPDATE returns, to divide by, would do so at three times the price. Before PostgreSQL 15 there is no MERGE.)
-- name: settle_one
MERGE INTO {table} AS record USING (SELECT $1::uuid AS id) AS asked ON record.id = asked.id AND {mine}
WHEN MATCHED THEN UPDATE SET {settled}
WHEN NOT MATCHED THEN INSERT (fence) VALUES (NULL);

-- The same as `add` for many, by one insert instead of a call for each. They get fences one after the other, so that a
-- fence tells whose it is.
-- name: add_many
-- asked: id uuid, key text, print bytea, code integer, lease float8, keep float8, owner bytea
WITH clock AS MATERIALIZED (
    SELECT (date_part('epoch', clock_timestamp()) * 1000000)::bigint AS micros WHERE {may_wait}
), found AS MATERIALIZED (
    SELECT asked.*, state, fence, lease_until, expires_at, fingerprint, content FROM {asked} LEFT JOIN {table} USING (id)
), added AS (
    INSERT INTO {table}
    SELECT micros + place, id, key, print, code, (micros + place) / 1000000::float8 + lease + keep,
           (micros + place) / 1000000::float8 + lease, owner
    FROM found, clock WHERE fence IS NULL
    ON CONFLICT DO NOTHING
    RETURNING fence
)
SELECT place, state, fence, lease_until, expires_at, fingerprint, content, micros / 1000000::float8
FROM found, clock WHERE fence IS NOT NULL
UNION ALL
SELECT fence - micros, NULL, fence, NULL, NULL, NULL, NULL, NULL FROM added, clock;

-- Not of a record that has a journal, if it gets no answer: that has to be kept.
-- name: end
-- asked: id uuid, owner bytea, fence bigint, state integer, result bytea, keep float8
UPDATE {table} AS record
SET state = (record.state & -8) | asked.state, content = result, lease_until = NULL,
    expires_at = date_part('epoch', clock_timestamp()) + keep{follow}
FROM {asked}
WHERE record.id = asked.id{and_unexpired} AND record.state & 7 = 1 AND record.fence = asked.fence AND substr(content, 1, 16) = owner
  AND (asked.state IN (2, 3) OR octet_length(content) <= 16)
RETURNING place, CASE WHEN record.state & 16 <> 0 THEN pg_notify('{channel}', record.id::text)::text END;

-- name: hold
-- asked: id uuid, owner bytea, fence bigint, lease float8, keep float8
UPDATE {table} AS record
SET lease_until = date_part('epoch', clock_timestamp()) + lease,
    expires_at = date_part('epoch', clock_timestamp()) + lease + keep{follow}
FROM {asked}
WHERE record.id = asked.id{and_unexpired} AND state & 7 = 1 AND record.fence = asked.fence AND substr(content, 1, 16) = owner
RETURNING place;

-- name: save
-- asked: id uuid, owner bytea, fence bigint, lease float8, keep float8, journal bytea
UPDATE {table} AS record
SET lease_until = date_part('epoch', clock_timestamp()) + lease,
    expires_at = date_part('epoch', clock_timestamp()) + lease + keep, content = owner || journal{follow}
FROM {asked}
WHERE record.id = asked.id{and_unexpired} AND state & 7 = 1 AND record.fence = asked.fence AND substr(content, 1, 16) = owner
  AND octet_length(content) < 16 + octet_length(journal)
RETURNING place;

-- Fence, state, attempts and both times tell every version of a record from every other. Times are compared as this
-- session writes them: one with extra_float_digits = 0 has been told them to ten microseconds. Who watches a pending
-- record watches what follows it; who watched one that has ended is gone.
-- name: swap
-- asked: id uuid, fence bigint, state integer, lease float8, expiry float8, next_fence bigint, next_print bytea, next_state integer, next_expiry float8, next_lease float8, next_content bytea
UPDATE {table} AS record
SET fence = next_fence, fingerprint = next_print, expires_at = next_expiry, lease_until = next_lease,
    content = next_content, state = next_state | CASE asked.state & 7 WHEN 1 THEN record.state & 16 ELSE 0 END{follow}
FROM {asked}
WHERE record.id = asked.id{and_unexpired} AND record.fence = asked.fence AND record.state & -17 = asked.state
  AND lease_until::text IS NOT DISTINCT FROM lease::text AND expires_at::text = expiry::text AND {may_wait}
RETURNING place, CASE WHEN record.state & 16 <> 0 THEN pg_notify('{channel}', record.id::text)::text END;

-- name: read
-- asked: id uuid
SELECT place, state, fence, lease_until, expires_at, fingerprint, content, date_part('epoch', clock_timestamp())
FROM {asked} JOIN {table} USING (id);

-- A row if the record is still pending: whoever ends it will tell.
-- name: watch
WITH marked AS (
    UPDATE {table} SET state = state | 16
    WHERE id = $1::uuid AND fence = $2::bigint AND state & 23 = 1
    RETURNING id
)
SELECT id::text FROM marked
UNION ALL
SELECT id::text FROM {table} WHERE id = $1::uuid AND fence = $2::bigint AND state & 23 = 17;

-- The hand passes some pages of the table and forgets what has expired there: never a doubt (4), nor an attempt that may
-- be made only once (8 + 1). Whoever is at a record just now keeps it.
-- name: purge
WITH span AS MATERIALIZED (
    SELECT $1::bigint % greatest(pages, 1) AS hand, pages, date_part('epoch', clock_timestamp()) AS now
    FROM (SELECT pg_relation_size('{table}') / current_setting('block_size')::bigint AS pages) AS size
), gone AS (
    DELETE FROM {table} WHERE ctid = ANY (ARRAY (
        SELECT record.ctid FROM {table} AS record
        WHERE record.ctid >= (SELECT format('(%s,0)', hand)::tid FROM span)
          AND record.ctid < (SELECT format('(%s,0)', hand + $2::bigint)::tid FROM span)
          AND expires_at <= (SELECT now FROM span) AND state & 7 <> 4 AND state & 15 <> 9
        LIMIT $3::bigint FOR UPDATE SKIP LOCKED
    ))
    RETURNING 1
)
SELECT (SELECT count(*) FROM gone), hand, pages FROM span;

-- Some questions are for everything: for them the table may be read from its first page to its last, as long as it takes.
-- name: may_read_all
SELECT set_config('enable_seqscan', 'on', true), set_config('statement_timeout', '0', true);

-- name: scan
SELECT key, state, fence, lease_until, expires_at, fingerprint, content
FROM {table} WHERE key > $1::text AND ($2::integer IS NULL OR state & 7 = $2::integer) ORDER BY key LIMIT $3::bigint;

-- name: census
WITH clock AS MATERIALIZED (
    SELECT date_part('epoch', clock_timestamp()) AS now
)
SELECT state & 7, count(*), count(*) FILTER (WHERE expires_at <= now AND state & 7 <> 4 AND state & 15 <> 9),
       min(lease_until) - now
FROM {table} TABLESAMPLE SYSTEM ($1::float8), clock GROUP BY state & 7, now;

-- name: size
SELECT pg_total_relation_size('{table}'), pg_relation_size('{table}') / current_setting('block_size')::bigint;
