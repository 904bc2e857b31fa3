#!/usr/bin/env bash
# Runs the tests that a change adds or touches many times, beside busy loops that leave them half a machine: a test of
# chance fails here rather than in somebody else's change. Some minutes.
#   bash tests/repeat.sh [--base REVISION] [--times 20] [--busy 4] [NAME...]
# Exits with 1 if a test failed at any of its runs, with 2 on misuse.
set -euo pipefail
cd "$(dirname "$0")/.."

usage='Usage: bash tests/repeat.sh [--base REVISION] [--times N] [--busy N] [NAME...]
  --base REVISION  the change is what differs from this, also if it is not committed (origin/main, else main~1)
  --times N        how often each test runs (20)
  --busy N         how many loops keep the processors busy meanwhile, 0 for none (4)
Tests whose names contain a NAME instead, if any are named.'

fail() { printf 'tests/repeat.sh: %s\n' "$*" >&2; exit 1; }
misused() { printf 'tests/repeat.sh: %s\n' "$*" >&2; exit 2; }
. tests/built.sh

base='' times=20 busy=4 names=()
while [ $# -gt 0 ]; do
    case "$1" in
        --help | -h) printf '%s\n' "$usage"; exit 0 ;;
        --base) base=${2:?--base: expected a revision}; shift ;;
        --times) [[ "${2-}" =~ ^[1-9][0-9]{0,3}$ ]] || misused "--times: expected 1 to 9999, got '${2-}'"; times=$2; shift ;;
        --busy) [[ "${2-}" =~ ^[0-9]{1,2}$ ]] || misused "--busy: expected 0 to 99, got '${2-}'"; busy=$2; shift ;;
        -*) misused "expected --base, --times or --busy, got $1" ;;
        *) names+=("$1") ;;
    esac
    shift
done
if [ -z "$base" ]; then
    base=$(git rev-parse --quiet --verify origin/main || git rev-parse --quiet --verify main~1) ||
        misused '--base: expected a revision, found neither origin/main nor main~1'
fi
git rev-parse --quiet --verify "$base^{commit}" >/dev/null || misused "--base: expected a revision, got $base"

# touched PACKAGE SOURCE: the tests of a program in which the change has a line, one a line; all of a file's if the line
# is in none of them.
touched() {
    local top=$1/${2%/*} file module lines all
    top=${top#./}
    all=$(run_tests "$1" "$2" --list | sed -n 's/: test$//p')
    while read -r file; do
        module=${file#"$top/"} module=${module%.rs}
        case "$module" in main | lib) module='' ;; *) module=${module//\//::}:: ;; esac
        # The new lines' numbers.
        lines=$(git diff --unified=0 "$base" -- "$file" |
            awk -F'[ ,+]+' '/^@@/ { split($0, part, "+"); split(part[2], at, "[ ,]"); count = at[2] == "" || at[2] == "@@" ? 1 : at[2]
                for (line = at[1]; line < at[1] + count; line++) print line }')
        awk -v changed="$lines" -v module="$module" '
            BEGIN { n = split(changed, list, "\n"); for (i = 1; i <= n; i++) is_changed[list[i]] = 1 }
            /#\[(tokio::)?test/ { is_test = 1 }
            is_test && match($0, /fn [a-z0-9_]+/) { name = substr($0, RSTART + 3, RLENGTH - 3); is_test = 0
                match($0, /^ */); end = substr($0, 1, RLENGTH) "}"; tests++ }
            FNR in is_changed { if (name != "") found[name] = 1; else if (!is_test && !/^ *(\/\/|use |mod |#|$)/) outside = 1 }
            name != "" && $0 == end { name = "" }
            END { if (!tests) exit; if (outside) print module ".*"; for (name in found) print module "(.*::)?" name }' "$file"
    done < <(git diff --name-only --diff-filter=d "$base" -- "$top" | grep '\.rs$' || true) |
        while read -r pattern; do grep -E "^$pattern\$" <<<"$all" || true; done | sort -u
}

# A test that was matched by its name: one that contains any of them.
named() {
    local all name
    all=$(run_tests "$1" "$2" --list | sed -n 's/: test$//p')
    for name in "${names[@]}"; do grep -F -- "$name" <<<"$all" || true; done | sort -u
}

build_tests
loops=()
stop() { [ ${#loops[@]} -eq 0 ] || kill "${loops[@]}" 2>/dev/null || true; rm -f "$first_runs" "$second_runs"; }
trap stop EXIT
for ((at = 0; at < busy; at++)); do
    (while :; do :; done) &
    loops+=($!)
done

output=$(mktemp) failed=0 tried=0
while read -r package source; do
    if [ ${#names[@]} -gt 0 ]; then list=$(named "$package" "$source"); else list=$(touched "$package" "$source"); fi
    [ -n "$list" ] || continue
    mapfile -t tests <<<"$list"
    printf '%s/%s: %s tests\n' "$package" "$source" "${#tests[@]}"
    tried=$((tried + ${#tests[@]}))
    for ((at = 1; at <= times; at++)); do
        seed=$((RANDOM * 32768 + RANDOM))
        PROPTEST_RNG_SEED=$seed run_tests "$package" "$source" --exact "${tests[@]}" >"$output" 2>&1 </dev/null &&
            continue
        failed=$((failed + 1))
        cat "$output"
        printf 'run %s of %s failed, PROPTEST_RNG_SEED=%s\n' "$at" "$times" "$seed"
    done
done < <(programs_built)
rm -f "$output"
[ "$tried" -gt 0 ] || fail 'no test is touched by the change, or has such a name'
printf '%s tests, %s times each beside %s busy loops: %s failed runs\n' "$tried" "$times" "$busy" "$failed"
[ "$failed" -eq 0 ] || exit 1
