#!/usr/bin/env bash
# Installs what the tests of reports need, if it is missing: Chromium without a window, from the system's packages, and
# axe, which checks a page's accessibility, from the npm registry, by version and checksum, into a cache outside the
# tree.
#   bash tests/browser.sh
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { printf 'tests/browser.sh: %s\n' "$*" >&2; exit 1; }
. tests/packages.sh

[ $# -eq 0 ] || { printf 'tests/browser.sh: expected no argument, got %s\n' "$1" >&2; exit 2; }

# The names that the tests look for (crates/cli/tests/it/support/browser.rs).
command -v chromium-headless-shell chromium chromium-browser google-chrome >/dev/null ||
    # A third smaller than chromium; some relatives of Debian have only that.
    install 'Chromium' chromium-headless-shell chromium-headless chromium chromium ||
    install 'Chromium' chromium chromium chromium chromium

[ -z "${TOLLGATE_TEST_AXE:-}" ] || exit 0
needed=crates/cli/tests/browser
folder=${XDG_CACHE_HOME:-${HOME:?}/.cache}/tollgate/browser
! cmp -s "$needed/package-lock.json" "$folder/package-lock.json" || [ ! -e "$folder/node_modules/axe-core/axe.min.js" ] ||
    exit 0
command -v npm >/dev/null || install npm npm npm npm node
rm -rf "$folder"
mkdir -p "$folder"
cp "$needed"/package*.json "$folder"
(cd "$folder" && npm ci --silent --ignore-scripts --no-audit --no-fund) || fail 'axe-core could not be installed'
