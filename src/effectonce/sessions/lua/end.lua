-- End a request that is held. Arguments: number, owner, fence, state, whether there is a result, result.
local function step()
  local both = redis.call('HMGET', key, 's', ARGV[at + 1])
  local value = both[2]
  if not value then return answer(1) end
  local state, once, attempts, fence, _, size, print_size = struct.unpack('>BBI4I4dBHB', value)
  if state ~= 1 or fence ~= tonumber(ARGV[at + 3]) or string.sub(value, 23, 22 + size) ~= ARGV[at + 2] then return answer(1, value) end
  local _, mark = struct.unpack('>dd', both[1])
  if tonumber(ARGV[at + 1]) < mark then
    redis.call('HDEL', key, ARGV[at + 1])
  else
    local start = struct.pack('>BBI4I4dBHB', ARGV[at + 4], once, attempts, fence, 0, 0, print_size, ARGV[at + 5])
    redis.call('HSET', key, ARGV[at + 1], start .. string.sub(value, 23 + size, 22 + size + print_size) .. ARGV[at + 6])
  end
  return answer(0)
end
