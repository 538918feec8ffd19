"""The first stage: what the machine is. Nothing is changed; what the machine says is read as a stranger's words."""

from __future__ import annotations

import re

from attrs import frozen

from llmgw.ctl.onboarding.remote import Remote
from llmgw.domain.ids import check_node_id
from llmgw.errors import LlmgwError, NameInvalid

ARCHES = ("x86_64", "aarch64")
_NEED_BYTES = 200 << 20

SCRIPT = r"""
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
say() { printf '%s=%s\n' "$1" "$2"; }
say arch "$(uname -m)"
say system "$(uname -s)"
say host "$(hostname 2>/dev/null || cat /proc/sys/kernel/hostname)"
[ ! -r /etc/os-release ] || say os "$(. /etc/os-release; printf '%s' "$PRETTY_NAME")"
[ ! -r /etc/os-release ] || say os_id "$(. /etc/os-release; printf '%s' "$ID")"
say libc "$(getconf GNU_LIBC_VERSION 2>/dev/null)"
say uid "$(id -u)"
if [ "$(id -u)" = 0 ]; then say root yes
elif sudo -n true 2>/dev/null; then say root sudo
else say root no; fi
for name in python3.14 python3.13 python3.12 python3.11 python3; do
    path=$(command -v "$name") || continue
    say python "$("$path" -IS -c '
import sys, ssl, zlib, ctypes, sqlite3
print("%d.%d %s" % (*sys.version_info[:2], sys.executable))' 2>/dev/null || echo "broken $path")"
done
[ ! -d /run/systemd/system ] || say systemd yes
say free "$(df -Pk /usr/local 2>/dev/null | awk 'NR==2 {print $4}')"
current=/usr/local/lib/llmgw/current
if [ -e "$current" ]; then
    say current "$(basename "$(readlink -f "$current")")"
    say current_sha256 "$(sha256sum <"$current" | cut -d' ' -f1)"
fi
command -v sha256sum >/dev/null || say lacks sha256sum
say end yes
"""


class Unfit(LlmgwError):
    """The machine cannot become a node; nothing was changed on it."""

    code = "node-unfit"


@frozen
class Looked:
    """What a machine is.

    Args:
        python: path of the newest usable interpreter.
        root: `yes` or `sudo`.
        current: file name and sha256 of the llmgw that is installed, "" when there is none.
    """

    host: str
    arch: str
    os: str
    python: str
    python_version: str
    root: str
    systemd: bool
    current: str = ""
    current_sha256: str = ""

    def words(self) -> str:
        """One line."""
        manager = "systemd" if self.systemd else "no systemd"
        return f"{self.arch}, {self.os or 'unknown system'}, Python {self.python_version}, {manager}"


def look(remote: Remote) -> Looked:
    """Look at a machine.

    Raises:
        RemoteError: it cannot be reached.
        Unfit: it cannot become a node; says why and what to do.
    """
    said = remote.run(SCRIPT, timeout_s=60).stdout
    facts: dict[str, list[str]] = {}
    for line in said[:65536].splitlines():
        name, mark, value = line.partition("=")
        if mark and value and value.isprintable():
            facts.setdefault(name, []).append(value.strip()[:300])
    one = {name: values[0] for name, values in facts.items()}
    target, unchanged = f"`{remote.target}`", "nothing was changed on it"
    if "end" not in one:
        raise Unfit(f"cannot look at {target}", cause="its shell broke off", hint="log in and look at the shell")
    if one.get("system") != "Linux" or one.get("arch") not in ARCHES:
        raise Unfit(
            f"{target} cannot become a node",
            cause=f"there is no release for `{one.get('system', '?')} {one.get('arch', '?')}`; {unchanged}",
            hint=f"releases are for Linux on {' and '.join(ARCHES)}",
        )
    if not one.get("libc", "").startswith("glibc"):
        raise Unfit(f"{target} cannot become a node", cause=f"its C library is not glibc; {unchanged}")
    if one.get("root") not in ("yes", "sudo"):
        raise Unfit(
            f"{target} cannot become a node",
            cause=f"this user is not root and `sudo -n` does not work without a password; {unchanged}",
            hint="log in as root, or allow `sudo` without a password for this user",
        )
    version, python = _python(facts.get("python", []), target, unchanged, one.get("os_id", ""))
    if "lacks" in one:
        raise Unfit(f"{target} cannot become a node", cause=f"`{one['lacks']}` is missing; {unchanged}")
    free = one.get("free", "")
    if free.isdecimal() and int(free) * 1024 < _NEED_BYTES:
        raise Unfit(f"{target} cannot become a node", cause=f"/usr/local has less than 200 MiB left; {unchanged}")
    try:
        host = check_node_id(one.get("host", ""))
    except NameInvalid:
        host = ""
    current = one.get("current", "") if re.fullmatch(r"llmgw-[\w.+-]+\.pyz", one.get("current", "")) else ""
    sha256 = one.get("current_sha256", "") if re.fullmatch(r"[0-9a-f]{64}", one.get("current_sha256", "")) else ""
    return Looked(host, one["arch"], one.get("os", ""), python, version, one["root"], "systemd" in one, current, sha256)


def _python(found: list[str], target: str, unchanged: str, os_id: str) -> tuple[str, str]:
    seen = []
    for each in found:
        match = re.fullmatch(r"3\.(\d{1,2}) (/[A-Za-z0-9._/+-]+)", each)
        if match is not None and 11 <= int(match[1]) <= 14:
            return f"3.{match[1]}", match[2]
        seen.append(each.split(" ")[0] if match is not None else each[:60])
    raise Unfit(
        f"{target} cannot become a node",
        cause=f"llmgw needs Python 3.11 to 3.14, found {', '.join(seen) or 'none'}; {unchanged}",
        hint=_PYTHON_HINTS.get(os_id, "install Python 3.11 or newer beside the system's own, then run it again"),
    )


_PYTHON_HINTS = {
    "debian": "Debian 12 and newer have it: `apt-get install python3`",
    "ubuntu": "`apt-get install python3.11` (22.04) or `python3` (24.04)",
    "rhel": "`dnf install python3.12`",
    "rocky": "`dnf install python3.12`",
    "almalinux": "`dnf install python3.12`",
}
