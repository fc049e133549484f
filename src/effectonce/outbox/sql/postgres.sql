-- Named statements of the outbox on PostgreSQL. `-- name:` begins each; {table}, {name} and {ears} are filled in.
--
--   seq        the order in which events were added
--   xid        the transaction that added it
--   due_at     when the next relay may take it: the end of a lease, or of the pause before a retry
--   token      of the relay that has it
--   state      0 waiting, 1 failed and to be retried, 2 given up and holding up its aggregate, 3 given up, 4 published
--
-- A lease changes no column that an index knows of, and pages are filled by half, so that leased rows stay where they
-- are: three times as quick as rows that move. What is published is deleted, or found no more by the partial indexes.
-- The sequence {ears} says until when a relay sleeps. It is one because sequences know no transactions: whoever adds an
-- event sees at once whether there is anybody to wake, and notifies nobody otherwise, since a notification makes
-- commits wait for each other.
-- name: schema
CREATE TABLE {table} (
    seq        bigint   GENERATED ALWAYS AS IDENTITY,
    xid        xid8     NOT NULL DEFAULT pg_current_xact_id(),
    created_at float8   NOT NULL DEFAULT date_part('epoch', clock_timestamp()),
    due_at     float8   NOT NULL DEFAULT 0,
    token      bigint,
    attempts   integer  NOT NULL DEFAULT 0,
    state      smallint NOT NULL DEFAULT 0,
    id         text     COLLATE "C" PRIMARY KEY,
    topic      text     NOT NULL,
    aggregate  text     COLLATE "C",
    payload    bytea    NOT NULL,
    headers    text,
    reason     text
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);

CREATE INDEX {name}_waiting ON {table} (seq) WHERE state <= 1;

CREATE INDEX {name}_order ON {table} (aggregate, seq) WHERE state <= 2;

CREATE INDEX {name}_trouble ON {table} (aggregate) WHERE state IN (1, 2);

CREATE INDEX {name}_dead ON {table} (seq) WHERE state IN (2, 3);

CREATE INDEX {name}_published ON {table} (seq) WHERE state = 4;

CREATE SEQUENCE {ears} MINVALUE 0 START 0;

COMMENT ON TABLE {table} IS 'effectonce outbox schema 1: events to be published';

-- name: whose
SELECT obj_description(oid, 'pg_class') FROM pg_class WHERE oid = to_regclass(%s);

-- The channel is named after the table. An id that is there already is the same event, added again.
-- name: add
WITH added AS (
    INSERT INTO {table} (id, topic, aggregate, payload, headers) VALUES ($1::text, $2::text, $3::text, $4::bytea, $5::text)
    ON CONFLICT DO NOTHING RETURNING seq
)
SELECT pg_notify('{name}', '') FROM added, {ears} WHERE last_value > date_part('epoch', clock_timestamp());

-- The relay's own connection. It reads along indexes, however little the planner knows of a table that is empty one
-- moment and full the next. What a crashed server forgets of its work is done again, with the same ids, so no commit
-- waits for the disk.
-- name: session
SELECT set_config(name, value, false) FROM (VALUES
    ('synchronous_commit', 'off'), ('jit', 'off'), ('plan_cache_mode', 'force_generic_plan'),
    ('enable_bitmapscan', 'off'), ('enable_seqscan', 'off'), ('enable_sort', 'off'), ('enable_mergejoin', 'off'),
    ('default_transaction_isolation', 'read committed'), ('default_transaction_read_only', 'off')
) AS settings (name, value);

-- Lease a batch. Locks say who gets a row; what the statement's snapshot says of the others may be a moment old. So the
-- first unpublished row of an aggregate that is not locked here stops all behind it, whatever its state seemed to be: it
-- is another relay's, waits for its retry, or was given up. Ids are no commit order: rows with an aggregate are read
-- below the oldest running transaction. `held` only keeps a batch from being filled with rows that can't go.
-- name: claim
WITH clock AS MATERIALIZED (
    SELECT date_part('epoch', clock_timestamp()) AS now, pg_snapshot_xmin(pg_current_snapshot()) AS horizon
), held AS MATERIALIZED (
    SELECT aggregate FROM {table}, clock WHERE state IN (1, 2) AND due_at > now AND aggregate IS NOT NULL
), ready AS MATERIALIZED (
    SELECT o.seq, o.aggregate FROM {table} AS o, clock
    WHERE o.state <= 1 AND o.due_at <= clock.now
      AND (o.aggregate IS NULL OR o.xid < clock.horizon AND o.aggregate NOT IN (SELECT aggregate FROM held))
    ORDER BY o.seq LIMIT %(limit)s FOR UPDATE OF o SKIP LOCKED
), wanted AS (
    SELECT aggregate, max(seq) AS last FROM ready WHERE aggregate IS NOT NULL GROUP BY aggregate
), stop AS MATERIALIZED (
    SELECT earlier.aggregate, min(earlier.seq) AS seq
    FROM wanted JOIN {table} AS earlier ON earlier.aggregate = wanted.aggregate AND earlier.seq < wanted.last
    WHERE earlier.state <= 2 AND NOT EXISTS (SELECT FROM ready WHERE ready.seq = earlier.seq)
    GROUP BY earlier.aggregate
)
UPDATE {table} AS o SET due_at = clock.now + %(lease)s, token = %(token)s, attempts = attempts + 1
FROM clock, ready LEFT JOIN stop ON stop.aggregate = ready.aggregate
WHERE o.seq = ready.seq AND o.state <= 1 AND (stop.seq IS NULL OR ready.seq < stop.seq)
RETURNING o.seq, o.id, o.topic, o.aggregate, o.payload, o.headers, o.attempts, o.created_at;

-- Every write-back asks for the token: rows that another relay has taken over are not touched.
-- name: delete
DELETE FROM {table} WHERE seq = ANY(%(seqs)s::bigint[]) AND token = %(token)s AND state <= 1;

-- name: publish
UPDATE {table} SET state = 4, token = NULL, due_at = date_part('epoch', clock_timestamp()), reason = NULL
WHERE seq = ANY(%(seqs)s::bigint[]) AND token = %(token)s AND state <= 1;

-- name: release
UPDATE {table} SET due_at = 0, token = NULL, attempts = attempts - 1
WHERE seq = ANY(%(seqs)s::bigint[]) AND token = %(token)s AND state <= 1;

-- name: retry
UPDATE {table} AS o SET state = 1, token = NULL, due_at = date_part('epoch', clock_timestamp()) + pause,
    reason = failed.reason, attempts = attempts - CASE WHEN counts THEN 0 ELSE 1 END
FROM unnest(%(seqs)s::bigint[], %(pauses)s::float8[], %(reasons)s::text[], %(counts)s::boolean[])
    AS failed (seq, pause, reason, counts)
WHERE o.seq = failed.seq AND token = %(token)s AND state <= 1;

-- name: give_up
UPDATE {table} AS o SET state = %(state)s, token = NULL, reason = failed.reason,
    due_at = CASE WHEN %(state)s = 2 THEN 'infinity' ELSE date_part('epoch', clock_timestamp()) END
FROM unnest(%(seqs)s::bigint[], %(reasons)s::text[]) AS failed (seq, reason)
WHERE o.seq = failed.seq AND token = %(token)s AND state <= 1;

-- name: lag
SELECT count(*), coalesce(date_part('epoch', clock_timestamp()) - min(created_at), 0),
       (SELECT count(*) FROM {table} WHERE state IN (2, 3))
FROM {table} WHERE state <= 1;

-- name: dead
SELECT seq, id, topic, aggregate, payload, headers, attempts, created_at, reason, state = 2
FROM {table} WHERE state IN (2, 3) ORDER BY seq LIMIT %s;

-- name: replay
UPDATE {table} SET state = 1, due_at = 0, attempts = 0 WHERE state IN (2, 3) AND (%(id)s::text IS NULL OR id = %(id)s);

-- name: forget
DELETE FROM {table} WHERE state IN (2, 3) AND id = %(id)s;

-- The oldest ones, in the order in which they were added: no index may know when they were published.
-- name: purge
DELETE FROM {table} WHERE state = 4 AND seq = ANY(ARRAY(
    SELECT seq FROM {table} WHERE state = 4 ORDER BY seq LIMIT %(limit)s FOR UPDATE SKIP LOCKED
)) AND due_at < date_part('epoch', clock_timestamp()) - %(age)s;

-- name: listen
LISTEN "{name}";

-- Relays that sleep say so; the one that wakes up takes it back, since it is at work for the others too.
-- name: sleep
SELECT setval('{ears}', ceil(date_part('epoch', clock_timestamp()) + %s)::bigint);

-- name: wake
SELECT setval('{ears}', 0);
