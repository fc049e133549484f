-- What differs on MySQL and MariaDB. Names are bytes, so that neither case nor trailing blanks make two of them one.
-- IGNORE can hide nothing but the duplicate: every value is checked before.

-- name: remember
INSERT IGNORE INTO effectonce_updates (name, version) VALUES ($1, $2)

-- name: begin
INSERT IGNORE INTO effectonce_positions (consumer, entity, version) VALUES ($1, $2, $3)

-- name: park
INSERT IGNORE INTO effectonce_parked (consumer, entity, version, event) VALUES ($1, $2, $3, $4)

-- name: unique_index
SELECT index_name FROM information_schema.statistics
WHERE table_schema = COALESCE($1, DATABASE()) AND table_name = $2
GROUP BY index_name HAVING MAX(non_unique) = 0 AND COUNT(*) = 1 AND MAX(column_name) = $3

-- name: create_updates
CREATE TABLE IF NOT EXISTS effectonce_updates (
    name CHAR(64) CHARACTER SET ascii COLLATE ascii_bin PRIMARY KEY,
    version BIGINT NOT NULL,
    made_at TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP
) ENGINE = InnoDB

-- name: create_positions
CREATE TABLE IF NOT EXISTS effectonce_positions (
    consumer VARBINARY(1020) NOT NULL,
    entity VARBINARY(1020) NOT NULL,
    version BIGINT NOT NULL,
    parked BIGINT NOT NULL DEFAULT 0,
    PRIMARY KEY (consumer, entity)
) ENGINE = InnoDB

-- name: create_parked
CREATE TABLE IF NOT EXISTS effectonce_parked (
    consumer VARBINARY(1020) NOT NULL,
    entity VARBINARY(1020) NOT NULL,
    version BIGINT NOT NULL,
    event LONGBLOB NOT NULL,
    PRIMARY KEY (consumer, entity, version)
) ENGINE = InnoDB
