-- End records that are held, unless they have a journal and would have no answer: a journal must not get lost.
-- Arguments: keep, the heads of ended records (in full; plain and bare, if these can be); then for each its holder, and
-- its fence in five bytes with the result.
local expires_at, heads = now / 1000000 + ARGV[1], ARGV[2]
local stays = byte(heads) == 176 or byte(heads) == 178 -- what is in doubt
local unanswered = stays or byte(heads) == 160 or byte(heads) == 162
for n = 1, #KEYS do
  local key, holder, rest = KEYS[n], ARGV[2 * n + 1], ARGV[2 * n + 2]
  local value, head = held(key, holder)
  local journal = head and journal_of(value, holder)
  if head and not (unanswered and journal <= #value) then
    -- These traits are: not once, the first attempt, a fingerprint of sixteen bytes or none.
    local traits, fingerprint, form = sub(value, 18, 24), sub(value, 25 + #holder, journal - 1), ''
    if traits == '\0\0\0\0\1\0\16' then
      form = sub(heads, 2, 2)
    elseif traits == '\0\0\0\0\1\0\0' then
      form = sub(heads, 3, 3)
    end
    if form ~= '' then
      value = form .. fingerprint .. rest
    else
      local fence, result = sub(holder, 1, 8), sub(rest, 6)
      value = sub(heads, 1, 1) .. fence .. pack('>d', expires_at) .. traits .. fingerprint .. result
    end
    if stays then
      value = call('SET', key, value)
    else
      value = call('SET', key, value, 'PXAT', last(expires_at * 1000, holder))
    end
    if head == 165 and value.ok then call('PUBLISH', key, '') end
  end
  if type(value) ~= 'table' or value.err then tell(n, value) end
end
