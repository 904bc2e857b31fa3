#!/usr/bin/env bash
# Runs every test to the end, whatever fails, and a failed one once more, alone. Its last lines name what passed at its
# second run, which is to be mended or deleted, and what failed twice. Exits with 1 if anything did. Those of the tool
# without TLS, which needs another build of nearly everything, are run by tests/without_tls.sh.
#   bash tests/run.sh
# Installs redis-server (7.0 or newer), PostgreSQL (14 or newer), nginx, wrk, tmux, curl, Chromium and npm with the
# system's package manager if they are missing, and axe and ioredis with npm.
set -euo pipefail
cd "$(dirname "$0")/.."

# Tests press Ctrl-C in terminals of their own, which a job in the background, as of nohup, ignores from its start.
if [ "$(trap -p INT)" = "trap -- '' SIGINT" ]; then exec env --default-signal=INT,QUIT bash "$0" "$@"; fi

fail() { printf 'tests/run.sh: %s\n' "$*" >&2; exit 1; }
. tests/packages.sh
. tests/built.sh

command -v cargo >/dev/null || fail 'expected cargo on the PATH: install Rust 1.88 or newer'
command -v cc >/dev/null || fail 'expected a C compiler (cc) on the PATH: the embedded engine builds Lua from source'

command -v redis-server >/dev/null || install 'redis-server 7.0 or newer on the PATH' redis-server redis redis redis
version=$(redis-server --version | sed -n 's/.*v=\([0-9.]*\).*/\1/p')
[ "${version%%.*}" -ge 7 ] || fail "expected redis-server 7.0 or newer on the PATH, got $version"
echo "redis-server $version"

# For the system of record. Debian puts initdb where the tests look for it, but not on the PATH.
if ! command -v initdb >/dev/null && ! compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null; then
    install 'PostgreSQL 14 or newer' postgresql postgresql-server postgresql postgresql
fi

# The backup tests use it to find free ports.
command -v python3 >/dev/null || install python3 python3 python3 python3 python3

# A Parquet reader and an S3 server, for the archive tests.
bash tests/python.sh

# A browser and axe, for the tests of reports.
bash tests/browser.sh

# A client of Redis for the example in Node. The example in Go is run only where Go is: it and its client would be 500 MB
# more.
bash tests/node.sh

# Stands before a service, as a proxy that names its clients. Debian puts it where only root's PATH leads.
command -v nginx >/dev/null || [ -x /usr/sbin/nginx ] || install nginx nginx nginx nginx nginx

# The commands of the pages call services by it, and run in terminals made by script.
command -v curl >/dev/null || install curl curl curl curl curl
command -v script >/dev/null || install script bsdutils util-linux-script util-linux util-linux

# Puts load on the example services.
command -v wrk >/dev/null || install wrk wrk wrk wrk wrk

# The terminal in which the tool draws.
command -v tmux >/dev/null || install tmux tmux tmux tmux tmux

build_tests

# Runs the programs that it reads, and shows what each has printed once it has ended.
run_all() {
    local package source output=$work/$BASHPID
    while read -r package source; do
        run_once "$package" "$source" --skip without_tls:: </dev/null >"$output" 2>&1 || echo "$package/$source" >>"$work/failed"
        printf '\n%s/%s\n' "$package" "$source"
        cat "$output"
    done
}

# Backup and recovery of the system of record, and of Redis, with the tool that was just built; and the examples in the
# documentation. Shows what they have printed once all have ended.
run_others() {
    local output=$work/others
    {
        command_once bash tests/backup.sh
        command_once bash tests/backup_redis.sh
        command_once cargo test "${tested[@]}" --doc
    } </dev/null >"$output" 2>&1
    cat "$output"
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
programs_built >"$work/programs"
# Three at once, since tests wait for much that takes its time: the programs of the tool and the record; those of the
# library and others, which take as long; and the rest, which takes less. As the parts of a pipe, which carries nothing:
# all end by Ctrl-C then, and have it as a signal that their shells can await.
{
    { grep -E '^crates/(cli|record) ' "$work/programs" | run_all >&3; } |
        { grep -Ev '^(crates/(cli|record)|examples/services) ' "$work/programs" | run_all >&3; } |
        { run_others; grep '^examples/services ' "$work/programs" | run_all; }
} 3>&1
once_more || echo again >>"$work/failed"

printf '\n'
print_second_runs
[ ! -e "$work/failed" ] || fail 'a test failed twice'
