#!/usr/bin/env bash
# Takes a base backup of a PostgreSQL with rules, archives its WAL, and restores it as the operations guide says: to a
# point in time, to a named restore point, beside the running server, and after a loss.
#   bash tests/backup.sh
# TOLLGATE names the tool (target/debug/tollgate), TOLLGATE_TEST_POSTGRES the folder with initdb and postgres. It starts
# its own servers, in a temporary directory, on 127.0.0.1. Exits with 1 if the restored state isn't that of the chosen
# moment.
set -euo pipefail

said() { printf '%s\n' "$*"; }
fail() { printf 'tests/backup.sh: %s\n' "$*" >&2; exit 1; }

[ $# -eq 0 ] || { printf 'tests/backup.sh: expected no argument, got %s\n' "$1" >&2; exit 2; }
tollgate=$(realpath -e "${TOLLGATE:-$(dirname "$0")/../target/debug/tollgate}") || fail 'expected the tool in TOLLGATE'
initdb=${TOLLGATE_TEST_POSTGRES:+$TOLLGATE_TEST_POSTGRES/initdb}
[ -n "$initdb" ] || initdb=$(command -v initdb || compgen -G '/usr/lib/postgresql/*/bin/initdb' | tail -1) || true
# The initdb on the PATH may be a link.
programs=$(dirname "$(realpath -e "$initdb" 2>&1)")
[ -x "$programs/pg_basebackup" ] || fail "expected PostgreSQL's programs beside initdb, which TOLLGATE_TEST_POSTGRES can name, got '$initdb'"

# The server refuses to run as root.
as_server=()
[ "$(id -u)" -ne 0 ] || as_server=(runuser -u postgres --)
work=$(mktemp -d)
started=()

# Stops each server's first process, whose id is in a file in its data directory.
stop_all() {
    local data pid
    for data in "${started[@]}"; do
        [ -f "$data/postmaster.pid" ] && pid=$(head -1 "$data/postmaster.pid") || continue
        kill -QUIT "$pid" 2>/dev/null || true
        while kill -0 "$pid" 2>/dev/null; do sleep 0.05; done
    done
}
finish() {
    local code=$?
    stop_all
    [ "$code" -eq 0 ] || { tail -n 20 "$work"/*.log || true; } >&2
    rm -rf "$work"
}
trap finish EXIT
trap 'exit 1' INT TERM

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
run() { (cd "$work" && exec "${as_server[@]}" env TZ=UTC "$@"); }
# until_so WHAT COMMAND...: waits until the command succeeds, 60 seconds at most.
until_so() {
    local what=$1 end=$((SECONDS + 60))
    shift
    until "$@" >/dev/null 2>&1; do
        [ "$SECONDS" -lt "$end" ] || fail "$what: not within 60 seconds"
        sleep 0.05
    done
}

# launch DATA: starts the server of this data directory, and waits until it answers.
launch() {
    started+=("$1")
    run "$programs/pg_ctl" start --silent --wait --pgdata="$1" --log="$1.log" </dev/null >/dev/null ||
        fail "$1: the server doesn't start"
}
stop() { run "$programs/pg_ctl" stop --silent --wait --pgdata="$1" --mode="${2:-fast}"; }
sql() { "$programs/psql" -XAtq -v ON_ERROR_STOP=1 -c "$2" "postgres://limits:password@127.0.0.1:$1/app"; }
admin() { "$programs/psql" -XAtq -v ON_ERROR_STOP=1 -c "$2" "postgres://postgres@127.0.0.1:$1/app"; }
tool() { local port=$1; shift; "$tollgate" "$@" --database "postgres://limits:password@127.0.0.1:$port/app"; }
pull() { tool "$1" rules pull >"$work/$2"; }
# Checks that the database on this port has the file's rules.
has() {
    pull "$1" now.toml
    diff -u "$work/$2" "$work/now.toml" >&2 || fail "$3: the rules are not those of the moment"
    said "ok: $3"
}

# rules UNITS NAME...: a set of one limit for each name.
rules() {
    local units=$1 name
    shift
    for name; do
        printf '[[rule]]\nname = "%s"\nmatch = { path = "/%s" }\nkey = "user"\nlimits = ["gcra %s/1s"]\n\n' "$name" "$name" "$units"
    done
}

# restore DATA SETTING...: makes a new data directory from the base backup, which recovers from the archive.
restore() {
    local data=$1
    shift
    run cp -a "$work/base" "$data"
    run touch "$data/recovery.signal"
    # If a setting occurs twice, the last one counts.
    printf '%s\n' "restore_command = 'cp \"$work/archive/%f\" \"%p\"'" "$@" >>"$data/postgresql.auto.conf"
}
paused() { [ "$(admin "$1" 'SELECT pg_get_wal_replay_pause_state()')" = paused ]; }
promoted() { [ "$(admin "$1" 'SELECT pg_is_in_recovery()')" = f ]; }

[ "$(id -u)" -ne 0 ] || chown postgres: "$work"
run mkdir "$work/archive"
port=$(free_port)
run "$programs/initdb" --no-sync --no-locale --encoding=UTF8 --username=postgres --auth=trust --wal-segsize=1 \
    -D "$work/data" >/dev/null
cat >>"$work/data/postgresql.conf" <<END
listen_addresses = '127.0.0.1'
port = $port
unix_socket_directories = ''
shared_buffers = 16MB
wal_level = replica
archive_mode = on
archive_command = 'cmp -s "%p" "$work/archive/%f" || { test ! -e "$work/archive/%f" && cp "%p" "$work/archive/%f.part" && sync "$work/archive/%f.part" && mv "$work/archive/%f.part" "$work/archive/%f" && sync "$work/archive"; }'
archive_timeout = 60
END
launch "$work/data"
"$programs/psql" -XAtq "postgres://postgres@127.0.0.1:$port/postgres" -c "CREATE USER limits PASSWORD 'password'" \
    -c 'CREATE DATABASE app' -c 'GRANT CREATE ON DATABASE app TO limits'
admin "$port" 'SELECT version()' | cut -d, -f1
tool "$port" db migrate >/dev/null

rules 1 login search >"$work/first.toml"
rules 2 login search uploads >"$work/second.toml"
rules 3 search >"$work/mistake.toml"
rules 4 search anybody >"$work/later.toml"

tool "$port" rules push "$work/first.toml" >/dev/null
pull "$port" was-first.toml
run "$programs/pg_basebackup" --pgdata="$work/base" --checkpoint=fast --dbname="postgres://postgres@127.0.0.1:$port"
run "$programs/pg_verifybackup" --quiet "$work/base"

# After the base backup, so that only the archive has it: the good set, a key and a block.
tool "$port" rules push "$work/second.toml" >/dev/null
sql "$port" "INSERT INTO tollgate.api_keys (key_id, hash, user_id) VALUES ('k1', sha256('k1'), 'u1');
    INSERT INTO tollgate.user_quotas (user_id, blocked) VALUES ('666', true)"
pull "$port" was-second.toml
admin "$port" "SELECT pg_create_restore_point('before-cleanup')" >/dev/null
version_good=$(sql "$port" 'SELECT version FROM tollgate.configuration')

# The mistake, whose time is the moment to stop before; then a good change, which is lost with it.
tool "$port" rules push "$work/mistake.toml" --by bob >/dev/null
moment=$(sql "$port" 'SELECT changed_at FROM tollgate.configuration')
history_known=$(sql "$port" 'SELECT history FROM tollgate.configuration')
sql "$port" "UPDATE tollgate.api_keys SET revoked_at = now() WHERE key_id = 'k1';
    UPDATE tollgate.user_quotas SET blocked = false WHERE user_id = '666'"
pull "$port" was-mistake.toml
! cmp -s "$work/was-second.toml" "$work/was-mistake.toml" || fail 'the mistake changed nothing'

# Beside the running server: only this schema is restored.
file=$(admin "$port" 'SELECT pg_walfile_name(pg_switch_wal())')
until_so 'the archive has the mistake' test -e "$work/archive/$file"
beside=$(free_port)
restore "$work/beside" "port = $beside" 'archive_mode = off' "recovery_target_time = '$moment'"
launch "$work/beside"
until_so 'recovery stops at the moment' paused "$beside"
has "$beside" was-second.toml 'beside: stopped just before the mistake, readable'
has "$port" was-mistake.toml 'beside: the server itself goes on'
"$programs/pg_dump" --schema=tollgate "postgres://limits:password@127.0.0.1:$beside/app" >"$work/tollgate.sql"
{
    echo 'DROP SCHEMA tollgate CASCADE;'
    cat "$work/tollgate.sql"
    echo 'UPDATE tollgate.configuration SET history = gen_random_uuid(), cache_secret = DEFAULT;'
} | "$programs/psql" -XAtq1 -v ON_ERROR_STOP=1 "postgres://limits:password@127.0.0.1:$port/app" >/dev/null 2>&1 ||
    fail 'beside: the schema could not be put back'
stop "$work/beside"
has "$port" was-second.toml 'beside: the schema is put back'
tool "$port" db status >/dev/null || fail 'beside: db status'
[ "$(sql "$port" 'SELECT history FROM tollgate.configuration')" != "$history_known" ] || fail 'beside: the same history'

# In its place, by time. A clean stop archives all remaining WAL.
stop "$work/data"
mv "$work/data" "$work/broken"
restore "$work/data" "recovery_target_time = '$moment'"
launch "$work/data"
until_so 'recovery stops at the moment' paused "$port"
has "$port" was-second.toml 'by time: stopped just before the mistake, readable'
tool "$port" db status >/dev/null || fail 'by time: db status'
run "$programs/pg_ctl" promote --silent --pgdata="$work/data"
until_so 'promotion' promoted "$port"
has "$port" was-second.toml 'by time: promoted'
[ "$(sql "$port" 'SELECT version FROM tollgate.configuration')" = "$version_good" ] || fail 'by time: another version'
sql "$port" 'UPDATE tollgate.configuration SET history = gen_random_uuid(), cache_secret = DEFAULT'
[ "$(sql "$port" 'SELECT history FROM tollgate.configuration')" != "$history_known" ] || fail 'by time: the same history'
state=$(sql "$port" "SELECT (SELECT revoked_at IS NULL FROM tollgate.api_keys), (SELECT blocked FROM tollgate.user_quotas)")
[ "$state" = 't|t' ] || fail "by time: expected the key valid and the user blocked, as at the moment, got $state"
said 'ok: by time: the key that was revoked since is valid, the user that was let go is blocked'

# Further changes: one that is archived, and one that isn't.
tool "$port" rules push "$work/later.toml" >/dev/null
pull "$port" was-later.toml
file=$(admin "$port" 'SELECT pg_walfile_name(pg_switch_wal())')
until_so 'the archive has the last change' test -e "$work/archive/$file"
tool "$port" rules push "$work/first.toml" >/dev/null

# A crash that loses the disk too: what was archived is restored, the last change isn't.
stop "$work/data" immediate
mv "$work/data" "$work/lost"
restore "$work/data"
launch "$work/data"
until_so 'recovery ends' promoted "$port"
has "$port" was-later.toml 'lost: all that was archived, and no more'
stop "$work/data" immediate
rm -rf "$work/data"

# The same, but the old pg_wal can be read. This recovery must not follow the timeline that the previous one began.
rm -f "$work"/archive/00000003*
restore "$work/data"
run cp -n "$work"/lost/pg_wal/0* "$work/data/pg_wal/"
launch "$work/data"
until_so 'recovery ends' promoted "$port"
has "$port" was-first.toml 'lost, with pg_wal: all there was'
stop "$work/data"
rm -rf "$work/data"

# By name, on the first timeline: the archive has another by now.
restore "$work/data" "recovery_target_name = 'before-cleanup'" "recovery_target_timeline = 'current'"
launch "$work/data"
until_so 'recovery stops at the restore point' paused "$port"
has "$port" was-second.toml 'by name: stopped at the restore point'
run "$programs/pg_ctl" promote --silent --pgdata="$work/data"
until_so 'promotion' promoted "$port"

# A file in the archive isn't overwritten, and PostgreSQL reports that.
file=$(admin "$port" 'SELECT pg_walfile_name(pg_current_wal_lsn())')
run sh -c "echo other >'$work/archive/$file'"
sql "$port" 'UPDATE tollgate.user_quotas SET total_today = 2'
admin "$port" 'SELECT pg_switch_wal()' >/dev/null
refused() { [ "$(admin "$port" 'SELECT failed_count FROM pg_stat_archiver')" -gt 0 ]; }
until_so 'the archive refuses' refused
[ "$(cat "$work/archive/$file")" = other ] || fail 'the archive was overwritten'
said 'ok: what is in the archive is not overwritten'
run rm "$work/archive/$file"
# Only complete segments have their final names.
until_so 'archiving goes on' test -e "$work/archive/$file"
[ "$(stat -c %s "$work/archive/$file")" -eq 1048576 ] || fail 'archiving goes on: expected a whole segment'
said 'ok: archiving goes on once it can'
