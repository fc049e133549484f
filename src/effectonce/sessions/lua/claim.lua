-- Arguments: number, low, epoch, lease, once, owner, fingerprint.
local both = redis.call('HMGET', key, 's', ARGV[1])
local session, mark = contact(both[1], tonumber(ARGV[3]), tonumber(ARGV[2]), tonumber(ARGV[4]))
if not session then return answer(2, both[1]) end
if tonumber(ARGV[1]) < mark then return answer(3, struct.pack('>d', mark)) end
if both[2] then return answer(1, both[2]) end
local start = struct.pack('>BBI4I4dBHB', 1, ARGV[5], 1, 1, now + ARGV[4], #ARGV[6], #ARGV[7], 0)
redis.call('HSET', key, ARGV[1], start .. ARGV[6] .. ARGV[7])
return answer(0)
