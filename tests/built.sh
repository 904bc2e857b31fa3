# Sourced by the scripts in this folder, which define `fail`: the test programs, where they are, and what becomes of
# their tests.

# Tests wait for servers most of the time, so more of them run at once than there are processors.
export RUST_TEST_THREADS=${RUST_TEST_THREADS:-$(($(getconf _NPROCESSORS_ONLN) * 2))}

# What properties draw their cases from: the same cases in each run, so that none fails by chance for a change that has
# nothing to do with it. Others are drawn by tests/repeat.sh and tests/nightly.sh, and by a bare `cargo test`.
export PROPTEST_RNG_SEED=${PROPTEST_RNG_SEED:-1}

# Which packages are named decides what their dependencies are built with. So every script names these: what one has
# built is there for the others. The tool's targets have `test = false`, and are named too.
tested=(--workspace --exclude tollgate-benches --exclude tollgate-public-api --all-features)
programs=(--lib --bin tollgate --test it)

# Builds all of them.
build_tests() {
    built=$(cargo test --quiet "${tested[@]}" "${programs[@]}" --no-run --message-format=json-render-diagnostics)
}

# Package and source of each, one a line.
programs_built() {
    sed -En 's|.*"src_path":"([^"]*)/((src\|tests)/[^"]*)".*"test":true},"features".*"executable":".*|\1 \2|p' <<<"$built" |
        sed "s|^$PWD/||; s|^$PWD |. |" | sort
}

# program_of PACKAGE SOURCE: the test program that was built from this file of the package, a folder.
program_of() {
    local source program
    source=$(realpath "$1/$2")
    program=$(sed -n "s|.*\"src_path\":\"$source\".*\"test\":true},\"features\".*\"executable\":\"\([^\"]*\)\".*|\1|p" <<<"$built")
    [ -x "$program" ] || fail "$1/$2: expected one test program, got '$program'"
    echo "$program"
}

# run_tests PACKAGE SOURCE ARGUMENT...: runs the test program as cargo would.
run_tests() {
    local program
    program=$(program_of "$1" "$2") || exit 1
    (cd "$1" && exec "$program" --quiet "${@:3}")
}

# Of two programs that run at once, each has three quarters of these.
threads_of_two() { echo $(((RUST_TEST_THREADS * 3 + 3) / 4)); }

# What failed at its first run, one a line: package, source and test, between tabs, or `command`, `-` and a command. And
# what became of it, one a line: `passed` or `failed` at its second run, a tab, its name. Files, since tests also run in
# subshells.
first_runs=$(mktemp) second_runs=$(mktemp)

# run_once PACKAGE SOURCE ARGUMENT...: run_tests, which notes the tests that failed for once_more. Fails if the program
# ended without a result.
run_once() {
    local output failures code=0
    output=$(mktemp)
    run_tests "$@" 2>&1 | tee "$output"
    if [ "${PIPESTATUS[0]}" -ne 0 ]; then
        # The last list of failures: before it stands what the failed tests printed, other lists among it.
        mapfile -t failures < <(awk '/^failures:$/ { names = "" } /^    [^ ]+$/ { names = names $1 "\n" }
            /^test result: / { last = names } END { printf "%s", last }' "$output")
        if [ ${#failures[@]} -gt 0 ]; then
            printf "$1\t$2\t%s\n" "${failures[@]}" >>"$first_runs"
        else
            printf 'failed\t%s: %s ended without a result\n' "$1" "$2" >>"$second_runs"
            code=1
        fi
    fi
    rm -f "$output"
    return "$code"
}

# command_once COMMAND...: runs a command that is one test, and notes for once_more that it failed. Its words have no
# spaces.
command_once() {
    "$@" || printf 'command\t-\t%s\n' "$*" >>"$first_runs"
}

# Runs what failed once more, alone. Fails if a test failed twice.
once_more() {
    local package source test again name code=0
    while IFS=$'\t' read -r package source test; do
        if [ "$package" = command ]; then
            read -ra again <<<"$test"
            name=$test
        else
            again=(run_tests "$package" "$source" --exact "$test")
            name="$package: $test"
        fi
        printf '\nonce more, alone: %s\n' "$test"
        if "${again[@]}" </dev/null; then
            printf 'passed\t%s\n' "$name" >>"$second_runs"
        else
            printf 'failed\t%s\n' "$name" >>"$second_runs"
            code=1
        fi
    done <"$first_runs"
    : >"$first_runs"
    return "$code"
}

# run_twice PACKAGE SOURCE ARGUMENT...: run_once, and once_more at once.
run_twice() {
    local code=0
    run_once "$@" || code=1
    once_more || code=1
    return "$code"
}

# results_of LOG: how many tests passed and how many failed in what run_twice printed, `none` if it has no result.
results_of() {
    awk '/^once more, alone: / { again = 1 }
        match($0, /^test result: .* [0-9]+ passed; [0-9]+ failed/) {
            if (!again) { passed += $4; failed += $6; results++ } else if ($4 == 1) { passed++; failed-- }
            again = 0
        }
        END { print passed + 0, results ? failed + 0 : "none" }' "$1"
}

# The last lines: what passed at its second run, which is to be mended or deleted, and what failed.
print_second_runs() {
    local result name
    while IFS=$'\t' read -r result name; do
        case "$result" in
            passed) printf 'passed at its second run: %s\n' "$name" ;;
            failed) printf 'failed: %s\n' "$name" ;;
        esac
    done < <(sort "$second_runs")
    rm -f "$first_runs" "$second_runs"
}
