-- Named statements of the cursors on PostgreSQL.
--
--   consumer, source   who has come how far in what: a partition, a stream
--   fence              grows whenever somebody begins with the source; whoever was at it before is refused by that
--   version            grows with every change: a move names the one that it was made from
--   low, above         what is done: all below low, and what above says
--
-- A move changes no column that an index knows of, and pages are filled by half, so that rows stay where they are.
-- name: schema
CREATE TABLE IF NOT EXISTS effectonce_cursors (
    consumer text   COLLATE "C" NOT NULL,
    source   text   COLLATE "C" NOT NULL,
    fence    bigint NOT NULL,
    version  bigint NOT NULL,
    low      bigint NOT NULL,
    above    text   NOT NULL,
    PRIMARY KEY (consumer, source)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);

-- name: take
INSERT INTO effectonce_cursors AS mine (consumer, source, fence, version, low, above) VALUES ($1, $2, 1, 1, 0, '')
ON CONFLICT (consumer, source) DO UPDATE SET fence = mine.fence + 1, version = mine.version + 1;

-- name: lock
SELECT fence, version, low, above FROM effectonce_cursors WHERE consumer = $1 AND source = $2 FOR UPDATE;

-- name: move
UPDATE effectonce_cursors SET low = $4, above = $5, version = version + 1
WHERE consumer = $1 AND source = $2 AND version = $3;
