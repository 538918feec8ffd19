#!/usr/bin/env bash
# Everything that has to hold, in one command: style, types, walls, all tests, and the flows against the built executable.
#   scripts/test.sh              everything
#   scripts/test.sh tests/wire   checks, then only these tests
# Needs: Python >= 3.11; installs the rest (Python packages; Debian packages when it is root).
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
venv=${LLMGW_VENV:-.venv}
need_debian_packages "the real llama-server in the tests" libgomp1 libssl3 libstdc++6 || true
need_debian_packages "crash points and bare nodes in the tests" strace iproute2 util-linux || true
need_debian_packages "bare nodes in the tests" openssh-server openssh-client systemd sudo || true
make_venv "$venv" "[test,build]"
bin=$venv/bin

say "style: ruff"
"$bin/ruff" check -q src tests scripts
"$bin/ruff" format -q --check src tests scripts
say "types: mypy --strict"
"$bin/mypy" --no-error-summary
say "walls: import-linter"
"$bin/lint-imports" --no-cache >/dev/null || { "$bin/lint-imports" --no-cache; exit 1; }

if [ $# -gt 0 ]; then
    exec "$bin/pytest" "$@"
fi
say "the executable: shiv"
scripts/build_pyz.sh >/dev/null
say "tests"
"$bin/python" scripts/test_assets.py "${LLMGW_TEST_CACHE:-.cache/test-assets}" >/dev/null
exec "$bin/pytest" -n "${LLMGW_TEST_JOBS:-2}" --dist loadfile
