#!/usr/bin/env bash
# Build dist/llmgw-<version>-linux-<arch>.pyz: one file that runs `server`, `agent`, `ctl` and `up` on this architecture.
# Prints the file's path.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
venv=${LLMGW_VENV:-.venv}
[ -x "$venv/bin/shiv" ] || make_venv "$venv" "[test,build]"
python=$venv/bin/python
version=$("$python" -c 'import llmgw; print(llmgw.__version__)')
out=dist/llmgw-$version-linux-$(uname -m).pyz
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf build # setuptools would pack what an earlier build left there

"$python" -m pip install --disable-pip-version-check -q --no-compile --target "$work/site" .
# what nobody runs from inside the file, and what names the directory it was built in
rm -rf "$work/site/bin" "$work"/site/*.dist-info/{RECORD,INSTALLER,REQUESTED,direct_url.json}
find "$work/site/yaml" -name '_yaml*.so' -delete # pure Python is quick enough, and the library is 2.7 MB
chmod -R u=rwX,go=rX "$work/site"

mkdir -p dist
# -I: neither PYTHONPATH nor the current directory can put other code in our place; -S: nor the system's site-packages
"$venv/bin/shiv" --site-packages "$work/site" -e llmgw.cli:main -p '/usr/bin/env -S python3 -IS' --reproducible -o "$work/llmgw.pyz" >&2
mv "$work/llmgw.pyz" "$out"
echo "$out"
