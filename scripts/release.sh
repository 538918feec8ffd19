#!/usr/bin/env bash
# Make a release by hand; .github/workflows/release.yml does the same. Builds once, tests that very file on every Python
# there is, and leaves everything to upload in dist/release/.
#   scripts/release.sh                     build, test, checksums
#   scripts/release.sh --sign KEYFILE      also sign SHA256SUMS with an ssh key (SHA256SUMS.sig)
#   scripts/release.sh --skip-tests        for looking at what would be uploaded
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
key="" tests=yes out=dist/release
while [ $# -gt 0 ]; do
    case $1 in
    --sign) key=${2:?--sign needs a key file}; shift ;;
    --skip-tests) tests=no ;;
    *) die "unknown option $1" ;;
    esac
    shift
done
venv=${LLMGW_VENV:-.venv}
make_venv "$venv" "[test,build]"
version=$("$venv/bin/python" -c 'import llmgw; print(llmgw.__version__)')
tag=$(git describe --exact-match --tags 2>/dev/null || true)
if [ -n "$tag" ] && [ "$tag" != "v$version" ]; then
    die "the tag is $tag, but src/llmgw/__init__.py says $version"
fi
[ -z "$(git status --porcelain --untracked-files=no)" ] || say "note: the working tree has changes that are in no commit"
grep -qF "## [$version]" CHANGELOG.md || say "note: CHANGELOG.md has no section [$version] yet"

rm -rf "$out"
for arch in x86_64 aarch64; do
    scripts/build_pyz.sh --arch "$arch" --out "$out" --force >/dev/null
done
if [ "$tests" = yes ]; then
    say "testing $out/llmgw-$version-linux-$(uname -m).pyz"
    LLMGW_TEST_PYZ=$PWD/$out/llmgw-$version-linux-$(uname -m).pyz "$venv/bin/pytest" tests/packaging tests/onboard
fi
(cd "$out" && sha256sum -c --quiet SHA256SUMS)
if [ -n "$key" ]; then
    rm -f "$out/SHA256SUMS.sig"
    ssh-keygen -q -Y sign -f "$key" -n llmgw-release "$out/SHA256SUMS"
fi
say "ready to upload to v$version:"
ls "$out"
