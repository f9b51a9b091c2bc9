-- Posts the bodies of a folder in turn, and prints what wrk counted as one line of JSON.
-- wrk ... -s post.lua URL -- FOLDER COUNT MEDIA_TYPE

function init(args)
  -- The requests are written out once: wrk copies them into its sockets and does nothing else while it measures.
  requests = {}
  for number = 0, tonumber(args[2]) - 1 do
    local file = assert(io.open(args[1] .. "/" .. number, "rb"))
    local headers = { ["Content-Type"] = args[3] }
    requests[number + 1] = wrk.format("POST", nil, headers, file:read("*a"))
    file:close()
  end
  turn = 0
end

function request()
  turn = turn % #requests + 1
  return requests[turn]
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    '\nfigures {"requests": %d, "duration_us": %d, "p50_us": %d, "p90_us": %d, "p99_us": %d, "max_us": %d, '
      .. '"connect": %d, "read": %d, "write": %d, "status": %d, "timeout": %d}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(90), latency:percentile(99),
    latency.max, errors.connect, errors.read, errors.write, errors.status, errors.timeout
  ))
end
