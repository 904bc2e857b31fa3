#!/usr/bin/env bash
# Runs the commands of "Backup of Redis" in the operations pages verbatim, on a Redis with limits, and checks the result
# with the tool: counts, a block and a day's window are restored, and so is a moment before a mistake.
#   bash tests/backup_redis.sh
# TOLLGATE names the tool (target/debug/tollgate); redis-server, redis-cli, redis-check-aof and redis-check-rdb are those on
# the PATH. It starts its own servers, in a temporary directory, on 127.0.0.1. Exits with 1 if a command doesn't print
# what the guide says (numbers may differ), or if the restored state isn't that of the chosen moment.
set -euo pipefail

said() { printf '%s\n' "$*"; }
fail() { printf 'tests/backup_redis.sh: %s\n' "$*" >&2; exit 1; }

[ $# -eq 0 ] || { printf 'tests/backup_redis.sh: expected no argument, got %s\n' "$1" >&2; exit 2; }
tollgate=$(realpath -e "${TOLLGATE:-$(dirname "$0")/../target/debug/tollgate}") || fail 'expected the tool in TOLLGATE'
guide=$(dirname "$0")/../src/operations/backup.md
for program in redis-server redis-cli redis-check-aof redis-check-rdb; do
    command -v "$program" >/dev/null || fail "expected $program on the PATH"
done

free_ports() {
    python3 -c 'import socket
several = [socket.socket() for _ in range(2)]
for one in several: one.bind(("127.0.0.1", 0))
print(*(one.getsockname()[1] for one in several))'
}
read -r port beside < <(free_ports)

work=$(mktemp -d)
# Finds servers by the pid files that they keep while they run.
stop_all() {
    local file
    for file in "$work"/*.pid; do
        [ ! -f "$file" ] || kill -KILL "$(cat "$file")" 2>/dev/null || true
    done
    while redis-cli -p "$port" PING || redis-cli -p "$beside" PING; do sleep 0.02; done >/dev/null 2>&1
}
finish() {
    local code=$?
    stop_all
    [ "$code" -eq 0 ] || { tail -n 20 "$work"/*.log || true; } >&2
    rm -rf "$work"
}
trap finish EXIT
trap 'exit 1' INT TERM

export TOLLGATE_URL=redis://127.0.0.1:$port

# The guide's directories are in here. Its commands find these two programs first.
data=$work/data copies=$work/copies
mkdir "$data" "$copies" "$work/bin"
printf '#!/bin/sh\nexec %s -p %s "$@"\n' "$(command -v redis-cli)" "$port" >"$work/bin/redis-cli"
printf '#!/bin/sh\nexec %s "$@" --pidfile "%s/$$.pid" --logfile "%s/server.log"\n' \
    "$(command -v redis-server)" "$work" "$work" >"$work/bin/redis-server"
chmod +x "$work"/bin/*
PATH=$work/bin:$PATH
cat >"$work/redis.conf" <<END
bind 127.0.0.1
port $port
dir $data
save ""
daemonize yes
# Otherwise it makes a reader of a snapshot wait for others.
repl-diskless-sync-delay 0
END

# Waits until the command succeeds, 10 seconds at most.
until_so() {
    local what=$1 end=$((SECONDS + 10))
    shift
    until "$@" >/dev/null 2>&1; do
        [ "$SECONDS" -lt "$end" ] || fail "$what: not within 10 seconds"
        sleep 0.02
    done
}
answers() { [ "$(redis-cli PING 2>&1)" = PONG ]; }
launch() {
    redis-server "$work/redis.conf" "$@"
    until_so 'the server answers' answers
}
# Simulates a crash of the process: what it hasn't passed to the kernel is lost.
kill_server() {
    local pid
    pid=$(redis-cli INFO server | sed -n 's/^process_id:\([0-9]*\).*/\1/p')
    kill -KILL "$pid"
    rm "$(grep -lx "$pid" "$work"/*.pid)"
    while answers; do sleep 0.02; done
}
# The AOF records time in seconds: this puts what follows into another second.
next_second() {
    local now=$EPOCHSECONDS
    while [ "$EPOCHSECONDS" -le "$now" ]; do sleep 0.02; done
}

# Writes each of the guide's blocks of commands to a numbered file, which begins with the paragraph's bold title.
section=$(awk '/^# /{of = $0 == "# Backup of Redis"} of' "$guide")
[ -n "$section" ] || fail 'the guide has no section "Backup of Redis"'
awk -v work="$work" '
    /^\*\*/ { title = $0; sub(/^\*\*/, "", title); sub(/[.,:]?\*\*.*/, "", title) }
    /^```console/ { inside = 1; file = work "/block." ++number; print title >file; next }
    /^```/ { inside = 0 }
    inside { print >file }
' <<<"$section"
blocks=$(find "$work" -name 'block.*' | wc -l)
ran=0 printed=

# INFO's lines end in CRLF.
numbers_apart() { tr -d '\r' <"$1" | sed -E 's/[0-9]+/N/g'; }

# follow COMMAND EXPECTED: runs the guide's command in this shell, with the directories replaced by those here.
follow() {
    local command=$1 expected=$2 last
    # The previous command has found the second of the mistake.
    last=$(sed -n 's/^#TS:\([0-9]*\)$/\1/p' <<<"$printed")
    [[ $command != MOMENT=* ]] || { [ -n "$last" ] && command=$(sed -E "s/[0-9]{10}/$last/" <<<"$command"); }
    command=$(sed -e "s|/var/lib/redis|$data|g" -e "s|/srv/redis|$copies|g" -e "s|/etc/redis/redis.conf|$work/redis.conf|g" \
        -e "s|6379|$port|g" -e "s|6380|$beside|g" -e 's/sleep 1;/sleep 0.05;/' <<<"$command")
    eval "$command" >"$work/out" 2>&1 || fail "$command: exits with $?: $(cat "$work/out")"
    printed=$(cat "$work/out")
    printf '%s' "${expected:+$expected$'\n'}" >"$work/expected"
    diff -u <(numbers_apart "$work/expected") <(numbers_apart "$work/out") >&2 || fail "$command: prints something else"
    # The guide doesn't mention the time that every start takes.
    [[ $command != redis-server\ * ]] || until_so 'the server answers' answers
}

# guide TITLE: runs the block after the paragraph with this title.
guide() {
    local file line command='' expected=''
    file=$(grep -lxF -- "$1" "$work"/block.* | head -1) || fail "the guide has no commands after \"**$1\""
    while IFS= read -r line; do
        if [[ $line == '$ '* ]]; then
            [ -z "$command" ] || follow "$command" "$expected"
            command=${line:2} expected=
        elif [[ $command == *'|' || $command == *'\' ]]; then
            command+=$'\n'$line
        else
            expected+=${expected:+$'\n'}$line
        fi
    done < <(tail -n +2 "$file")
    follow "$command" "$expected"
    rm "$file"
    ran=$((ran + 1))
}

tool() { "$tollgate" "$@" --format jsonl 2>/dev/null; }
take() { tool probe "$1" "$2" --name "$3" --cost "$4" >/dev/null || fail "$1 $2: expected $4 units to be allowed"; }
field() { sed -nE "s/.*\"$1\":([a-z0-9]+).*/\1/p"; }
day='fixed-window 250/day tz Pacific/Kiritimati'
# A day whose window can't end during this run: of two zones whose midnights are twelve hours apart, the one that is
# further from midnight.
[ "$(TZ=UTC-14 date +%H)" -lt 23 ] || day='fixed-window 250/day tz Etc/GMT-2'
month='fixed-window 5000/30d start first-hit'
hour='gcra 10/10h'

# holds WHAT DAY MONTH HOUR BLOCKED: checks what remains of each limit of user:42, and whether user:666 is blocked.
holds() {
    local what=$1 now blocked
    shift
    blocked=$(tool inspect 'gcra 10/1s' user:666 --name login | field blocked_us)
    now="$(tool inspect "$day" user:42 --name api | field remaining)"
    now+=" $(tool inspect "$month" user:42 --name export | field remaining)"
    now+=" $(tool inspect "$hour" user:42 --name mail | field remaining)"
    [ "${blocked:-0}" -gt 3600000000 ] && now+=' blocked' || now+=' free'
    [ "$now" = "$*" ] || fail "$what: expected $*, got $now"
    said "ok: $what"
}

launch
redis-cli INFO server | sed -nE 's/^redis_version:([0-9.]+).*/Redis \1/p'
take "$day" user:42 api 100
take "$month" user:42 export 1000
take "$hour" user:42 mail 3
tool block 'gcra 10/1s' user:666 --name login --for 2h >/dev/null

# With snapshots only, what came after the last one is lost with the process.
redis-cli SAVE >/dev/null
take "$day" user:42 api 1
kill_server
launch
holds 'snapshots alone: killed, and as of the last one' 150 4000 7 blocked

# The mistake that the guide warns about.
kill_server
mkdir "$work/trap"
cp "$data/dump.rdb" "$work/trap/"
launch --appendonly yes --dir "$work/trap"
[ "$(redis-cli DBSIZE)" -eq 0 ] || fail 'appendonly yes without an AOF: expected an empty server, as the guide warns'
said 'ok: appendonly yes without an AOF starts empty'
kill_server
launch
rm "$data/dump.rdb"

guide Settings
for setting in 'appendonly yes' 'aof-timestamp-enabled yes' 'auto-aof-rewrite-percentage 0'; do
    grep -qxF "$setting" "$work/redis.conf" || fail "expected $setting in the configuration"
done
rewritten() { ! redis-cli INFO persistence | grep -qE '^aof_rewrite_(in_progress|scheduled):1'; }
until_so 'the first AOF' rewritten
take "$day" user:42 api 10
kill_server
launch
holds 'with an AOF: killed, and nothing that was answered is lost' 140 4000 7 blocked

# A mistake that is noticed only after the backup.
next_second
tool reset --rule api >/dev/null
first_mistake=$(grep -ahoE '^(#TS:[0-9]+|UNLINK|DEL)' "$data"/appendonlydir/*.incr.aof | grep -B1 -E 'UNLINK|DEL' |
    sed -n 's/#TS://p' | tail -1)
next_second
take "$day" user:42 api 20
guide 'The backup of the AOF'
holds 'the server went on during the backup' 230 4000 7 blocked
[ "$(wc -c <"$data"/appendonlydir/*.incr.aof)" -eq 0 ] || fail 'the backup: expected the AOF to be rewritten'
take "$hour" user:42 mail 1
guide 'A snapshot'
next_second
take "$month" user:42 export 500

next_second
redis-cli FLUSHALL >/dev/null
next_second
take "$day" user:42 api 1
take "$day" user:43 api 50

guide 'To just before a mistake'
guide 'Beside the running server'
holds 'beside: the counts, the day and the block of just before the FLUSHALL are back' 230 3500 6 blocked
[ "$(tool inspect "$day" user:43 --name api | field remaining)" -eq 200 ] || fail 'beside: user:43 was touched'
said 'ok: beside: whoever came since is as they were'

guide 'In its place'
holds 'in its place: just before the FLUSHALL' 230 3500 6 blocked
[ "$(tool inspect "$day" user:43 --name api | field exists)" = false ] || fail 'in its place: expected nothing after it'
take "$month" user:42 export 1
kill_server
launch
holds 'in its place: the AOF goes on' 230 3499 6 blocked

guide 'To restore the AOF'
holds 'the AOF restored' 230 4000 7 blocked

# A moment before the last rewrite is in the backup.
redis-cli SHUTDOWN
rm -r "$data/appendonlydir"
cp -a "$copies"/2* "$data/" && rm "$data"/*.rdb
mv "$data"/2* "$data/appendonlydir"
redis-check-aof --truncate-to-timestamp "$((first_mistake - 1))" "$data/appendonlydir/appendonly.aof.manifest" >/dev/null
launch
holds 'from the backup: just before the reset, which the last rewrite has forgotten' 140 4000 7 blocked

guide 'To restore a snapshot'
holds 'the snapshot restored' 230 4000 6 blocked
take "$month" user:42 export 2
kill_server
launch
holds 'the snapshot restored, into an AOF that goes on' 230 3998 6 blocked

[ "$ran" -eq "$blocks" ] || fail "ran $ran of the guide's $blocks blocks: $(head -qn 1 "$work"/block.*)"
said "ok: all $blocks blocks of the guide"
