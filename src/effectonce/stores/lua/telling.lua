-- The answer to a step is the clock if it could do its work, and otherwise the clock, the last millisecond of what is
-- there, and what is there; or an error, if that can't be told. If all could do their work, there is one answer for all.
local function tell(n, value)
  local last = call('PEXPIRETIME', KEYS[n])
  if type(value) ~= 'table' then
    value = type(last) == 'table' and last or pack('>dd', now, last) .. (value or '')
  end
  if not answers then
    answers = {}
    for other = 1, #KEYS do answers[other] = now end
  end
  answers[n] = value
end
