#!/usr/bin/env bash
# Builds the tool with the feature `postgres` alone, and runs the tests that ask it for what other features bring, such
# as TLS: about two minutes the first time.
#   bash tests/without_tls.sh
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { printf 'tests/without_tls.sh: %s\n' "$*" >&2; exit 1; }
. tests/built.sh

[ $# -eq 0 ] || { printf 'tests/without_tls.sh: expected no argument, got %s\n' "$1" >&2; exit 2; }
# First, since it is built where the other tests expect the tool with TLS.
cargo build --quiet -p tollgate-cli --features postgres
target=${CARGO_TARGET_DIR:-target}
mkdir -p "$target/without-tls"
cp "$target/debug/tollgate" "$target/without-tls/"
TOLLGATE_TEST_WITHOUT_TLS=$(realpath "$target/without-tls/tollgate")
export TOLLGATE_TEST_WITHOUT_TLS
build_tests
result=0
run_twice crates/cli tests/it/main.rs without_tls:: || result=1
print_second_runs
exit "$result"
