-- What goes wrong with one session is the answer to that one, and to nobody else.
local answers, each = {}, #ARGV / #KEYS
for n = 1, #KEYS do
  key, at = KEYS[n], (n - 1) * each
  local is_done, said = pcall(step)
  answers[n] = is_done and said or redis.error_reply(type(said) == 'table' and said.err or said)
end
return #KEYS == 1 and answers[1] or answers
