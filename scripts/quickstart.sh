#!/usr/bin/env bash
# From a clean clone to a chat answer: a virtual environment, llmgw, an engine it installs and proves, a small model.
#   scripts/quickstart.sh            keeps serving until Ctrl-C
#   scripts/quickstart.sh --once     exits 0 after the answer
# Every other option goes to `llmgw up` (see `llmgw up --help`).
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
venv=${LLMGW_VENV:-.venv}
make_venv "$venv" ""
exec "$venv/bin/llmgw" up "$@"
