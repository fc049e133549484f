-- Write a request if it still is the one that was read. Arguments: number, the one that was read, the one to write.
local function step()
  local both = redis.call('HMGET', key, 's', ARGV[at + 1])
  if not both[1] or both[2] ~= ARGV[at + 2] then return answer(1) end
  local epoch, mark, lease, lease_until = struct.unpack('>dddd', both[1])
  if tonumber(ARGV[at + 1]) < mark and not stays(ARGV[at + 3]) then
    redis.call('HDEL', key, ARGV[at + 1])
  else
    redis.call('HSET', key, ARGV[at + 1], ARGV[at + 3])
  end
  if string.byte(ARGV[at + 3]) == 1 then write(epoch, mark, lease, math.max(lease_until, (struct.unpack('>d', ARGV[at + 3], 11)))) end
  return answer(0)
end
