#!/usr/bin/env bash
# Makes the recording in README anew: runs the commands of the tape beside this file in a terminal, on a Redis of its own,
# and draws what they print as light.svg and dark.svg, by termtosvg-ng. Needs cargo, redis-server, python3 with venv, and
# the Python registry. Takes a minute beside the build; the machine should do nothing else meanwhile.
#   bash .github/recording/record.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
here=$PWD/.github/recording

cargo build --quiet --release -p tollgate-cli --features full
tool=$(realpath "${CARGO_TARGET_DIR:-target}/release")

folder=$(mktemp -d)
redis=
# shellcheck disable=SC2317  # Called by the trap.
finish() {
    [ -z "$redis" ] || { kill "$redis"; wait "$redis" || true; }
    rm -rf "$folder"
}
trap finish EXIT
python3 -m venv "$folder/python"
"$folder/python/bin/python" -m pip install --quiet --disable-pip-version-check \
    termtosvg-ng==1.4.1 lxml==6.1.3 pyte==0.8.2 wcwidth==0.9.4

mkdir "$folder/played"
ln -s "$PWD/tests/data/access-combined.log" "$folder/played/access.log"
redis-server --port 0 --unixsocket "$folder/redis" --save '' --appendonly no >"$folder/redis.log" &
redis=$!
until [ -S "$folder/redis" ]; do kill -0 "$redis"; sleep 0.1; done

PATH=$tool:$PATH REDIS=unix:$folder/redis \
    "$folder/python/bin/python" "$here/record.py" "$here/tape" "$folder/played" "$folder/cast"
for look in light dark; do
    "$folder/python/bin/termtosvg" render "$folder/cast" "$here/$look.svg" --template "$here/template.svg" \
        --theme "$here/$look.json" --min-frame-duration 100 --loop-delay 5000
done
ls -l "$here"/{light,dark}.svg
