#!/usr/bin/env bash
# Kills, freezes, empties, fails over and cuts off servers at random under audited load: one node, Sentinel and Cluster.
#   bash tests/chaos.sh [--seconds 60] [--seed N]
# Without a seed, one is drawn and printed: it draws the same events again if the servers take as long to recover from
# them. Exits with 1 if anything broke.
set -euo pipefail
cd "$(dirname "$0")/.."

usage='Usage: bash tests/chaos.sh [--seconds N] [--seed N]
  --seconds N  how long servers fail in all, 6 or more (60): a sixth of it for each load, in whose time events are told
  --seed N     draws the same events again (by chance, and printed)'

fail() { printf 'tests/chaos.sh: %s\n' "$*" >&2; exit 2; }
. tests/built.sh

seconds=60
seed=$((RANDOM * 32768 + RANDOM))
while [ $# -gt 0 ]; do
    case "$1" in
        --help | -h) printf '%s\n' "$usage"; exit 0 ;;
        --seconds) seconds=${2-} ;;
        --seed) seed=${2-} ;;
        *) fail "expected --seconds N or --seed N, got $1" ;;
    esac
    [[ "${2-}" =~ ^[1-9][0-9]{0,17}$ ]] || fail "$1: expected a whole number of 1 or more, got '${2-}'"
    shift 2
done
[ "$seconds" -ge 6 ] || fail "--seconds: expected at least 6, one for each load, got $seconds"
command -v redis-server >/dev/null || fail 'expected redis-server on the PATH: tests/run.sh installs it'

build_tests
errors=$(mktemp)
trap 'rm -f "$errors"' EXIT
# Hides the harness's own output, unless the test ended without a verdict.
result=0
TOLLGATE_CHAOS_SECONDS=$seconds TOLLGATE_CHAOS_SEED=$seed \
    run_tests crates/cli tests/it/main.rs chaos --nocapture 2>"$errors" |
    awk '/^chaos of/ { shown = 1 } shown && !/^test / { print; fflush() } /^chaos: / { shown = 0 }' || result=1
if [ "$result" -ne 0 ] && ! grep -q '^seed ' "$errors"; then
    cat "$errors" >&2
fi
exit "$result"
