-- Event order on SQLite.

-- name: begin
INSERT INTO effectonce_positions (consumer, entity, version) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING

-- name: park
INSERT INTO effectonce_parked (consumer, entity, version, event) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING

-- name: create_positions
CREATE TABLE IF NOT EXISTS effectonce_positions (
    consumer TEXT NOT NULL,
    entity TEXT NOT NULL,
    version INTEGER NOT NULL,
    parked INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (consumer, entity)
) WITHOUT ROWID

-- name: create_parked
CREATE TABLE IF NOT EXISTS effectonce_parked (
    consumer TEXT NOT NULL,
    entity TEXT NOT NULL,
    version INTEGER NOT NULL,
    event BLOB NOT NULL,
    PRIMARY KEY (consumer, entity, version)
)
