-- What differs on PostgreSQL.

-- name: remember
INSERT INTO effectonce_updates (name, version) VALUES ($1, $2) ON CONFLICT DO NOTHING

-- name: begin
INSERT INTO effectonce_positions (consumer, entity, version) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING

-- name: park
INSERT INTO effectonce_parked (consumer, entity, version, event) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING

-- name: create_updates
CREATE TABLE IF NOT EXISTS effectonce_updates (
    name text COLLATE "C" PRIMARY KEY,
    version bigint NOT NULL,
    made_at timestamptz NOT NULL DEFAULT now()
)

-- name: create_positions
CREATE TABLE IF NOT EXISTS effectonce_positions (
    consumer text COLLATE "C" NOT NULL,
    entity text COLLATE "C" NOT NULL,
    version bigint NOT NULL,
    parked bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (consumer, entity)
) WITH (fillfactor = 80)

-- name: create_parked
CREATE TABLE IF NOT EXISTS effectonce_parked (
    consumer text COLLATE "C" NOT NULL,
    entity text COLLATE "C" NOT NULL,
    version bigint NOT NULL,
    event bytea NOT NULL,
    PRIMARY KEY (consumer, entity, version)
)
