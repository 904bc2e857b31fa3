#!/usr/bin/env bash
# Tests the clients against the real service, each on a Redis of its own, in some 40 s on two cores:
#   TOLLGATE_SERVE=target/debug/tollgate-serve bash clients/test.sh
# Needs redis-server, python3 with venv, and node with npm. Go is tested where it is installed. What Python's and Node's
# tests need beside the clients comes from the registries, by version, into a cache outside the tree; the first run takes
# that much longer.
set -euo pipefail

fail() { printf 'clients/test.sh: %s\n' "$*" >&2; exit 1; }
# Runs a command for so many seconds at most, and says so if that wasn't enough. At SIGABRT, Python prints where it is.
within() {
    local seconds=$1 status=0
    shift
    timeout --foreground --signal=ABRT --kill-after=10 "$seconds" "$@" || status=$?
    [ "$status" -ne 124 ] && [ "$status" -ne 137 ] || printf 'expected an end within %s s: %s\n' "$seconds" "$*"
    return "$status"
}

[ -n "${TOLLGATE_SERVE:-}" ] || fail 'TOLLGATE_SERVE: expected the path of tollgate-serve, got none'
[ -x "$TOLLGATE_SERVE" ] || fail "TOLLGATE_SERVE: expected a program, got $TOLLGATE_SERVE"
TOLLGATE_SERVE=$(realpath "$TOLLGATE_SERVE")
export TOLLGATE_SERVE
for program in timeout redis-server python3 node npm; do
    command -v "$program" >/dev/null || fail "expected $program on the PATH"
done

work=$(mktemp -d)
groups=()
end() {
    for group in "${groups[@]}"; do kill -KILL -- "-$group" 2>/dev/null || true; done
    rm -rf "$work"
}
trap end EXIT
# Whoever gives this up sees how far it came.
trap 'tail -n +1 "$work"/*.log; exit 143' TERM
# A copy, so that nothing is written into the tree.
cp -R "$(dirname "$0")" "$work/clients"
rm -rf "$work/clients/node/node_modules"
cd "$work/clients"
cache=${XDG_CACHE_HOME:-${HOME:?}/.cache}/tollgate

run_python() {
    cd python
    local packages='fastapi==0.165.0 uvicorn==0.54.0 mypy==2.4.1 setuptools==80.9.0 wheel==0.45.1' folder=$cache/clients-python
    if [ "$(cat "$folder/made-of" 2>/dev/null)" != "$packages" ]; then
        rm -rf "$folder"
        within 120 python3 -m venv "$folder"
        # shellcheck disable=SC2086  # It has several words.
        within 600 "$folder/bin/python" -m pip install --quiet --disable-pip-version-check $packages
        printf '%s' "$packages" >"$folder/made-of"
    fi
    within 300 "$folder/bin/python" -m mypy --cache-dir "$folder/mypy" src
    # As the page says, with the builder that is there, but not into the folder that other runs use too.
    within 300 "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
        --target "$work/installed" .
    PYTHONPATH=$work/installed within 300 "$folder/bin/python" -X faulthandler -W error::ResourceWarning \
        -m unittest discover -s tests
}

run_node() {
    cd node
    local folder=$cache/clients-node
    if ! cmp -s package-lock.json "$folder/made-of"; then
        rm -rf "$folder"
        mkdir -p "$folder"
        cp package*.json "$folder"
        (cd "$folder" && within 600 npm ci --silent --ignore-scripts --no-audit --no-fund)
        cp package-lock.json "$folder/made-of"
    fi
    ln -s "$folder/node_modules" node_modules
    # The types that are shipped are those of the source.
    within 300 npx --no-install tsc --outDir "$work/types"
    diff index.d.mts "$work/types/index.d.mts"
    within 300 node --test tests
}

run_go() {
    cd go
    unformatted=$(gofmt -l .)
    [ -z "$unformatted" ] || fail "expected gofmt's form: $unformatted"
    within 300 go vet ./...
    within 400 go test -count=1 -timeout 300s -v ./... | grep -v '^=== RUN'
}

languages='python node'
if command -v go >/dev/null; then languages+=' go'; fi
# Each is a process group, so that what it started ends too, whatever becomes of it.
set -m
for language in $languages; do
    ( set -e; began=$SECONDS; "run_$language"; echo "$((SECONDS - began)) s" ) >"$work/$language.log" 2>&1 </dev/null &
    declare "job_$language=$!"
    groups+=("$!")
done
set +m
failed=''
for language in $languages; do
    job=job_$language
    wait "${!job}" || failed+=" $language"
    printf '\n== %s\n' "$language"
    cat "$work/$language.log"
done
command -v go >/dev/null || printf '\nNOT RUN: go is missing, so the client for Go was not tested\n'
[ -z "$failed" ] || fail "failed:$failed"
printf '\nclients: passed: %s\n' "$languages"
