#!/usr/bin/env bash
# Build dist/llmgw-<version>-linux-<arch>.pyz: one file that runs `server`, `agent`, `ctl` and `up` on this architecture,
# on every CPython from 3.11 to 3.14. Prints the file's path. SHA256SUMS and a bill of materials stand beside it.
#   scripts/build_pyz.sh                        for this machine's architecture
#   scripts/build_pyz.sh --arch aarch64         for another one: chosen from wheels, nothing is compiled
#   scripts/build_pyz.sh --with PACKAGE ...     with third-party providers inside (a requirement, a wheel or a directory);
#                                               goes to dist/with-PACKAGE/, and is only as fixed as the index is
#   --out DIR   elsewhere than dist/            --force   although nothing changed
# The same bytes come out wherever and whenever it runs: versions and digests are in requirements.lock.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
cache=${LLMGW_BUILD_CACHE:-.cache/build}
mkdir -p "$cache"
venv=$cache/venv
exec 9>"$cache/lock"
flock 9 # two builds at once would write one file
stamp=$(cksum <requirements-build.lock)
if ! [ -x "$venv/bin/shiv" ] || [ "$(cat "$venv/.stamp" 2>/dev/null)" != "$stamp" ]; then
    python=$(find_python)
    say "making the build's virtual environment"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --disable-pip-version-check -qq --require-hashes -r requirements-build.lock >&2
    printf '%s\n' "$stamp" >"$venv/.stamp"
fi
exec "$venv/bin/python" -I scripts/lib_build.py --cache "$cache" "$@"
