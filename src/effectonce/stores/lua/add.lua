-- Put pending records in place where keys have none.
-- Arguments: lease, keep, traits; then for each its owner and fingerprint.
local start, last
for n = 1, #KEYS do
  local key = KEYS[n]
  local value = call('GET', key)
  if not value then
    if not start then
      local lease_until = now / 1000000 + ARGV[1]
      local expires_at = lease_until + ARGV[2]
      start = '\164' .. pack('>dd', lease_until, expires_at) .. ARGV[3] .. pack('>I8', math.floor(now / 1000))
      last = byte(ARGV[3]) == 0 and string.format('%d', expires_at * 1000) -- what happens at most once does not expire
    end
    local written
    if last then
      written = call('SET', key, start .. ARGV[n + 3], 'PXAT', last)
    else
      written = call('SET', key, start .. ARGV[n + 3])
    end
    if written.err then value = written end
  end
  if value then tell(n, value) end
end
