# Sourced by the scripts in this folder, which define `fail`: the test programs, and where they are.

# Tests wait for servers most of the time, so more of them run at once than there are processors.
export RUST_TEST_THREADS=${RUST_TEST_THREADS:-$(($(getconf _NPROCESSORS_ONLN) * 2))}

# Which packages are named decides what their dependencies are built with. So every script names these: what one has
# built is there for the others. The tool's targets have `test = false`, and are named too.
tested=(--workspace --exclude tollgate-benches --exclude tollgate-public-api --all-features)
programs=(--lib --bin tollgate --test it)

# Builds all of them.
build_tests() {
    built=$(cargo test --quiet "${tested[@]}" "${programs[@]}" --no-run --message-format=json-render-diagnostics)
}

# run_tests PACKAGE SOURCE ARGUMENT...: runs the test program that was built from this file of the package, a folder, as
# cargo would.
run_tests() {
    local source program
    source=$(realpath "$1/$2")
    program=$(sed -n "s|.*\"src_path\":\"$source\".*\"test\":true},\"features\".*\"executable\":\"\([^\"]*\)\".*|\1|p" <<<"$built")
    [ -x "$program" ] || fail "$1/$2: expected one test program, got '$program'"
    (cd "$1" && exec "$program" --quiet "${@:3}")
}
