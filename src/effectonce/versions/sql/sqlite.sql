-- What differs on SQLite.

-- name: remember
INSERT INTO effectonce_updates (name, version) VALUES ($1, $2) ON CONFLICT DO NOTHING

-- name: begin
INSERT INTO effectonce_positions (consumer, entity, version) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING

-- name: park
INSERT INTO effectonce_parked (consumer, entity, version, event) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING

-- name: create_updates
CREATE TABLE IF NOT EXISTS effectonce_updates (
    name TEXT PRIMARY KEY,
    version INTEGER NOT NULL,
    made_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
) WITHOUT ROWID

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
