#!/usr/bin/env bash
# Simulates the client under time and network faults, with a different run for each seed: one node, Sentinel and Cluster
# in turn.
#   bash tests/simulate.sh [--seeds 1000] [--from 1] [--trace]
# The seed of a failed run is printed with its faults, and reproduces the run to the byte. Exits with 1 if any run
# failed.
set -euo pipefail
cd "$(dirname "$0")/.."

usage='Usage: bash tests/simulate.sh [--seeds N] [--from N] [--trace]
  --seeds N  how many seeds, 1 or more (1000)
  --from N   the first of them (1)
  --trace    prints all that happens, of one seed'

fail() { printf 'tests/simulate.sh: %s\n' "$*" >&2; exit 2; }
. tests/built.sh

seeds=1000
from=1
trace=
while [ $# -gt 0 ]; do
    case "$1" in
        --help | -h) printf '%s\n' "$usage"; exit 0 ;;
        --trace) trace=1; shift; continue ;;
        --seeds) seeds=${2-} ;;
        --from) from=${2-} ;;
        *) fail "expected --seeds N, --from N or --trace, got $1" ;;
    esac
    [[ "${2-}" =~ ^[1-9][0-9]{0,14}$ ]] || fail "$1: expected a whole number of 1 or more, got '${2-}'"
    shift 2
done
[ -z "$trace" ] || [ "$seeds" -eq 1 ] || fail "--trace: expected --seeds 1, got --seeds $seeds"
command -v cargo >/dev/null || fail 'expected cargo on the PATH: install Rust 1.88 or newer'

export RUST_BACKTRACE=0 TOLLGATE_SIMULATE_SEEDS=$seeds TOLLGATE_SIMULATE_FROM=$from
[ -z "$trace" ] || export TOLLGATE_SIMULATE_TRACE=1
echo 'simulate: building, which takes some minutes the first time' >&2
build_tests
# Hides the harness's own output, unless a test ended without a verdict.
output=$(mktemp)
trap 'rm -f "$output"' EXIT
result=0
run_tests . src/lib.rs simulation::seeds --nocapture >"$output" 2>&1 || result=1
# The harness prints its dots before the output.
sed -i 's/^\.\.*//' "$output"
if [ -n "$trace" ] || { [ "$result" -ne 0 ] && ! grep -aq '^seed ' "$output"; }; then
    cat "$output"
else
    grep -aE '^(seed |  .* ms, for |  BROKEN|  again|  \.\.\.)' "$output" || true
    # Each parallel part has printed its totals.
    grep -aE '^[0-9]+ calls' "$output" | awk -v seeds="$seeds" -v result="$result" '
        { calls += $1; failed += $3; if ($9 + 0 >= slowest) { slowest = $9 + 0; by = $NF } }
        END { printf "%d seeds %s: %d calls, %d of which met a fault; slowest recovery %d ms (seed %s\n",
              seeds, result ? "BROKE (see above)" : "held", calls, failed, slowest, by }'
fi
exit "$result"
