-- What a client wants of its session. Arguments: kind, epoch, low, lease.
local function step()
  local kind, epoch, low = ARGV[at + 1], tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  if kind == 'open' then return answer(0, write(1, 1, tonumber(ARGV[at + 4]), now + ARGV[at + 4])) end
  local session = redis.call('HGET', key, 's')
  if kind == 'resume' and session then epoch, low = struct.unpack('>dd', session) end
  local after = contact(session, epoch, low, 0)
  if not after then return answer(2, session) end
  if kind == 'resume' then
    local own, mark, lease, lease_until = struct.unpack('>dddd', after)
    after = write(own + 1, mark, lease, lease_until)
  elseif kind == 'end' then
    redis.call('DEL', key)
  end
  return answer(0, after)
end
