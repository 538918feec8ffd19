#!/usr/bin/env python3
"""`kill -9` at every write, fsync, rename, unlink, mkdir, link and chmod of an installation, one after the other.

    crash_points.py [RELEASE_DIR]      every point of an installation, a replacement and a removal; prints the count
    crash_points.py --quick            five points of an installation

strace kills the installing process at the entry of its n-th call of each kind, so the call itself is not made. Then the
directory is looked at as the next agent looks at it: an engine is installed (every byte of it hashed) or absent, and
what the sweep leaves is nothing but records and their trees. Every tenth time the installation is run again to its end.
RELEASE_DIR is that of scripts/test_assets.py when none is given.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from install_once import NAME, VERSION  # noqa: E402

from llmgw.install.store import Store  # noqa: E402
from llmgw.system.clock import RealClock  # noqa: E402

CALLS = (
    "write", "pwrite64", "fsync", "fdatasync", "rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir",
    "mkdir", "mkdirat", "symlink", "symlinkat", "link", "linkat", "ftruncate", "fchmod", "chmod", "fchmodat",
)  # fmt: skip
AGAIN_EVERY = 10


class Scenario:
    """A state to begin with, and what is done then."""

    def __init__(self, title: str, what: str, begin: Path | None, damaged: bool = False) -> None:
        self.title = title
        self.what = what
        self.begin = begin
        self.damaged = damaged


def worker(root: Path, release: Path, what: str) -> list[str]:
    """The command line of one run."""
    return [sys.executable, "-B", str(HERE / "install_once.py"), str(root), str(release), what]


def environment() -> dict[str, str]:
    """The same calls in every run."""
    return {**os.environ, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}


def fresh(directory: Path, begin: Path | None) -> Path:
    """The state to begin with."""
    shutil.rmtree(directory, ignore_errors=True)
    if begin is not None:
        subprocess.run(["cp", "-a", str(begin), str(directory)], check=True)
    return directory


def points(root: Path, release: Path, what: str, work: Path) -> list[tuple[str, int]]:
    """Every call to be killed at, as (name, which one of its kind), in order."""
    trace = work / "trace"
    subprocess.run(
        ["strace", "-qq", "-o", str(trace), "-e", f"trace={','.join(f'?{each}' for each in CALLS)}",
         *worker(root, release, what)],
        check=True, env=environment(), stdout=subprocess.DEVNULL,
    )  # fmt: skip
    seen: Counter[str] = Counter()
    found, begun = [], False
    for line in trace.read_text(errors="replace").splitlines():
        match = re.match(r"([a-z0-9]+)\(", line)
        if match is None:
            continue
        seen[match[1]] += 1
        begun = begun or str(root) in line
        if begun:
            found.append((match[1], seen[match[1]]))
    return found


def state(root: Path, damaged_before: bool) -> tuple[str, list[str]]:
    """What the next agent finds: `installed`, `absent` or `damaged as before`, and everything that is in between."""
    store, wrong = Store(root, RealClock()), []
    records = store.installed() if root.exists() else ()
    told = "installed" if records else "absent"
    for record in records:
        if (words := store.verify(record, full=True)) is not None:
            if not damaged_before:
                wrong.append(words)
            told = "damaged as before"
    if root.exists():
        with store.locked():
            store.sweep()
        if store.installed() != records:
            wrong.append("the sweep changed what is installed")
        odd = {path.name for path in root.iterdir()} - {".lock", ".records", ".downloads", NAME}
        trees = {path.name for path in (root / NAME).glob("*")}
        named = {f"{record.recipe.version}-{record.recipe.build}" for record in records}
        if odd or trees != named:
            wrong.append(f"left behind: {sorted(odd | (trees ^ named))}")
    return told, wrong


def run(scenario: Scenario, release: Path, work: Path, step: int) -> tuple[int, Counter[str], list[str]]:
    """Kill at every `step`-th point; returns how many kills there were, what was found, and what was wrong."""
    root = work / "engines"
    every = points(fresh(root, scenario.begin), release, scenario.what, work)
    kills, outcomes, wrong = 0, Counter[str](), []
    for at, (call, number) in enumerate(every[::step]):
        fresh(root, scenario.begin)
        done = subprocess.run(
            ["strace", "-qq", "-o", "/dev/null", "-e", f"trace={call}",
             "-e", f"inject={call}:signal=KILL:when={number}", *worker(root, release, scenario.what)],
            check=False, env=environment(), capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode not in (-9, 137):
            wrong.append(f"{scenario.title}, {call} {number}: not killed, exit {done.returncode} {done.stderr[-300:]}")
            continue
        kills += 1
        told, bad = state(root, scenario.damaged)
        outcomes[told] += 1
        if at % AGAIN_EVERY == 0 and scenario.what == "install":
            subprocess.run(worker(root, release, "install"), check=True, env=environment())
            told, more = state(root, False)
            bad += more if told == "installed" else ["a second try does not end as installed"]
        wrong += [f"{scenario.title}, {call} {number}: {each}" for each in bad]
    return kills, outcomes, wrong


def main() -> int:
    """Read the command line and run every scenario."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", nargs="?", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--step", type=int, default=1, help="only every STEP-th point")
    args = parser.parse_args()
    if shutil.which("strace") is None:
        print("strace is not installed: `apt-get install strace`", file=sys.stderr)
        return 2
    release = args.release
    if release is None:
        cache = HERE.parents[1] / ".cache" / "test-assets"
        subprocess.run([sys.executable, HERE.parent / "test_assets.py", cache], check=True, stdout=subprocess.DEVNULL)
        release = cache / "release"
    began, total, failed = time.monotonic(), 0, False
    with tempfile.TemporaryDirectory(prefix="llmgw-crash-") as scratch:
        work = Path(scratch)
        scenarios = [Scenario("installation", "install", None)]
        if not args.quick:
            good, damaged = work / "good", work / "damaged"
            subprocess.run(worker(good, release.resolve(), "install"), check=True, env=environment())
            subprocess.run(["cp", "-a", str(good), str(damaged)], check=True)
            next((damaged / NAME).glob(f"{VERSION}-*/libllama.so.0")).unlink()
            scenarios += [
                Scenario("replacement of a damaged engine", "install", damaged, damaged=True),
                Scenario("removal", "remove", good),
            ]
        for scenario in scenarios:
            kills, outcomes, wrong = run(scenario, release.resolve(), work, 45 if args.quick else args.step)
            total += kills
            failed = failed or bool(wrong)
            found = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
            print(f"{scenario.title}: killed at {kills} points: {found}; {len(wrong)} in between", flush=True)
            for line in wrong[:20]:
                print(f"  {line}")
    print(f"{total} kills in {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
