#!/usr/bin/env bash
# Measures decisions end to end, with much concurrency and on the server, finding rules, the HTTP layer and the service,
# with variants in turn, and prints what is promised and what is wanted, with the measurements: about a quarter of an hour
# by default. Needs cargo and redis-server; starts its own servers on loopback.
#
#   bash benches/run.sh [--rounds N] [--slice MS] [--callers N,N] [--keys N]
set -euo pipefail
cd "$(dirname "$0")/.."

cargo build --profile bench --quiet -p tollgate-benches --bins
binaries=${CARGO_TARGET_DIR:-target}/release

model=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2>/dev/null | head -n 1)
printf 'Machine: %s cores shared by client and server (%s), %s, %s. Load before the run: %s.\n\n' \
    "$(getconf _NPROCESSORS_ONLN)" "${model:-unknown}" "$(redis-server --version | sed 's/.* v=\([0-9.]*\).*/Redis \1/')" \
    "$(rustc --version | cut -d ' ' -f 1,2)" "$(uptime | sed 's/.*load average[s]*: *//')"
"$binaries/end_to_end" "$@"
"$binaries/cluster" "$@"
"$binaries/calls" "$@"
"$binaries/many" "$@"
"$binaries/crowds" "$@"
"$binaries/rules" "$@"
"$binaries/layer" "$@"
"$binaries/service" "$@"
"$binaries/server" "$@"
# Only if a PostgreSQL is named that may be written to.
[ -z "${TOLLGATE_DATABASE-}" ] || { "$binaries/statements" "$@"; "$binaries/keys"; }
