-- Arguments: number, low, epoch, lease, once, owner, fingerprint.
local function step()
  local both = redis.call('HMGET', key, 's', ARGV[at + 1])
  local session, mark = contact(both[1], tonumber(ARGV[at + 3]), tonumber(ARGV[at + 2]), tonumber(ARGV[at + 4]))
  if not session then return answer(2, both[1]) end
  if tonumber(ARGV[at + 1]) < mark then return answer(3, struct.pack('>d', mark)) end
  if both[2] then return answer(1, both[2]) end
  local start = struct.pack('>BBI4I4dBHB', 1, ARGV[at + 5], 1, 1, now + ARGV[at + 4], #ARGV[at + 6], #ARGV[at + 7], 0)
  redis.call('HSET', key, ARGV[at + 1], start .. ARGV[at + 6] .. ARGV[at + 7])
  return answer(0)
end
