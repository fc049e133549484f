-- Write records where those that are there are those that were read; that somebody waits for their end does not count.
-- Arguments: for each the one that was read, the one to write, and its last millisecond, or nothing if it has none.
for n = 1, #KEYS do
  local key, before, after, last = KEYS[n], ARGV[3 * n - 2], ARGV[3 * n - 1], ARGV[3 * n]
  local value = call('GET', key)
  local watched = type(value) == 'string' and byte(value) == 165
  if (watched and '\164' .. sub(value, 2) or value) == before then
    if last ~= '' then
      value = call('SET', key, after, 'PXAT', last)
    else
      value = call('SET', key, after)
    end
    if watched and value.ok then call('PUBLISH', key, '') end
  end
  if type(value) ~= 'table' or value.err then tell(n, value) end
end
