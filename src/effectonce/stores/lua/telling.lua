-- The answer to a step is the clock if it could do its work, and otherwise, in seconds, the clock and when what is there
-- will be forgotten (never is infinite; -1 is for nothing), and what is there; or an error, if that can't be told. If all
-- could do their work, there is one answer for all.
local function tell(n, value)
  local last = call('PEXPIRETIME', KEYS[n])
  if type(last) == 'table' then
    if type(value) ~= 'table' then value = last end
  elseif type(value) ~= 'table' then
    local ends = last >= 0 and (last + 1) / 1000 or last == -1 and math.huge or -1
    value = pack('>dd', now / 1000000, ends) .. (value or '')
  end
  if not answers then
    answers = {}
    for other = 1, #KEYS do answers[other] = now end
  end
  answers[n] = value
end
