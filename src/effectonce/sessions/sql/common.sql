-- Named statements of sessions in SQL databases. `-- name:` begins each.
--
-- {sessions} and {requests} are the tables, {clock} the server's clock in seconds, {lock} what keeps everybody else from a
-- row that is read. {current} reads a row as it is now, where a transaction would otherwise see it as it was. A session is
-- one row, and so is a request that is not acknowledged yet.

-- name: session
SELECT epoch, low, lease, lease_until, {clock} FROM {sessions} WHERE id = $1 {lock};

-- name: clock
SELECT {clock};

-- name: request
SELECT state, owner, fence, fingerprint, lease_until, attempts, result, once
FROM {requests} WHERE session = $1 AND number = $2 {current};

-- name: new_session
INSERT INTO {sessions} (id, epoch, low, lease, lease_until) VALUES ($1, $2, $3, $4, $5);

-- name: change_session
UPDATE {sessions} SET epoch = $2, low = $3, lease = $4, lease_until = $5 WHERE id = $1;

-- What has ended below the mark: neither a doubt (4) nor what runs (1), unless its lease is over and it may be repeated.
-- name: drop_below
DELETE FROM {requests} WHERE session = $1 AND number < $2
    AND NOT (state = 4 OR (state = 1 AND (once = 1 OR lease_until > $3)));

-- name: new_request
INSERT INTO {requests} (session, number, state, owner, fence, fingerprint, lease_until, attempts, result, once)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10);

-- name: change_request
UPDATE {requests} SET state = $3, owner = $4, fence = $5, fingerprint = $6, lease_until = $7, attempts = $8,
    result = $9, once = $10 WHERE session = $1 AND number = $2;

-- name: drop_request
DELETE FROM {requests} WHERE session = $1 AND number = $2;

-- name: drop_session
DELETE FROM {sessions} WHERE id = $1;

-- name: drop_requests
DELETE FROM {requests} WHERE session = $1;

-- Ids are hashes: the sessions that follow any one of them are as good as chosen by lot.
-- name: neighbours
SELECT id FROM (SELECT id, lease_until FROM {sessions} WHERE id > $1 ORDER BY id LIMIT $2) AS some
WHERE lease_until <= $3;

-- name: collect
DELETE FROM {sessions} WHERE id = $1 AND lease_until <= $2;

-- name: census
SELECT state, count(*) FROM {requests} GROUP BY state;
