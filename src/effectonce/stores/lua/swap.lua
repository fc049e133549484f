-- Write a record if the one that is there is the one that was read; that somebody waits for its end does not count.
-- Arguments: the one that was read, the one to write, and its last millisecond, if it has one.
local watched = value and string.byte(value) == 165
if watched then value = '\164' .. string.sub(value, 2) end
if value ~= ARGV[1] then return 0 end
if ARGV[3] then
  call('SET', key, ARGV[2], 'PXAT', ARGV[3])
else
  call('SET', key, ARGV[2])
end
if watched then redis.pcall('PUBLISH', key, '') end
return 1
