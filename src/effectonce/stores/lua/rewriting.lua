-- Whatever is told is written once more as it is: only after a write of one's own can one wait for replicas, and they must
-- have what is told. What can't be written is not told.
local tell_unwritten = tell
local function tell(n, value)
  if type(value) == 'string' then
    local written = call('APPEND', KEYS[n], '')
    if type(written) == 'table' then value = written end
  end
  tell_unwritten(n, value)
end
