-- Put a pending record in place unless the key has one.
-- Arguments: its head and owner, what follows its times, lease, keep; one more if it never expires.
if value then return found() end
local lease_until = now / 1000000 + ARGV[3]
local expires_at = lease_until + ARGV[4]
local fence = math.floor(now / 1000)
value = ARGV[1] .. struct.pack('>I8dd', fence, lease_until, expires_at) .. ARGV[2]
if ARGV[5] then
  call('SET', key, value)
else
  call('SET', key, value, 'PXAT', math.floor(expires_at * 1000))
end
return now
