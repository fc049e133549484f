-- For steps on records that must be pending, under the fence and held by the owner that their holder names.
-- Gives what is there, and its head if it is held.
local function held(key, holder)
  local value = call('GET', key)
  if type(value) == 'string' and sub(value, 25, 24 + #holder) == holder then
    local head = byte(value)
    if head == 164 or head == 165 then return value, head end
  end
  return value
end

-- Where the journal begins in a record that is held, or would begin: after owner and fingerprint.
local function journal_of(value, holder)
  local high, low = byte(value, 23, 24)
  return 25 + #holder + high * 256 + low
end

-- The last millisecond of a record that expires after so many. No record is forgotten before the clock has passed its
-- fence, because the fence of the next one comes from the clock.
local common
local function last(milliseconds, holder)
  local fence = struct.unpack('>I8', holder)
  if fence > milliseconds then return string.format('%d', fence) end
  common = common or string.format('%d', milliseconds)
  return common
end
