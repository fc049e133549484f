-- Every script about sessions begins so, says in step() what to do with one, and does it with each. `key` is a hash: the session itself under 's' (epoch, low, lease, lease_until),
-- each request under its number (state, once, attempts, fence, lease_until, sizes; owner, fingerprint, result), and under
-- 'p' the numbers below the mark that could not leave with it, because they ran or were in doubt.
-- An answer is a code and the clock: 0 done, 1 what is there, 2 no such session, or another epoch's, 3 below the mark.
-- The arguments of each session's step stand together: ARGV[at + 1] is the first.
local key, at
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000

local function answer(code, data)
  return struct.pack('>Bd', code, now) .. (data or '')
end

-- Whether a request stays when the mark passes it: a doubt does, and what runs or may not be repeated.
local function stays(value)
  local state, once = string.byte(value, 1, 2)
  return state == 4 or (state == 1 and (once == 1 or struct.unpack('>d', value, 11) > now))
end

local function drop_below(mark, low)
  local numbers, kept = {}, {}
  if low - mark <= redis.call('HLEN', key) then
    for number in string.gmatch(redis.call('HGET', key, 'p') or '', '%d+') do numbers[#numbers + 1] = number end
    for number = mark, low - 1 do numbers[#numbers + 1] = string.format('%.0f', number) end
  else
    for _, field in ipairs(redis.call('HKEYS', key)) do
      local number = tonumber(field)
      if number and number < low then numbers[#numbers + 1] = field end
    end
  end
  for _, number in ipairs(numbers) do
    local value = redis.call('HGET', key, number)
    if value and stays(value) then
      kept[#kept + 1] = number
    elseif value then
      redis.call('HDEL', key, number)
    end
  end
  if #kept > 0 then redis.call('HSET', key, 'p', table.concat(kept, ' ')) else redis.call('HDEL', key, 'p') end
end

local function write(epoch, low, lease, lease_until)
  local session = struct.pack('>dddd', epoch, low, lease, lease_until)
  redis.call('HSET', key, 's', session)
  redis.call('PEXPIREAT', key, string.format('%.0f', math.ceil(lease_until * 1000)))
  return session
end

-- A valid contact renews the lease and moves the mark: gives the session and its mark, or nothing if it is not valid.
local function contact(session, epoch, low, hold)
  if not session then return nil end
  local own, mark, lease, lease_until = struct.unpack('>dddd', session)
  if lease_until <= now or own ~= epoch then return nil end
  if low > mark then
    drop_below(mark, low)
    mark = low
  end
  return write(own, mark, lease, math.max(lease_until, now + math.max(lease, hold))), mark
end
