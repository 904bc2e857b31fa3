#!/usr/bin/env bash
# Compares the public items of the libraries, with all of their features, with those listed in tests/public-api, so that
# no change of them goes unseen: about half a minute once the documentation was built.
#   bash tests/public_api.sh [--write]
# --write writes the lists anew. The items come from rustdoc's JSON, whose format changes between versions of Rust; if
# this Rust writes another than tests/public-api/Cargo.toml's reader knows, that is said and nothing compared.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { printf 'tests/public_api.sh: %s\n' "$*" >&2; exit "${code:-1}"; }
write=
case $#,${1-} in
    0,) ;;
    1,--write) write=1 ;;
    *) code=2 fail "expected --write or nothing, got $*" ;;
esac

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Only rustdoc is told that it may: told to all of cargo, that would build every dependency anew.
printf '#!/bin/sh\nRUSTC_BOOTSTRAP=1 exec rustdoc "$@"\n' >"$work/rustdoc"
chmod +x "$work/rustdoc"
RUSTDOC=$work/rustdoc RUSTDOCFLAGS='-Z unstable-options --output-format json' \
    cargo doc --quiet --no-deps --all-features --lib -p tollgate -p tollgate-record -p tollgate-cli -p tollgate-serve
cargo build --quiet -p tollgate-public-api

target=${CARGO_TARGET_DIR:-target} result=0
for library in tollgate tollgate-record tollgate-serve; do
    status=0
    "$target/debug/tollgate-public-api" "$target/doc/${library//-/_}.json" >"$work/$library.txt" || status=$?
    if [ "$status" -eq 3 ]; then
        printf 'tests/public_api.sh: NOT compared: %s writes another format than tests/public-api/Cargo.toml reads\n' \
            "$(rustc --version)" >&2
        exit 0
    fi
    [ "$status" -eq 0 ] || fail "$library: its items can't be listed"
    if [ -n "$write" ]; then
        cp "$work/$library.txt" "tests/public-api/$library.txt"
    elif ! diff -u "tests/public-api/$library.txt" "$work/$library.txt"; then
        result=1
    fi
done
[ "$result" -eq 0 ] || fail 'public items have changed: if that is meant, run it with --write, and say so in CHANGELOG.md'
