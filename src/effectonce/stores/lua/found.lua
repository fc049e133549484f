-- What a step tells that could not do its work: what is there, its last millisecond, and the clock.
local function found() return {value, call('PEXPIRETIME', key), now} end
