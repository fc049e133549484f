if answers then return #KEYS == 1 and answers[1] or answers end
return now
