#!/usr/bin/env bash
# Write requirements.lock (what goes into the executable) and requirements-build.lock (what builds it) anew.
# One lock for every architecture and every Python from the oldest on; run it to take up new versions, then the tests.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
venv=.cache/lock-venv
if [ ! -x "$venv/bin/uv" ]; then
    "$(find_python)" -m venv "$venv"
    "$venv/bin/python" -m pip install --disable-pip-version-check -q uv
fi
lock() { # output title input
    say "locking $1"
    local made
    made=$("$venv/bin/uv" pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
        --no-header --no-annotate --allow-unsafe "$3")
    printf '%s\n%s\n' "# $2: exact versions and digests. Made by scripts/lock.sh; do not edit." "$made" >"$1"
}
lock requirements.lock "What the executable is built from" pyproject.toml
lock requirements-build.lock "What builds the executable" scripts/build-requirements.in
