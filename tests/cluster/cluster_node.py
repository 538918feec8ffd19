"""One bare node on this machine: own root without libgomp1, own network, own package source, GitHub under its names.

    head   a network namespace with llmgw's server, the package source and the stand-in for GitHub
    node   namespaces of its own for mounts, processes, host name and network; its root is an overlay of this machine's

Nothing leads out of either. Everything it makes goes with `close`.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trustme
import yaml

from llmgw.pki import authority as pki

HERE = Path(__file__).resolve().parent
HEAD, NODE = "10.213.77.1", "10.213.77.2"
NAMES = ("api.github.com", "github.com", "release-assets.githubusercontent.com")
PACKAGES = "packages.node.test"
PACKAGE = "libgomp1"
ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/root"}
NEEDED = ("ip", "unshare", "nsenter", "dpkg-deb", "apt-get", "dpkg-query")


def why_not() -> str:
    """Why no node can be made here, "" when one can."""
    if os.geteuid() != 0:
        return "bare nodes need root"
    if missing := [each for each in NEEDED if shutil.which(each) is None]:
        return f"bare nodes need {', '.join(f'`{each}`' for each in missing)}"
    if run("dpkg-query", "-W", PACKAGE, code=None).returncode != 0:
        return f"{PACKAGE} is not installed here: its package cannot be made"
    tried = run("unshare", "--mount", "--net", "--pid", "--fork", "--uts", "--ipc", "true", code=None)
    if tried.returncode != 0:
        return f"namespaces are not allowed here: {tried.stderr.strip()}"
    mount = "mount -t tmpfs t /mnt && mkdir /mnt/u /mnt/w /mnt/r && " \
        "mount -t overlay o -o lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w /mnt/r"  # fmt: skip
    tried = run("unshare", "--mount", "sh", "-c", mount, code=None)
    return f"an overlay of `/` cannot be mounted here: {tried.stderr.strip()}" if tried.returncode else ""


def run(*argv: str, code: int | None = 0, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run to the end; `code` None takes any."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, env=ENV)
    assert code is None or done.returncode == code, f"{argv}: {done.stdout}{done.stderr}"
    return done


def wait(condition: Callable[[], Any], timeout_s: float, what: str, detail: Callable[[], str] = lambda: "") -> Any:
    """The first truthy value, or a failure that says what was awaited."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}\n{detail()}"
        time.sleep(0.03)
    return value


class Lab:
    """The head and one node."""

    def __init__(self, root: Path, release: Path) -> None:
        self.root = root
        self.release = release
        self.head, self.netns = f"llmgw-h{os.getpid()}", f"llmgw-n{os.getpid()}"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.init = 0
        self.certificates = trustme.CA()
        self.pki = root / "pki"

    # making it

    def up(self) -> None:
        """Networks, package source, GitHub, the node, llmgw's server and agent."""
        for name in (self.head, self.netns):
            run("ip", "netns", "add", name)
        run("ip", "-n", self.head, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", self.netns)
        for name, address in ((self.head, HEAD), (self.netns, NODE)):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        self._package_source()
        self._github()
        self._boot()

    def _package_source(self) -> None:
        self.repo = self.root / "repo"
        self.repo.mkdir()
        package(self.root / "package", self.repo)
        self.start("packages", self._in_head(
            sys.executable, "-m", "http.server", "80", "--bind", HEAD, "--directory", str(self.repo)))  # fmt: skip

    def _github(self) -> None:
        certificate = self.root / "github.pem"
        issued = self.certificates.issue_cert(*NAMES)
        certificate.write_bytes(
            issued.private_key_pem.bytes() + b"".join(each.bytes() for each in issued.cert_chain_pems)
        )
        self.start("github", self._in_head(
            sys.executable, str(HERE / "cluster_github.py"), HEAD, str(certificate), str(self.release)))  # fmt: skip

    def _boot(self) -> None:
        hosts, ca, work = self.root / "hosts", self.root / "ca.pem", self.root / "node"
        hosts.write_text(f"127.0.0.1 localhost bare\n{HEAD} {PACKAGES} {' '.join(NAMES)}\n")
        self.certificates.cert_pem.write_to_path(ca)
        work.mkdir()
        self.start("node", [
            "ip", "netns", "exec", self.netns,
            "unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child",
            "bash", str(HERE / "node_boot.sh"), str(work), "bare", str(hosts), str(ca),
        ])  # fmt: skip
        wait(lambda: "up" in self.log("node").splitlines(), 20, "the node", lambda: self.log("node"))
        self.init = wait(self._find_init, 5, "the node's first process")
        status = Path("/var/lib/dpkg/status").read_text(errors="surrogateescape")
        self.write("/var/lib/dpkg/status", without(status, PACKAGE))

    def _find_init(self) -> int:
        for pid in run("ip", "netns", "pids", self.netns).stdout.split():
            with contextlib.suppress(OSError):
                if re.search(r"^NSpid:\t\d+\t1$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE):
                    return int(pid)
        return 0

    def start_server(self, **extra: Any) -> None:
        """llmgw's server in the head."""
        pki.init_ca(self.pki, now=time.time())
        pki.issue_server(self.pki, "server", [HEAD], now=time.time())
        pki.issue_node(self.pki, "bare", now=time.time())
        self.socket = self.root / "s" / "admin.sock"
        self.token = self.root / "s" / "admin.token"
        self.socket.parent.mkdir()
        config = {
            "agents": {"listen": f"{HEAD}:7443", "tls": self._tls("server")},
            "http": {"listen": f"{HEAD}:8080", "admin_token_file": str(self.token)},
            "state": str(self.socket.parent / "state.db"),
            **extra,
        }
        path = self.root / "server.yaml"
        path.write_text(yaml.safe_dump(config))
        self.start("server", self._in_head(sys.executable, "-m", "llmgw", "server", "-c", str(path)))
        wait(lambda: self.api("/status", quiet=True), 40, "the server", lambda: self.log("server"))

    def start_agent(self, **extra: Any) -> None:
        """llmgw's agent in the node."""
        config = {
            "server": f"https://{HEAD}:7443",
            "node_id": "bare",
            "tls": self._tls("bare"),
            "heartbeat_interval": "200ms",
            "reconnect_base": "100ms",
            "reconnect_max": "500ms",
            **extra,
        }
        path = self.root / "agent.yaml"
        path.write_text(yaml.safe_dump(config))
        self.start("agent", self.inside(sys.executable, "-m", "llmgw", "agent", "-c", str(path)))

    def _tls(self, name: str) -> dict[str, str]:
        files = {"ca": "ca.pem", "cert": f"{name}.pem", "key": f"{name}-key.pem"}
        return {key: str(self.pki / file) for key, file in files.items()}

    # using it

    def _in_head(self, *argv: str) -> list[str]:
        return ["ip", "netns", "exec", self.head, *argv]

    def inside(self, *argv: str) -> list[str]:
        """The command line that runs `argv` in the node."""
        return ["nsenter", "-t", str(self.init), "-m", "-u", "-i", "-n", "-p", *argv]

    def node(self, *argv: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run in the node, to its end."""
        return run(*self.inside("env", "DEBIAN_FRONTEND=noninteractive", *argv), code=code)

    def ctl(self, *argv: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """`llmgw ctl` in the head."""
        where = ("--server", f"http://{HEAD}:8080", "--token-file", str(self.token))
        return run(*self._in_head(sys.executable, "-m", "llmgw", "ctl", *where, *argv), code=code)

    def write(self, path: str, text: str) -> None:
        """Put a file into the node."""
        data = text.encode(errors="surrogateescape")
        subprocess.run(self.inside("dd", "status=none", f"of={path}"), input=data, check=True, env=ENV)

    def start(self, name: str, argv: list[str]) -> subprocess.Popen[bytes]:
        """Start, with its output in NAME.log."""
        with (self.root / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=ENV)
        self.processes.append(process)
        return process

    def log(self, name: str) -> str:
        """What NAME printed so far."""
        path = self.root / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def api(self, path: str, *, quiet: bool = False) -> Any:
        """GET below /api/v1 through the server's own socket."""
        connection = http.client.HTTPConnection("localhost", timeout=20)
        try:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.connect(str(self.socket))
            token = self.token.read_text().strip()
            connection.request("GET", f"/api/v1{path}", headers={"Authorization": f"Bearer {token}"})
            answer = connection.getresponse()
            data = answer.read()
            assert answer.status == 200, data
            return json.loads(data)
        except (OSError, http.client.HTTPException, AssertionError):
            if quiet:
                return None
            raise
        finally:
            connection.close()

    def engine(self) -> dict[str, Any]:
        """What the server knows of the node's llama.cpp."""
        found = (self.api("/engines", quiet=True) or {}).get("engines", ())
        return next((each for each in found if each["node_id"] == "bare"), {})

    def await_engine(self, state: str, words: str = "", timeout_s: float = 80) -> dict[str, Any]:
        """Wait until the server shows the engine in a state, with the words."""
        return wait(
            lambda: (e := self.engine()).get("state") == state and words in e["words"] and e,
            timeout_s,
            f"{state} with `{words}`",
            lambda: f"{self.engine()}\n{self.log('agent')[-3000:]}\n{self.log('server')[-1500:]}",
        )

    def sources(self, *lines: str) -> None:
        """The node's package sources, and no lists of former ones."""
        self.node("sh", "-c", "rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin; mkdir -p /var/lib/apt/lists/partial")
        self.write("/etc/apt/sources.list", "".join(f"{line}\n" for line in lines))

    # ending it

    def close(self) -> None:
        """End every process and take the networks away."""
        for name in (self.netns, self.head):
            for _ in range(3):
                for pid in run("ip", "netns", "pids", name, code=None).stdout.split():
                    with contextlib.suppress(OSError):
                        os.kill(int(pid), signal.SIGKILL)
        for process in self.processes:
            process.kill()
            process.wait(20)
        for name in (self.netns, self.head):
            run("ip", "netns", "delete", name, code=None)


def without(status: str, package: str) -> str:
    """dpkg's database without a package and all that needs it: their files stay, dpkg does not know them."""
    blocks = {}
    for block in status.split("\n\n"):
        if match := re.search(r"^Package: (\S+)", block, re.MULTILINE):
            needs = ",".join(re.findall(r"^(?:Pre-)?Depends: (.*)$", block, re.MULTILINE))
            names = {re.split(r"[\s:(]", each.strip())[0] for each in re.split(r"[,|]", needs)}
            blocks[match[1]] = (block, names)
    gone = {package}
    while more := {name for name, (_, needs) in blocks.items() if needs & gone} - gone:
        gone |= more
    return "\n\n".join(block for name, (block, _) in blocks.items() if name not in gone) + "\n\n"


def package(build: Path, repo: Path) -> None:
    """Make the package again out of the files it has here, and a directory that apt takes as a source."""
    described = run("dpkg-query", "-s", PACKAGE).stdout
    kept = ("Package", "Version", "Architecture", "Multi-Arch", "Depends", "Maintainer")
    fields = [line for line in described.splitlines() if line.partition(":")[0] in kept]
    control = "\n".join([*fields, "Description: made again for a test"]) + "\n"
    (build / "DEBIAN").mkdir(parents=True)
    (build / "DEBIAN" / "control").write_text(control)
    for line in run("dpkg-query", "-L", PACKAGE).stdout.splitlines():
        source, target = Path(line), build / line.lstrip("/")
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    made = repo / f"{PACKAGE}.deb"
    run("dpkg-deb", "--root-owner-group", "-Znone", "--build", str(build), str(made))
    digest = hashlib.sha256(made.read_bytes()).hexdigest()
    (repo / "Packages").write_text(
        f"{control}Filename: ./{made.name}\nSize: {made.stat().st_size}\nSHA256: {digest}\n\n"
    )
