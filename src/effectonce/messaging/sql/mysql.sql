-- Named statements of the cursors on MySQL and MariaDB. What the columns mean is told in postgresql.sql. Names are bytes,
-- because 'a' and 'a ' are equal as texts.
-- name: schema
CREATE TABLE IF NOT EXISTS effectonce_cursors (
    consumer VARBINARY(1020) NOT NULL,
    source   VARBINARY(1020) NOT NULL,
    fence    BIGINT          NOT NULL,
    version  BIGINT          NOT NULL,
    low      BIGINT          NOT NULL,
    above    MEDIUMTEXT      CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    PRIMARY KEY (consumer, source)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;

-- name: take
INSERT INTO effectonce_cursors (consumer, source, fence, version, low, above) VALUES ($1, $2, 1, 1, 0, '')
ON DUPLICATE KEY UPDATE fence = fence + 1, version = version + 1;

-- name: lock
SELECT fence, version, low, above FROM effectonce_cursors WHERE consumer = $1 AND source = $2 FOR UPDATE;

-- name: move
UPDATE effectonce_cursors SET low = $4, above = $5, version = version + 1
WHERE consumer = $1 AND source = $2 AND version = $3;
