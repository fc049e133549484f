-- End a record that is held.
-- Arguments: its holder, the beginning of the plain form ('' if there can't be one), the head of the other form, the
-- result, keep; one more if it never expires.
local expires_at = now / 1000000 + ARGV[5]
local at = #holder + 18 -- where the traits are; these are not once, the first attempt, a fingerprint of 16 bytes:
if ARGV[2] ~= '' and string.sub(value, at, at + 6) == '\0\0\0\0\1\0\16' then
  value = ARGV[2] .. string.sub(value, at + 7) .. ARGV[4]
else
  local fence = string.sub(holder, -8)
  value = ARGV[3] .. fence .. struct.pack('>d', expires_at) .. string.sub(value, at) .. ARGV[4]
end
if ARGV[6] then
  call('SET', key, value)
else
  call('SET', key, value, 'PXAT', last(expires_at))
end
if head == 165 then redis.pcall('PUBLISH', key, '') end
return 1
