-- What is said to a database, whichever it is. $1, $2 … are values; {latest} makes a read see what was committed last.

-- "advance" is an event's usual case: whoever has events parked goes the long way, so that nobody else has to look.

-- name: made
SELECT version FROM effectonce_updates WHERE name = $1{latest}

-- name: forget
DELETE FROM effectonce_updates WHERE name = $1

-- name: advance
UPDATE effectonce_positions SET version = $1 WHERE consumer = $2 AND entity = $3 AND version = $4 AND parked = 0

-- name: hold
UPDATE effectonce_positions SET version = version WHERE consumer = $1 AND entity = $2

-- name: position
SELECT version, parked FROM effectonce_positions WHERE consumer = $1 AND entity = $2{latest}

-- name: place
UPDATE effectonce_positions SET version = $1, parked = parked - $2 WHERE consumer = $3 AND entity = $4

-- name: count
UPDATE effectonce_positions SET parked = parked + 1 WHERE consumer = $1 AND entity = $2

-- name: waiting
SELECT version, event FROM effectonce_parked
WHERE consumer = $1 AND entity = $2 AND version > $3 AND version <= $4 ORDER BY version{latest}

-- name: unpark
DELETE FROM effectonce_parked WHERE consumer = $1 AND entity = $2 AND version <= $3

-- name: gaps
SELECT held.entity, held.version, MIN(parked.version), COUNT(*)
FROM effectonce_positions AS held
JOIN effectonce_parked AS parked ON parked.consumer = held.consumer AND parked.entity = held.entity
WHERE held.consumer = $1 GROUP BY held.entity, held.version ORDER BY held.entity
