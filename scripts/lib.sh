# Shared by the scripts: a Python that is new enough, and a virtual environment with llmgw in it.

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# Debian packages: installed when we are root (or sudo asks no password), else named.
need_debian_packages() { # reason package...
    local reason=$1 missing=() name
    shift
    command -v dpkg-query >/dev/null || return 0
    for name in "$@"; do
        dpkg-query -W -f='${Status}' "$name" 2>/dev/null | grep -q '^install ok installed' || missing+=("$name")
    done
    [ ${#missing[@]} -eq 0 ] && return 0
    local sudo=()
    if [ "$(id -u)" != 0 ]; then
        if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
            sudo=(sudo)
        else
            say "missing for $reason: ${missing[*]} (run: sudo apt-get install ${missing[*]})"
            return 1
        fi
    fi
    say "installing for $reason: ${missing[*]}"
    local get=(env DEBIAN_FRONTEND=noninteractive apt-get -y -q --no-install-recommends -o DPkg::Lock::Timeout=300)
    "${sudo[@]}" "${get[@]}" install "${missing[@]}" >/dev/null 2>&1 ||
        { "${sudo[@]}" "${get[@]}" update >/dev/null && "${sudo[@]}" "${get[@]}" install "${missing[@]}" >&2; }
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return 0
        fi
    done
    die "Python 3.11 or newer is needed (Debian 12, Ubuntu 24.04 have it: apt-get install python3; elsewhere set PYTHON=/path/to/python3.11)"
}

# make_venv DIR EXTRAS: a virtual environment with this checkout in it; quick when nothing changed since the last time.
make_venv() {
    local dir=$1 extras=$2 python stamp stamps
    python=$(find_python)
    if [ ! -x "$dir/bin/python" ]; then
        "$python" -c 'import ensurepip' 2>/dev/null ||
            need_debian_packages "virtual environments" python3-venv "python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv" ||
            die "this Python cannot make virtual environments"
        say "making a virtual environment in $dir"
        "$python" -m venv "$dir"
    fi
    stamp="$(cksum <pyproject.toml) $PWD"
    # what was installed with more extras serves a caller who asks for fewer
    stamps=("$dir/.llmgw-stamp$extras")
    [ -n "$extras" ] || stamps=("$dir"/.llmgw-stamp*)
    if [ ! -x "$dir/bin/llmgw" ] || ! grep -qsxF "$stamp" "${stamps[@]}"; then
        say "installing llmgw and what it needs"
        "$dir/bin/python" -m pip install --disable-pip-version-check -q --editable ".$extras" ||
            die "pip could not install llmgw; its own words are above"
        printf '%s\n' "$stamp" >"$dir/.llmgw-stamp$extras"
    fi
}
