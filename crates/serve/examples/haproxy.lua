-- Asks tollgate-serve for each request: haproxy.cfg says what becomes of the answer.

local URL = "http://127.0.0.1:8080/v1/forward-auth"

-- In milliseconds, of each try: HAProxy's client makes up to four.
local TIMEOUT = 60

local FIELDS = { limit = "ratelimit", policy = "ratelimit-policy", wait = "retry-after" }

-- Sets txn.tollgate_status to the answer's status, 0 without one, and txn.tollgate_NAME to its fields.
core.register_action("tollgate", { "http-req" }, function(txn)
    -- Only what is set here is sent: none of the client's own fields.
    local answer = core.httpclient():get({
        url = URL,
        timeout = TIMEOUT,
        headers = {
            ["x-forwarded-method"] = { txn.f:method() },
            ["x-forwarded-uri"] = { txn.f:url() },
            ["x-forwarded-for"] = { txn.f:src() },
        },
    })
    txn:set_var("txn.tollgate_status", answer and answer.status or 0)
    for name, field in pairs(FIELDS) do
        local values = answer and answer.headers and answer.headers[field]
        -- Counted from 0.
        if values then
            txn:set_var("txn.tollgate_" .. name, values[0])
        end
    end
end, 0)
