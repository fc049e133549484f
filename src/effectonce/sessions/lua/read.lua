-- Read a request. Argument: number.
local function step()
  return answer(1, redis.call('HGET', key, ARGV[at + 1]))
end
