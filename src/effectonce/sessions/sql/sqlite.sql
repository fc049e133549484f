-- name: schema
CREATE TABLE IF NOT EXISTS {sessions} (
    id          TEXT PRIMARY KEY NOT NULL,
    epoch       INTEGER NOT NULL,
    low         INTEGER NOT NULL,
    lease       REAL NOT NULL,
    lease_until REAL NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS {requests} (
    session     TEXT NOT NULL,
    number      INTEGER NOT NULL,
    state       INTEGER NOT NULL,
    fence       INTEGER NOT NULL,
    attempts    INTEGER NOT NULL,
    once        INTEGER NOT NULL,
    lease_until REAL,
    owner       BLOB,
    fingerprint BLOB,
    result      BLOB,
    PRIMARY KEY (session, number)
) STRICT, WITHOUT ROWID;
