#!/usr/bin/env bash
# Installs the Python packages that tests need, if they are missing: DuckDB and pyarrow, which read Parquet with other
# code than tollgate's; moto, an S3 server; redis, a client that calls the scripts; and schemathesis, which holds a
# service to its OpenAPI. They come from the Python registry, by version, into a cache outside the tree.
#   bash tests/python.sh
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { printf 'tests/python.sh: %s\n' "$*" >&2; exit 1; }
. tests/packages.sh

[ $# -eq 0 ] || { printf 'tests/python.sh: expected no argument, got %s\n' "$1" >&2; exit 2; }
[ -z "${TOLLGATE_TEST_PYTHON:-}" ] || exit 0
packages='duckdb==2.0.0 moto==5.2.5 pyarrow==26.0.1 redis==8.1.0 schemathesis==4.32.0'
# What moto's server needs for S3 alone: all of its services would need 40 more packages.
needed='flask==3.1.3 flask-cors==6.0.5 py-partiql-parser==0.6.3 PyYAML==6.0.3'
folder=${XDG_CACHE_HOME:-${HOME:?}/.cache}/tollgate/python
made=$folder/made-of
[ "$(cat "$made" 2>/dev/null)" != "$packages $needed" ] || exit 0

command -v python3 >/dev/null || install python3 python3 python3 python3 python3
rm -rf "$folder"
python3 -m venv "$folder" 2>/dev/null || {
    install 'python3 with venv' python3-venv python3 python3 python3
    python3 -m venv "$folder"
}
# shellcheck disable=SC2086  # Each has several words.
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check $packages $needed ||
    fail "$packages could not be installed"
printf '%s' "$packages $needed" >"$made"
