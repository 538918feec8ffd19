"""Unpack every archive of a directory and say what came of it: run by each interpreter, with nothing but attrs.

python unpack_each.py CORPUS JAIL      one JSON line per archive
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import stat
import sys
import time
from pathlib import Path

from llmgw.errors import LlmgwError
from llmgw.install.unpack import unpack


def snapshot(root: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(root.rglob("*")):
        info = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(info.st_mode) else ""
        found[str(path.relative_to(root))] = (info.st_mode, info.st_mtime_ns, info.st_size, info.st_nlink, content)
    return found


def strange(out: Path) -> list[str]:
    """What must never be in an unpacked tree: links that lead out, other modes, owners or kinds."""
    odd = []
    for path in [out, *out.rglob("*")]:
        info = path.lstat()
        if stat.S_ISLNK(info.st_mode):
            goal = path.resolve()
            if not goal.is_relative_to(out.resolve()) or not goal.is_file():
                odd.append(f"{path.name} leads to {goal}")
            continue
        if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)):
            odd.append(f"{path.name} is of another kind")
        if stat.S_IMODE(info.st_mode) not in (0o755, 0o644) or info.st_uid != os.geteuid():
            odd.append(f"{path.name} has mode {stat.S_IMODE(info.st_mode):o} of {info.st_uid}")
    return odd


def attempt(archive: Path, out: Path) -> dict[str, object]:
    started = time.process_time()
    try:
        result = unpack(archive, out)
        told: dict[str, object] = {"verdict": "accepted", "words": "", "files": result.files, "strange": strange(out)}
    except LlmgwError as error:
        told = {"verdict": "refused", "code": error.code, "words": error.words(), "strange": []}
    except BaseException as error:  # anything else is a finding, and is told as one
        told = {"verdict": "crashed", "words": f"{type(error).__name__}: {error}", "strange": []}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {**told, "cpu_s": time.process_time() - started, "rss_mib": peak / 1024}


def in_child(archive: Path, out: Path) -> dict[str, object]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.write(writer, json.dumps(attempt(archive, out)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(data) if data else {"verdict": "died", "words": "", "strange": []}


def main() -> None:
    corpus, jail = Path(sys.argv[1]), Path(sys.argv[2])
    outside = jail / "outside"
    outside.mkdir(parents=True)
    (outside / "precious").write_text("precious")
    (outside / "precious").chmod(0o600)
    os.umask(0)
    for each in json.loads((corpus / "cases.json").read_text()):
        before = snapshot(jail)
        out = jail / "out"
        told = in_child(corpus / each["file"], out)
        left = snapshot(out) if told["verdict"] == "accepted" else {}
        if told["verdict"] == "accepted":
            import shutil

            shutil.rmtree(out)
        told["untouched"] = snapshot(jail) == before and not Path("/abs").exists()
        told["modes"] = {name: stat.S_IMODE(int(str(entry[0]))) for name, entry in left.items()}
        print(json.dumps({**each, "told": told}), flush=True)


if __name__ == "__main__":
    main()
