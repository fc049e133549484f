-- Renew records that are held.
-- Arguments: lease, keep; then for each its holder.
local lease_until = now / 1000000 + ARGV[1]
local expires_at = lease_until + ARGV[2]
for n = 1, #KEYS do
  local key, holder = KEYS[n], ARGV[n + 2]
  local value, head = held(key, holder)
  if head then
    value = call('SETRANGE', key, '1', pack('>dd', lease_until, expires_at))
    call('PEXPIREAT', key, last(expires_at * 1000, holder), 'XX')
  end
  if type(value) ~= 'number' then tell(n, value) end
end
