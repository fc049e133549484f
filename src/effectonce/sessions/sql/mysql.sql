-- name: schema
CREATE TABLE IF NOT EXISTS {sessions} (
    id          CHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL PRIMARY KEY,
    epoch       BIGINT NOT NULL,
    low         BIGINT NOT NULL,
    lease       DOUBLE NOT NULL,
    lease_until DOUBLE NOT NULL
) ENGINE = InnoDB COMMENT = 'effectonce sessions 1: one row per client';

CREATE TABLE IF NOT EXISTS {requests} (
    session     CHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    number      BIGINT NOT NULL,
    state       TINYINT UNSIGNED NOT NULL,
    once        TINYINT UNSIGNED NOT NULL,
    attempts    INT UNSIGNED NOT NULL,
    fence       BIGINT NOT NULL,
    lease_until DOUBLE,
    owner       VARBINARY(255),
    fingerprint VARBINARY(255),
    result      LONGBLOB,
    PRIMARY KEY (session, number)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC COMMENT = 'effectonce sessions 1: requests that their clients have not acknowledged';
