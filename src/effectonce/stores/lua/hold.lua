-- Renew a record that is held.
-- Arguments: its holder, lease, keep.
local lease_until = now / 1000000 + ARGV[2]
local expires_at = lease_until + ARGV[3]
call('SETRANGE', key, #holder + 1, struct.pack('>dd', lease_until, expires_at))
call('PEXPIREAT', key, last(expires_at), 'XX')
return 1
