#!/usr/bin/env bash
# What hardly finds anything that .ci/run doesn't, by hand before a release: some hours on two cores.
#   bash tests/nightly.sh
# Every test, with twenty times the cases of slow properties; then on each supported server and PostgreSQL; the packed
# library with its tests; further sets of features; and the measurements, in small. Exits with 1 if anything failed.
set -euo pipefail
cd "$(dirname "$0")/.."

[ $# -eq 0 ] || { printf 'tests/nightly.sh: expected no argument, got %s\n' "$1" >&2; exit 2; }
export CARGO_INCREMENTAL=0
# Other cases of properties in each night.
export PROPTEST_RNG_SEED=${PROPTEST_RNG_SEED:-$((RANDOM * 32768 + RANDOM))}
printf 'PROPTEST_RNG_SEED=%s draws the same cases again\n' "$PROPTEST_RNG_SEED"

# For the example in Go, which tests/run.sh runs only where they are. Elsewhere than on Debian it isn't run.
if command -v apt-get >/dev/null; then
    fail() { printf 'tests/nightly.sh: %s\n' "$*" >&2; exit 1; }
    . tests/packages.sh
    command -v go >/dev/null || install Go golang-go
    [ -d /usr/share/gocode/src/github.com/gomodule/redigo ] || install redigo golang-github-gomodule-redigo-dev
fi
TOLLGATE_TEST_TIMES=20 TOLLGATE_SIMULATE_SEEDS=10000 bash tests/run.sh
TOLLGATE_TEST_TIMES=20 bash tests/servers.sh --all redis-6 redis-8 valkey-8 valkey-9
TOLLGATE_TEST_TIMES=20 bash tests/postgres.sh --all 14 16 17 18
bash tests/service.sh
while read -r package features; do
    cargo clippy --quiet -p "$package" --no-default-features --features "$features" -- -D warnings
done <<'END'
tollgate embedded,serde
tollgate axum,tls
tollgate-record archive,tls
tollgate-cli postgres,tls
tollgate-serve tls
END
# The published library passes its own tests, in a directory of its own.
cargo package --quiet --allow-dirty --all-features -p tollgate -p tollgate-record -p tollgate-cli -p tollgate-serve
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
cargo test --manifest-path "target/package/tollgate-$version/Cargo.toml" --target-dir target --all-features --lib
# That the measurements run; what they say is for a machine that does nothing else.
bash benches/run.sh --rounds 1 --slice 50 --keys 0 >/dev/null
