#!/usr/bin/env bash
# How fast the tool gets through a day's access log: bash benches/tool.sh [LINES], by default 500,000.
#
# The log is made of tests/data/access-combined.log, the same each time: its lines in random order, evenly over a day,
# one in fifty up to four seconds late, from 40,000 addresses, of which a few ask often. Processor time depends little
# on what else the machine does; it divides over the threads that read and those that decide.
set -euo pipefail
cd "$(dirname "$0")/.."
lines=${1:-500000}
cargo build --release --quiet -p tollgate-cli
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
log=$folder/access.log

awk -v lines="$lines" '
function random(below) { seed = seed * 48271 % 2147483647; return int(seed / 2147483647 * below) }
{ address[NR] = $1; at = index($0, "] "); rest[NR] = substr($0, at) }
END {
    seed = 7
    for (line = 0; line < lines; line++) {
        second = int(86400 * line / lines)
        if (random(50) == 0 && second > 4) second -= random(5)
        if (random(10) < 7) whom = address[1 + int(NR * (random(10000) / 10000) ^ 2)]
        else whom = "10." random(16) "." random(64) "." 1 + random(40)
        printf "%s - - [17/May/2026:%02d:%02d:%02d +0000%s\n", whom, second / 3600, second / 60 % 60, second % 60, \
            rest[1 + random(NR)]
    }
}' tests/data/access-combined.log > "$log"

# The same requests behind a balancer, which has written its client's address at each line's end.
behind=$folder/behind.log
awk '{ client = $1; $1 = "10.0.0.1"; print $0 " \"" client "\"" }' "$log" > "$behind"
# The logs of three servers, among which they were spread.
awk -v name="$folder/server" '{ print > (name NR % 3 ".log") }' "$log"

TIMEFORMAT='%U %S %R'
measure() {
    local name=$1 user system real
    shift
    read -r user system real < <({ time target/release/tollgate "$@" > "$folder/out" 2> "$folder/err"; } 2>&1)
    awk -v name="$name" -v lines="$lines" -v busy="$user" -v kernel="$system" -v real="$real" 'BEGIN {
        busy += kernel
        printf "%-36s %8.2f s of processor time; %8.2f s in all, %9.0f lines a second\n", name, busy, real, lines / real
    }'
}

rule=(--rule "token-bucket 60/1m burst 20")
measure "replay" replay "${rule[@]}" "$log"
measure "replay --summary" replay "${rule[@]}" --summary "$log"
fields=time=4,ip=1,request=5
measure "replay --summary --fields" replay "${rule[@]}" --summary --input text --fields "$fields" "$log"
measure "replay --summary --client-address" replay "${rule[@]}" --summary --client-address last-quoted "$behind"
measure "replay --summary, three files" replay "${rule[@]}" --summary "$folder"/server?.log
measure "suggest" suggest "$log"
four=("token-bucket 10/1m burst 5" "fixed-window 10/1m" "sliding-window 10/1m" "sliding-log 10/1m")
measure "compare of four" compare "${four[@]}" "$log"
