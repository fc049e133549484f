-- What a step tells that could not do its work: what is there, its last millisecond, and the clock. It is written once more
-- as it is: only after a write of one's own can one wait for replicas, and they must have what is told.
local function found()
  if value then call('APPEND', key, '') end
  return {value, call('PEXPIRETIME', key), now}
end
