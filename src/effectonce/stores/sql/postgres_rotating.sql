-- Named statements of a PostgreSQL store that rotates; those of postgres.sql hold where there is none here.
--
-- The table is a ring of three slots. New records go into the current one; the next one is emptied meanwhile, by TRUNCATE,
-- and becomes current when its turn has come. What makes that safe:
--
--   1. Only the current slot gains rows: {current} is where every statement puts what it adds or changes, so a record that
--      is changed moves there. Closed slots only lose rows, and what was seen to be gone from them stays gone.
--   2. {current} changes only under a SHARE lock on the table. A statement that writes has its own lock on it before it
--      looks (READ COMMITTED): it has committed before the change, or sees it. One with an older snapshot (REPEATABLE READ)
--      holds the ring FOR SHARE instead, and is refused (40001) if that has changed since.
--   3. What has expired is as good as gone: nobody changes it, and whoever claims its key adds a row, in the current slot.
--      So of the rows of a key at most one is {unexpired}, and the slot's primary key keeps two claims apart.
--
-- {slot} begins the names of the slots' tables.

-- The slots' own primary keys, not one of the table's: that would have to hold the slot too, and every entry be larger.
-- Nobody has to vacuum for what was only inserted: it is gone before that would be of use.
-- `ring` says which slot is current and since when; its row changes when a slot becomes current or is emptied, and never
-- else. `sweep` is how far the next slot has been gone through: the page, of that file; until when nobody tries again to
-- have a lock that somebody else had; and the transaction that wrote this. In a copy of the row, restored or replicated, it
-- is another that did: the file may well have the same number there, and its pages hold something else. An index for their one row would only cost; replication needs none then.
-- name: schema
CREATE TABLE {table} (
    fence       bigint   NOT NULL,
    id          uuid     NOT NULL,
    slot        smallint NOT NULL,
    key         text     COLLATE "C" NOT NULL,
    fingerprint bytea,
    state       integer  NOT NULL,
    expires_at  float8   NOT NULL,
    lease_until float8,
    content     bytea
) PARTITION BY LIST (slot);

CREATE TABLE {slot}0" PARTITION OF {table} (PRIMARY KEY (id)) FOR VALUES IN (0)
WITH (autovacuum_vacuum_insert_threshold = -1);

CREATE TABLE {slot}1" PARTITION OF {table} (PRIMARY KEY (id)) FOR VALUES IN (1)
WITH (autovacuum_vacuum_insert_threshold = -1);

CREATE TABLE {slot}2" PARTITION OF {table} (PRIMARY KEY (id)) FOR VALUES IN (2)
WITH (autovacuum_vacuum_insert_threshold = -1);

CREATE TABLE {ring} AS
SELECT 0::smallint AS slot, date_part('epoch', clock_timestamp()) AS began, 0::bigint AS emptied;

ALTER TABLE {ring} REPLICA IDENTITY FULL;

CREATE TABLE {sweep} AS SELECT 0::oid AS file, 0::bigint AS page, 0::float8 AS rests_until, '0'::xid AS written;

ALTER TABLE {sweep} REPLICA IDENTITY FULL;

CREATE OR REPLACE FUNCTION {put}(
    asked_id uuid, asked_key text, print bytea, code integer, lease float8, keep float8, owner bytea,
    hurries boolean DEFAULT false
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    micros bigint;
    until  float8;
BEGIN
    IF hurries THEN -- but waits for the ring to turn, which is over in a moment
        LOCK TABLE ONLY {table} IN ROW EXCLUSIVE MODE;
        PERFORM set_config('lock_timeout', '2', true);
    END IF;
    micros := date_part('epoch', clock_timestamp()) * 1000000;
    until := micros / 1000000::float8 + lease;
    INSERT INTO {table}
    SELECT micros, asked_id, {current}, asked_key, print, code, until + keep, until, owner
    WHERE NOT EXISTS (SELECT FROM {table} AS record WHERE record.id = asked_id AND {unexpired})
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN -- it is there, or has expired in this very slot
        UPDATE {table} AS record
        SET fence = micros, fingerprint = print, state = code, expires_at = until + keep, lease_until = until, content = owner
        WHERE record.id = asked_id AND record.slot = {current} AND NOT {unexpired};
    END IF;
    RETURN CASE WHEN FOUND THEN micros END;
END $$;

-- One step of the rotation, by whoever is first: true if there may be another at once, false if it has to wait.
--
-- The next slot is gone through, some pages at a time. What has not expired there moves to the current slot, if that are
-- few; else it is waited for. When the last page is behind, the slot is emptied; when its turn has come, it is current.
CREATE OR REPLACE FUNCTION {turn}(period float8, pages bigint, few bigint, pause float8) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    done  {sweep};
    now   {ring};
    next  smallint;
    name  regclass;
    toast oid;
    size  bigint;
    stays tid[];
    moved bigint;
    mine  xid;
BEGIN
    SELECT * INTO STRICT now FROM {ring};
    -- What lies farther ahead than anybody rests was written before the clock was set back, and counts for nothing.
    SELECT * INTO done FROM {sweep}
    WHERE rests_until - date_part('epoch', clock_timestamp()) NOT BETWEEN 0 AND 3600
    FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    SELECT * INTO now FROM {ring}; -- as it is now that nobody else turns it
    mine := pg_current_xact_id()::xid;
    next := (now.slot + 1) % 3;
    name := format('%s%s"', '{slot}', next);
    size := pg_relation_size(name) / current_setting('block_size')::bigint;
    PERFORM set_config('lock_timeout', '50', true); -- whoever comes meanwhile waits behind this
    -- A crash that loses a step loses nothing else, and whatever builds on one is behind it in the log: only the emptying
    -- of a slot has to wait for the disk, and does.
    PERFORM set_config('synchronous_commit', 'off', true);
    IF size = 0 THEN
        IF date_part('epoch', clock_timestamp()) - now.began BETWEEN 0 AND period THEN
            RETURN false;
        END IF;
        BEGIN
            LOCK TABLE ONLY {table} IN SHARE MODE; -- the slots themselves may be vacuumed meanwhile
        EXCEPTION WHEN lock_not_available THEN
            UPDATE {sweep} SET rests_until = date_part('epoch', clock_timestamp()) + pause, written = mine;
            RETURN false;
        END;
        UPDATE {ring} SET slot = next, began = date_part('epoch', clock_timestamp());
        UPDATE {sweep} SET file = 0, page = 0, written = mine;
        RETURN true;
    END IF;
    IF done.file <> pg_relation_filenode(name) OR NOT EXISTS (SELECT FROM {sweep} WHERE xmin = written) THEN
        -- another slot, or one that was rewritten, or of another server
        done.file := pg_relation_filenode(name);
        done.page := 0;
    END IF;
    IF done.page >= size THEN
        toast := (SELECT reltoastrelid FROM pg_class WHERE oid = name);
        IF EXISTS (SELECT FROM pg_locks WHERE relation IN (name, toast) AND mode = 'ShareUpdateExclusiveLock' AND granted) THEN
            RETURN false; -- a vacuum takes longer than anybody should wait behind this
        END IF;
        BEGIN
            EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', name);
            IF done.file = pg_relation_filenode(name) THEN
                EXECUTE format('TRUNCATE %s', name);
                UPDATE {ring} SET emptied = emptied + 1;
            END IF;
        EXCEPTION WHEN lock_not_available THEN
            UPDATE {sweep} SET rests_until = date_part('epoch', clock_timestamp()) + pause, written = mine;
            RETURN false;
        END;
        RETURN true;
    END IF;
    stays := ARRAY (
        SELECT record.ctid FROM {table} AS record
        WHERE slot = next AND {unexpired} AND record.ctid >= format('(%s,0)', done.page)::tid
          AND record.ctid < format('(%s,0)', done.page + pages)::tid
        LIMIT few + 1
    );
    IF cardinality(stays) > few THEN
        RETURN false;
    END IF;
    IF cardinality(stays) > 0 THEN
        WITH gone AS (
            DELETE FROM {table} AS record WHERE slot = next AND record.ctid = ANY (stays) AND {unexpired} RETURNING *
        )
        INSERT INTO {table}
        SELECT fence, id, now.slot, key, fingerprint, state, expires_at, lease_until, content FROM gone;
        GET DIAGNOSTICS moved = ROW_COUNT;
        IF moved < cardinality(stays) THEN -- somebody was at them
            RETURN true;
        END IF;
    END IF;
    UPDATE {sweep} SET file = done.file, page = done.page + pages, written = mine;
    RETURN true;
END $$;

-- Whoever calls them means the table that they were made with, whatever its own path leads to first.
DO $$
DECLARE
    home regnamespace := (SELECT relnamespace FROM pg_class WHERE oid = '{table}'::regclass);
BEGIN
    EXECUTE format(
        'ALTER FUNCTION {put}(uuid, text, bytea, integer, float8, float8, bytea, boolean) SET search_path = %s, pg_temp', home
    );
    EXECUTE format('ALTER FUNCTION {turn}(float8, bigint, bigint, float8) SET search_path = %s, pg_temp', home);
END $$;

COMMENT ON TABLE {table} IS 'effectonce schema 2, rotating: effects that happened, one row per key';

-- name: add
-- asked: id uuid, key text, print bytea, code integer, lease float8, keep float8, owner bytea
SELECT place, state,
       CASE WHEN fence IS NOT NULL THEN fence ELSE {put}(asked.id, asked.key, print, code, lease, keep, owner, {hurries}) END,
       lease_until, expires_at, fingerprint, content, date_part('epoch', clock_timestamp())
FROM {asked} LEFT JOIN {table} AS record ON record.id = asked.id AND {unexpired};

-- name: put
INSERT INTO {table}
SELECT micros, $1::uuid, {current}, $2::text, $3::bytea, $4::integer, until + $6::float8, until, $7::bytea
FROM (
    SELECT micros, micros / 1000000::float8 + $5::float8 AS until
    FROM (SELECT (date_part('epoch', clock_timestamp()) * 1000000)::bigint AS micros) AS clock
) AS times
WHERE NOT EXISTS (SELECT FROM {table} AS record WHERE record.id = $1::uuid AND {unexpired})
ON CONFLICT DO NOTHING RETURNING fence;

-- What is neither found nor added may have expired in the current slot. It is looked for only then.
-- name: add_many
-- asked: id uuid, key text, print bytea, code integer, lease float8, keep float8, owner bytea
WITH clock AS MATERIALIZED (
    SELECT (date_part('epoch', clock_timestamp()) * 1000000)::bigint AS micros, {current} AS slot WHERE {may_wait}
), known AS MATERIALIZED (
    SELECT asked.*, state, fence, lease_until, expires_at, fingerprint, content
    FROM {asked} LEFT JOIN {table} AS record ON record.id = asked.id AND {unexpired}
), added AS (
    INSERT INTO {table}
    SELECT micros + place, id, slot, key, print, code, (micros + place) / 1000000::float8 + lease + keep,
           (micros + place) / 1000000::float8 + lease, owner
    FROM known, clock WHERE fence IS NULL
    ON CONFLICT DO NOTHING
    RETURNING fence
), revived AS (
    UPDATE {table} AS record
    SET fence = micros + place, fingerprint = print, state = code, content = owner,
        expires_at = (micros + place) / 1000000::float8 + lease + keep,
        lease_until = (micros + place) / 1000000::float8 + lease
    FROM known, clock
    WHERE record.id = known.id AND record.slot = clock.slot AND known.fence IS NULL AND NOT {unexpired}
      AND (SELECT count(*) FROM added) < (SELECT count(*) FROM known WHERE fence IS NULL)
    RETURNING record.fence
)
SELECT place, state, fence, lease_until, expires_at, fingerprint, content, micros / 1000000::float8
FROM known, clock WHERE fence IS NOT NULL
UNION ALL
SELECT fence - micros, NULL, fence, NULL, NULL, NULL, NULL, NULL
FROM (SELECT fence FROM added UNION ALL SELECT fence FROM revived) AS new, clock;

-- Of two rows of a key, which there are after the clock was set back, the newer comes last and counts.
-- name: read
-- asked: id uuid
SELECT place, state, fence, lease_until, expires_at, fingerprint, content, date_part('epoch', clock_timestamp())
FROM {asked} JOIN {table} AS record ON record.id = asked.id AND {unexpired} ORDER BY fence;

-- name: watch
WITH marked AS (
    UPDATE {table} AS record SET state = state | 16, slot = {current}
    WHERE id = $1::uuid AND fence = $2::bigint AND state & 23 = 1 AND {unexpired}
    RETURNING id
)
SELECT id::text FROM marked
UNION ALL
SELECT id::text FROM {table} AS record WHERE id = $1::uuid AND fence = $2::bigint AND state & 23 = 17 AND {unexpired};

-- name: turn
SELECT {turn}($1::float8, $2::bigint, $3::bigint, $4::float8),
       date_part('epoch', clock_timestamp()) - (SELECT began FROM {ring});

-- The hand, in one slot.
-- name: purge
WITH span AS MATERIALIZED (
    SELECT $1::bigint % greatest(pages, 1) AS hand, pages
    FROM (
        SELECT pg_relation_size(format('%s%s"', '{slot}', $4::smallint)::regclass) / current_setting('block_size')::bigint
    ) AS size (pages)
), gone AS (
    DELETE FROM {table} WHERE slot = $4::smallint AND ctid = ANY (ARRAY (
        SELECT record.ctid FROM {table} AS record
        WHERE record.ctid >= (SELECT format('(%s,0)', hand)::tid FROM span)
          AND record.ctid < (SELECT format('(%s,0)', hand + $2::bigint)::tid FROM span)
          AND slot = $4::smallint AND NOT {unexpired}
        LIMIT $3::bigint FOR UPDATE SKIP LOCKED
    ))
    RETURNING 1
)
SELECT (SELECT count(*) FROM gone), hand, pages FROM span;

-- name: scan
SELECT key, state, fence, lease_until, expires_at, fingerprint, content FROM {table} AS record
WHERE key > $1::text AND ($2::integer IS NULL OR state & 7 = $2::integer) AND {unexpired} ORDER BY key LIMIT $3::bigint;

-- A row that has expired is not counted if its key has another since.
-- name: census
SELECT state & 7, count(*), count(*) FILTER (WHERE NOT {unexpired}),
       min(lease_until) - date_part('epoch', clock_timestamp())
FROM {table} AS record TABLESAMPLE SYSTEM ($1::float8)
WHERE {unexpired} OR NOT EXISTS (
    SELECT FROM {table} AS newer WHERE newer.id = record.id AND newer.fence > record.fence
)
GROUP BY state & 7;

-- name: size
SELECT sum(pg_total_relation_size(relid))::bigint,
       (sum(pg_relation_size(relid)) / current_setting('block_size')::bigint)::bigint
FROM pg_partition_tree('{table}');

-- What this role has no right to, but needs: what, and on which table.
-- name: forbidden
SELECT string_agg(what, ', ' ORDER BY place), name
FROM (
    SELECT '{table}' AS name, ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE'] AS rights
    UNION ALL SELECT unnest(ARRAY['{ring}', '{sweep}']), ARRAY['SELECT', 'UPDATE']
    UNION ALL SELECT unnest(ARRAY['{slot}0"', '{slot}1"', '{slot}2"']), ARRAY['TRUNCATE']
) AS needed, unnest(rights) WITH ORDINALITY AS needs (what, place)
WHERE NOT has_table_privilege(name, what)
GROUP BY name ORDER BY name;

-- name: rows
SELECT (SELECT count(*) FROM {ring}), (SELECT count(*) FROM {sweep});
