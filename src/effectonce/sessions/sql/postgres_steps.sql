-- What a session store says to PostgreSQL, one statement for each verb; every parameter is written with its type.

-- name: whose
SELECT obj_description(oid, 'pg_class') FROM pg_class WHERE oid = to_regclass($1::text);

-- Whoever changes a session has its row until the end of the statement. Who waited for it sees the mark as it is then, so
-- that no number below the mark is ever added; what else was there is seen as it was before, and looked at again.
-- name: claim
WITH clock AS MATERIALIZED (
    SELECT date_part('epoch', clock_timestamp()) AS now
), touched AS (
    UPDATE {sessions} SET low = greatest(low, $3::bigint),
        lease_until = greatest(lease_until, now + greatest(lease, $5::float8))
    FROM clock WHERE id = $1::text AND epoch = $4::bigint AND lease_until > now
    RETURNING low
), gone AS (
    DELETE FROM {requests} AS old USING touched, clock WHERE session = $1::text AND number < low
        AND NOT (state = 4 OR (state = 1 AND (once = 1 OR old.lease_until > now)))
), added AS (
    INSERT INTO {requests} (session, number, fence, state, attempts, once, lease_until, owner, fingerprint)
    SELECT $1::text, $2::bigint, 1, 1, 1, $6::integer, now + $5::float8, $7::bytea, $8::bytea
    FROM touched, clock WHERE $2::bigint >= low
    ON CONFLICT DO NOTHING RETURNING fence
)
SELECT now, touched.low, added.fence, own.epoch, own.low, own.lease, own.lease_until,
       known.state, known.owner, known.fence, fingerprint, known.lease_until, attempts, result, once
FROM clock LEFT JOIN touched ON true LEFT JOIN added ON true
LEFT JOIN {sessions} AS own ON own.id = $1::text AND touched.low IS NULL
LEFT JOIN {requests} AS known ON known.session = $1::text AND known.number = $2::bigint AND added.fence IS NULL;

-- name: finish
UPDATE {requests} SET state = $5::integer, owner = NULL, lease_until = NULL, result = $6::bytea
WHERE session = $1::text AND number = $2::bigint AND owner = $3::bytea AND fence = $4::bigint AND state = 1
RETURNING fence;

-- Only if the request still is the one that was read. The lease of its session is never shorter than its own.
-- name: swap
WITH swapped AS (
    UPDATE {requests} SET state = $7::integer, owner = $8::bytea, fence = $9::bigint, fingerprint = $10::bytea,
        lease_until = $11::float8, attempts = $12::integer, result = $13::bytea, once = $14::integer
    WHERE session = $1::text AND number = $2::bigint AND state = $3::integer AND fence = $4::bigint
      AND owner IS NOT DISTINCT FROM $5::bytea AND lease_until IS NOT DISTINCT FROM $6::float8
    RETURNING session
), held AS (
    UPDATE {sessions} SET lease_until = $11::float8 FROM swapped
    WHERE id = swapped.session AND lease_until < $11::float8
)
SELECT session FROM swapped;

-- name: read
SELECT date_part('epoch', clock_timestamp()), known.state, known.owner, known.fence, fingerprint, lease_until, attempts,
       result, once
FROM (VALUES (1)) AS one LEFT JOIN {requests} AS known ON session = $1::text AND number = $2::bigint;

-- name: open
WITH clock AS MATERIALIZED (
    SELECT date_part('epoch', clock_timestamp()) AS now
), gone AS (
    DELETE FROM {sessions} WHERE id IN (
        SELECT id FROM {sessions}, clock WHERE lease_until <= now AND id IN (
            SELECT id FROM {sessions} WHERE id > $1::text ORDER BY id LIMIT $3::bigint
        ) FOR UPDATE OF {sessions_alone} SKIP LOCKED
    ) RETURNING id
), emptied AS (
    DELETE FROM {requests} USING gone WHERE session = gone.id
), added AS (
    INSERT INTO {sessions} SELECT $1::text, 1, 1, $2::float8, now + $2::float8 FROM clock
    WHERE $2::float8 > 0 RETURNING epoch, low, lease, lease_until
)
SELECT now, epoch, low, lease, lease_until, (SELECT count(*) FROM gone) FROM clock LEFT JOIN added ON true;

-- Epoch 0 stands for any.
-- name: touch
WITH clock AS MATERIALIZED (
    SELECT date_part('epoch', clock_timestamp()) AS now
), touched AS (
    UPDATE {sessions} SET epoch = epoch + $4::bigint, low = greatest(low, $3::bigint),
        lease_until = greatest(lease_until, now + lease)
    FROM clock WHERE id = $1::text AND $2::bigint IN (epoch, 0) AND lease_until > now
    RETURNING epoch, low, lease, lease_until
), gone AS (
    DELETE FROM {requests} AS old USING touched, clock WHERE session = $1::text AND number < low
        AND NOT (state = 4 OR (state = 1 AND (once = 1 OR old.lease_until > now)))
)
SELECT now, touched.*, own.epoch, own.low, own.lease, own.lease_until
FROM clock LEFT JOIN touched ON true LEFT JOIN {sessions} AS own ON own.id = $1::text AND touched.low IS NULL;

-- name: end
WITH clock AS MATERIALIZED (
    SELECT date_part('epoch', clock_timestamp()) AS now
), ended AS (
    DELETE FROM {sessions} USING clock WHERE id = $1::text AND epoch = $2::bigint AND lease_until > now
    RETURNING epoch, low, lease, lease_until
), gone AS (
    DELETE FROM {requests} USING ended WHERE session = $1::text
)
SELECT now, ended.*, own.epoch, own.low, own.lease, own.lease_until
FROM clock LEFT JOIN ended ON true LEFT JOIN {sessions} AS own ON own.id = $1::text AND ended.low IS NULL;

-- name: census
SELECT state, count(*) FROM {requests} GROUP BY state;
