-- name: schema
-- A session's row is changed by every request, where it is: nothing in it is indexed but its id.
CREATE TABLE {sessions} (
    id          text    COLLATE "C" PRIMARY KEY,
    epoch       bigint  NOT NULL,
    low         bigint  NOT NULL,
    lease       float8  NOT NULL,
    lease_until float8  NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);

CREATE TABLE {requests} (
    session     text    COLLATE "C" NOT NULL,
    number      bigint  NOT NULL,
    fence       bigint  NOT NULL,
    state       integer NOT NULL,
    attempts    integer NOT NULL,
    once        integer NOT NULL,
    lease_until float8,
    owner       bytea,
    fingerprint bytea,
    result      bytea,
    PRIMARY KEY (session, number)
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.05);

COMMENT ON TABLE {requests} IS 'effectonce sessions 1: requests that their clients have not acknowledged'
