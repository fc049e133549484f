-- For steps on a record that must be pending, held by the owner and under the fence that the first argument names.
local holder = ARGV[1]
local head = value and string.sub(value, 2, #holder + 1) == holder and string.byte(value)
if head ~= 164 and head ~= 165 then return found() end

-- The last millisecond of a record. No record is forgotten before the clock has passed its fence, because the fence of
-- the next one comes from the clock.
local function last(expires_at)
  local fence = struct.unpack('>I8', holder, #holder - 7)
  return math.max(math.floor(expires_at * 1000), fence)
end
