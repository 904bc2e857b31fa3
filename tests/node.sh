#!/usr/bin/env bash
# Installs the client of Redis that examples/languages/token_bucket.mjs needs, if it is missing: ioredis, from the npm registry,
# by version and checksum, into a cache outside the tree.
#   bash tests/node.sh
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { printf 'tests/node.sh: %s\n' "$*" >&2; exit 1; }
. tests/packages.sh

[ $# -eq 0 ] || { printf 'tests/node.sh: expected no argument, got %s\n' "$1" >&2; exit 2; }
[ -z "${TOLLGATE_TEST_NODE_MODULES:-}" ] || exit 0
needed=examples/languages
folder=${XDG_CACHE_HOME:-${HOME:?}/.cache}/tollgate/node
! cmp -s "$needed/package-lock.json" "$folder/package-lock.json" || [ ! -e "$folder/node_modules/ioredis" ] || exit 0
command -v npm >/dev/null || install npm npm npm npm node
rm -rf "$folder"
mkdir -p "$folder"
cp "$needed"/package*.json "$folder"
(cd "$folder" && npm ci --silent --ignore-scripts --no-audit --no-fund) || fail 'ioredis could not be installed'
