"""Lua scripts: operations that a Redis server does in one step.

Keys, all under the prefix: `process:ID` is a URL and lives for `heartbeat_ttl_s`; `run:CALL` (a hash), `tokens:CALL` (the body)
and `place:PLACE` (the ids of its calls) live for `log_s` from the last write. Of a log that was taken and is over, owner and
epoch in `run:CALL` are left. The server must be one, not a cluster of shards.
"""

WRITE = """
local p, me, url, alive, keep = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
redis.call('SET', p .. 'process:' .. me, url, 'PX', alive)
local time, out = redis.call('TIME'), {}
for i = 6, #ARGV, 8 do
  local call, place, epoch, over, at, head, state, body = unpack(ARGV, i, i + 7)
  local run, tokens, here = p .. 'run:' .. call, p .. 'tokens:' .. call, p .. 'place:' .. place
  local known = redis.call('HMGET', run, 'owner', 'epoch')
  local outcome = 'written'
  if known[1] and (known[1] ~= me or known[2] ~= epoch) then
    outcome = 'taken'
  elseif over == '1' then
    redis.call('DEL', run, tokens)
    redis.call('SREM', here, call)
    if tonumber(epoch) > 1 then
      redis.call('HSET', run, 'owner', me, 'epoch', epoch)
      redis.call('PEXPIRE', run, keep)
    end
  elseif head == '' and (not known[1] or redis.call('STRLEN', tokens) < tonumber(at)) then
    outcome = 'gone'
  else
    if head ~= '' then
      redis.call('SET', tokens, body)
      redis.call('HSET', run, 'owner', me, 'epoch', epoch, 'place', place, 'head', head)
    elseif body ~= '' then
      redis.call('SETRANGE', tokens, at, body)
    end
    redis.call('HSET', run, 'state', state, 'seconds', time[1], 'micros', time[2])
    redis.call('SADD', here, call)
    for _, key in ipairs({run, tokens, here}) do redis.call('PEXPIRE', key, keep) end
  end
  out[#out + 1] = outcome
end
return out
"""

FIND = """
local p, place, out = ARGV[1], ARGV[2], {}
local time = redis.call('TIME')
for _, call in ipairs(redis.call('SMEMBERS', p .. 'place:' .. place)) do
  local h = redis.call('HMGET', p .. 'run:' .. call, 'owner', 'epoch', 'head', 'state', 'seconds', 'micros')
  if h[3] then
    local url = redis.call('GET', p .. 'process:' .. h[1])
    local age = (time[1] - h[5]) * 1000000 + time[2] - h[6]
    local body = redis.call('GET', p .. 'tokens:' .. call) or ''
    out[#out + 1] = {call, h[1], h[2], url and 1 or 0, url or '', h[3], h[4], body, string.format('%.0f', age)}
  end
end
return out
"""

CLAIM = """
local p, me, url, alive, keep, call, owner, epoch = unpack(ARGV)
local run = p .. 'run:' .. call
local known = redis.call('HMGET', run, 'owner', 'epoch', 'place')
local same = known[1] == owner and known[2] == epoch and known[3]
if not same or redis.call('EXISTS', p .. 'process:' .. owner) == 1 then
  return 0
end
local time = redis.call('TIME')
redis.call('SET', p .. 'process:' .. me, url, 'PX', alive)
redis.call('HSET', run, 'owner', me, 'epoch', epoch + 1, 'seconds', time[1], 'micros', time[2])
for _, key in ipairs({run, p .. 'tokens:' .. call, p .. 'place:' .. known[3]}) do redis.call('PEXPIRE', key, keep) end
return 1
"""
