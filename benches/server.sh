#!/usr/bin/env bash
# Server time of each script, as INFO commandstats counts it, x that of an EVALSHA of `return {1,2,3,4}` with one key and
# five arguments: allowed and denied, in turn, the median of some rounds; and bytes per key. Starts a redis-server of its
# own on a unix socket, and stops it.
#
#   bash benches/server.sh [ROUNDS]        three unless said; needs redis-server, redis-cli and redis-benchmark
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-3}

directory=$(mktemp -d)
redis-server --port 0 --unixsocket "$directory/redis.sock" --dir "$directory" --save '' --daemonize yes \
    --logfile "$directory/log" --pidfile "$directory/pid" >/dev/null
trap 'kill "$(cat "$directory/pid")"; rm -rf "$directory"' EXIT
redis() { redis-cli -s "$directory/redis.sock" "$@"; }
until redis ping >/dev/null 2>&1; do sleep 0.05; done

# Microseconds per call of a script's text, over 10,000 keys.
microseconds() {
    local digest
    digest=$(redis script load "$1")
    shift
    redis config resetstat >/dev/null
    redis-benchmark -s "$directory/redis.sock" -n 100000 -P 16 -c 4 -r 10000 -q EVALSHA "$digest" 1 key:__rand_int__ "$@" >/dev/null
    redis info commandstats | tr -d '\r' | sed -n 's/^cmdstat_evalsha:.*usec_per_call=\([0-9.]*\).*/\1/p'
}

# Name, arguments that always allow, arguments that deny from the second call on.
hour=3600000000
rows=(
    "token_bucket|1000000 1000000 1 1 0|1 1 $hour 1 0"
    "gcra|1000000 1000000 1 1 0|1 1 $hour 1 0"
    "fixed_window|1000000 1000000 $hour 0 0|1 1 $hour 0 0"
    "sliding_window_counter|1000000 $hour 1|1 $hour 1"
    "sliding_window_log|10 10000|1 $hour"
    "concurrency|1000 10000 holder:__rand_int__|1 $hour holder:__rand_int__"
)

for _ in $(seq "$rounds"); do
    floor=$(microseconds 'return {1,2,3,4}' a b c d e)
    for row in "${rows[@]}"; do
        IFS='|' read -r name allow deny <<<"$row"
        text=$(cat "lua/$name.lua")
        redis flushall >/dev/null
        # shellcheck disable=SC2086
        echo "$name allowed $(microseconds "$text" $allow 1 acquire -1) $floor"
        bytes=$(redis memory usage "$(redis randomkey)")
        redis flushall >/dev/null
        # shellcheck disable=SC2086
        microseconds "$text" $deny 1 acquire -1 >/dev/null
        # shellcheck disable=SC2086
        echo "$name denied $(microseconds "$text" $deny 1 acquire -1) $floor $bytes"
    done
done | sort | awk '
    function report() {
        printf "%-24s %-8s %6.2f us  %5.2f x no-op", name, verdict, us[int((n + 1) / 2)], ratio[int((n + 1) / 2)]
        if (bytes) printf "  %d bytes per key", bytes
        print ""
    }
    {
        if (n && (name != $1 || verdict != $2)) { asort_insert(); report(); n = 0; bytes = 0 }
        name = $1; verdict = $2; n++; us[n] = $3; ratio[n] = $3 / $4; if ($5) bytes = $5
    }
    END { asort_insert(); report() }
    function asort_insert(    i, j, t) {
        for (i = 2; i <= n; i++) for (j = i; j > 1; j--) {
            if (us[j] < us[j - 1]) { t = us[j]; us[j] = us[j - 1]; us[j - 1] = t }
            if (ratio[j] < ratio[j - 1]) { t = ratio[j]; ratio[j] = ratio[j - 1]; ratio[j - 1] = t }
        }
    }'
