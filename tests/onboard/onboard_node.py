"""A bare machine: own root (a throw-away layer over this one's), own processes, a real sshd, a real systemd.

Everything it changes is in its layer. It shares this machine's loopback, so that servers and engines reach one another.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from free_ports import free_port

# A node may do what root of a machine does, but not to the machine it is on.
DROPPED = "-sys_time,-sys_module,-sys_rawio,-syslog,-mac_admin,-mac_override,-wake_alarm,-block_suspend"
NEEDED = ("/usr/sbin/sshd", "unshare", "setpriv", "ssh", "ssh-keygen")

# The first process of a node: makes its root out of two layers, leaves this machine's behind, becomes its init.
BOOT = r"""
set -eu
exec </dev/null >>"$NODE/console.log" 2>&1
root=$NODE/root
mount --make-rprivate /
mount -t overlay node -o "lowerdir=$NODE/lower:/,upperdir=$NODE/upper,workdir=$NODE/work" "$root"
mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o nosuid,nodev,noexec,ro sysfs "$root/sys"
mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o nosuid,mode=755 dev "$root/dev"
for each in "null 1 3" "zero 1 5" "full 1 7" "random 1 8" "urandom 1 9" "tty 5 0"; do
    set -- $each
    mknod -m 666 "$root/dev/$1" c "$2" "$3"
done
[ ! -e "$root/proc/sysrq-trigger" ] || mount --bind "$root/dev/null" "$root/proc/sysrq-trigger"
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o nosuid,noexec,newinstance,ptmxmode=666,mode=620,gid=5 devpts "$root/dev/pts"
mount -t tmpfs -o nosuid,nodev,mode=1777 shm "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
for each in 0:stdin 1:stdout 2:stderr; do ln -s "fd/${each%:*}" "$root/dev/${each#*:}"; done
mount -t tmpfs -o nosuid,nodev,mode=755 run "$root/run"
mount -t tmpfs -o nosuid,nodev,mode=1777 tmp "$root/tmp"
mkdir -p "$root/run/sshd" "$root$SHARED"
mount --bind "$SHARED" "$root$SHARED"
mount -o remount,bind,ro "$root$SHARED"
hostname "$NAME"
cd "$root"
mkdir -p .host
pivot_root . .host
cd /
umount -l /.host
rmdir /.host
set -- env -i container=llmgw-test PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
if [ "$INIT" = systemd ]; then exec "$@" /lib/systemd/systemd; fi
exec "$@" /bin/sh -c '/usr/sbin/sshd -f /etc/node-sshd.conf
trap "exit 0" TERM INT
while :; do sleep 3600 & wait $!; done'
"""

SSHD_UNIT = """[Service]
ExecStart=/usr/sbin/sshd -D -f /etc/node-sshd.conf
KillMode=process
"""
TARGET = "[Unit]\nRequires=basic.target node-sshd.service\nAfter=basic.target\nAllowIsolate=yes\n"


def missing() -> str:
    """Why there can be no node here; "" when there can."""
    if os.geteuid() != 0:
        return "a node of its own needs root"
    lacking = [name for name in NEEDED if shutil.which(name) is None]
    return (
        f"missing: {', '.join(lacking)} (apt-get install openssh-server openssh-client util-linux)" if lacking else ""
    )


class Node:
    """One bare machine.

    Args:
        directory: for its layers and its keys; on a file system that can hold the upper layer of an overlay.
        shared: a directory both see, read-only in the node.
        init: `systemd`, or `plain` for a machine without.
    """

    def __init__(self, directory: Path, shared: Path, *, name: str = "bare", init: str = "systemd") -> None:
        if init == "systemd" and not Path("/lib/systemd/systemd").exists():
            pytest.skip("systemd is not installed here")
        self.directory, self.name, self.init, self.port = directory, name, init, free_port()
        self.keys = directory / "keys"
        for part in ("keys", "lower", "upper", "work", "root"):
            (directory / part).mkdir(parents=True, exist_ok=True)
        self.lower = directory / "lower"
        self._keys()
        self._prepare()
        env = {"NODE": str(directory), "NAME": name, "INIT": init, "SHARED": str(shared), "PATH": os.environ["PATH"]}
        unshare = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--cgroup", "--fork", "--kill-child"]
        cgroup = _cgroup(name)
        enter = f'echo $$ >"{cgroup}/cgroup.procs"; ' if cgroup else ""
        argv = ["sh", "-c", f'{enter}exec "$@"', "sh", "setpriv", f"--bounding-set={DROPPED}", "--inh-caps=-all"]
        self._cgroup = cgroup
        self._process = subprocess.Popen([*argv, *unshare, "sh", "-c", BOOT], env=env, start_new_session=True)
        self._await_sshd()

    def _keys(self) -> None:
        for name in ("host", "user"):
            argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", self.keys / name]
            subprocess.run(argv, check=True)
        self.known_hosts = self.keys / "known_hosts"
        self.trust((self.keys / "host.pub").read_text())
        self.config = self.keys / "ssh_config"
        self.config.write_text(
            f"Host *\nHostName 127.0.0.1\nPort {self.port}\nHostKeyAlias node\nUserKnownHostsFile {self.known_hosts}\n"
            f"GlobalKnownHostsFile /dev/null\nIdentityFile {self.keys / 'user'}\nIdentitiesOnly yes\n"
        )

    def trust(self, public: str) -> None:
        """What the operator's known_hosts says of this node."""
        self.known_hosts.write_text(f"node {public}")

    def _prepare(self) -> None:
        """What this machine has and a bare one has not is hidden; what a machine with sshd has is put there."""
        self.write("/etc/node-host-key", (self.keys / "host").read_text(), 0o600)
        self.write("/etc/node-authorized", (self.keys / "user.pub").read_text(), 0o644)
        self.write("/etc/hostname", f"{self.name}\n")
        self.write(
            "/etc/node-sshd.conf",
            f"ListenAddress 127.0.0.1\nPort {self.port}\nHostKey /etc/node-host-key\n"
            "AuthorizedKeysFile /etc/node-authorized\nPasswordAuthentication no\nPermitRootLogin yes\n"
            "PidFile none\nUsePAM no\nStrictModes no\nMaxStartups 100\n",
        )
        # an empty file in place of a directory hides it: units of this machine are not started
        self.write("/etc/systemd/system/node.target", TARGET)
        self.write("/etc/systemd/system/node-sshd.service", SSHD_UNIT)
        (self.lower / "etc/systemd/system/default.target").symlink_to("node.target")
        for unit in ("getty@tty1", "systemd-udevd", "systemd-timesyncd", "systemd-logind", "apparmor", "networking"):
            (self.lower / f"etc/systemd/system/{unit}.service").symlink_to("/dev/null")
        self.write("/etc/systemd/journald.conf.d/test.conf", "[Journal]\nStorage=volatile\n")

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Put a file into the node's root before it starts (as root's of the node it can be changed later)."""
        target = self.lower / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)

    def _await_sshd(self) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as talk:
                talk.settimeout(2)
                if talk.recv(4) == b"SSH-":
                    return
            if self._process.poll() is not None:
                break
            time.sleep(0.05)
        said = (self.directory / "console.log").read_text(errors="replace")[-2000:]
        self.stop()
        pytest.skip(f"a node does not start on this machine: {said}")

    def sh(self, script: str, user: str = "root", check: bool = True) -> str:
        """Run a script on the node as an operator would."""
        argv = ["ssh", "-F", self.config, "-o", "BatchMode=yes", "--", f"{user}@node", script]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def changed(self) -> dict[str, str]:
        """Every file in the node's own layer, by path, with what it is: what the node's life has changed so far."""
        found = {}
        noise = (
            "var/log",
            "var/lib/systemd",
            "root/.ssh",
            "var/cache",
            "etc/machine-id",
            "etc/.pwd",
            "var/tmp/systemd",
        )
        for path in sorted((self.directory / "upper").rglob("*")):
            inside = path.relative_to(self.directory / "upper").as_posix()
            if inside.startswith(noise) or path.is_dir():
                continue
            kind = f"link {path.readlink()}" if path.is_symlink() else f"{path.stat().st_mode:o} {path.stat().st_size}"
            found[inside] = kind
        return found

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
        if self._cgroup:
            _end_cgroup(self._cgroup)


def _cgroup(name: str) -> Path | None:
    """A control group of its own in the v2 hierarchy, so that the node's systemd manages below it and nowhere else."""
    for base in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")):
        if (base / "cgroup.procs").exists() and (base / "cgroup.controllers").exists():
            made = base / f"llmgw-test-{name}-{os.getpid()}-{time.monotonic_ns()}"
            made.mkdir()
            return made
    return None


def _end_cgroup(directory: Path) -> None:
    deadline = time.monotonic() + 10
    while directory.exists() and time.monotonic() < deadline:
        for procs in [directory / "cgroup.procs", *directory.rglob("cgroup.procs")]:
            with contextlib.suppress(OSError):
                for pid in procs.read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
        for each in sorted(directory.rglob("*"), reverse=True):
            if each.is_dir():
                with contextlib.suppress(OSError):
                    each.rmdir()
        with contextlib.suppress(OSError):
            directory.rmdir()
        time.sleep(0.02)


if __name__ == "__main__":  # for looking around by hand: `python onboard_node.py DIR`
    node = Node(Path(sys.argv[1]), Path("/usr/share"))
    print(f"ssh -F {node.config} root@node")
    signal.pause()
