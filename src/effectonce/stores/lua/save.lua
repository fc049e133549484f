-- Renew records that are held, and write their journals, if those that are there are shorter.
-- Arguments: lease, keep; then for each its holder and its journal.
local lease_until = now / 1000000 + ARGV[1]
local expires_at = lease_until + ARGV[2]
for n = 1, #KEYS do
  local key, holder, journal = KEYS[n], ARGV[2 * n + 1], ARGV[2 * n + 2]
  local value, head = held(key, holder)
  local start = head and journal_of(value, holder)
  if head and #value - start + 1 < #journal then
    value = call('SETRANGE', key, start - 1, journal) -- it covers all of the one that was there
    if type(value) == 'number' then
      call('SETRANGE', key, '1', pack('>dd', lease_until, expires_at))
      call('PEXPIREAT', key, last(expires_at * 1000, holder), 'XX')
    end
  end
  if type(value) ~= 'number' then tell(n, value) end
end
