"""Wheels: fetched by digest for each CPython minor, and unpacked into one tree that serves them all.

A wheel with compiled code for one minor brings `name.cpython-313-x86_64-linux-gnu.so`, which only that minor imports;
so the trees of all minors lie in one another's way only where a wheel for the stable ABI has several files of one name.
The oldest minor's is written last: it is the one every minor can load.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from lib_build_elf import strip

MINORS = ("3.11", "3.12", "3.13", "3.14")
# The oldest C library there is a promise for is glibc 2.28 (Debian 10, RHEL 8).
GLIBCS = (28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 12, 5)
# A pure wheel is the same for every minor, so these markers are the only ones a common lock may have.
_SAME_EVERYWHERE = re.compile(
    r"(implementation_name|platform_python_implementation|sys_platform|os_name|platform_system)"
)
_DROPPED_META = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")
# What nobody runs from inside the file. The compiled parts of PyYAML and MarkupSafe are optional: pure Python will do.
_DROPPED_FILES = re.compile(
    r"yaml/_yaml\.[^/]+\.so|markupsafe/_speedups\.[^/]+\.so|markupsafe/_speedups\.c|.*\.(pyx|pxd)"
)


def locked(lock: Path, arch: str, cache: Path) -> list[Path]:
    """The wheels of a lock file for one architecture, newest minor first; each is checked against its digests."""
    _check_markers(lock)
    found: list[Path] = []
    for minor in reversed(MINORS):
        target = cache / "wheels" / arch / minor
        stamp = target / ".lock"
        if not stamp.exists() or stamp.read_bytes() != lock.read_bytes():
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            print(f"fetching wheels for CPython {minor} on {arch}", file=sys.stderr)
            _pip("download", "-qq", "--require-hashes", "-r", str(lock), "-d", str(target), *_platform(arch, minor))
            stamp.write_bytes(lock.read_bytes())
        found += sorted(target.glob("*.whl"))
    return found


def third_party(extra: list[str], lock: Path, arch: str, target: Path) -> list[Path]:
    """Wheels of packages that are in no lock, with what they need beside what is in the lock."""
    target.mkdir(parents=True)
    have = dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", lock.read_text(), re.MULTILINE))
    constraints = target / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in have.items()))
    plain = []
    for index, each in enumerate(extra):
        if "/" in each and Path(each).is_dir():
            built = target / f"built-{index}"
            _pip("wheel", "-qq", "--no-deps", "--no-build-isolation", "-w", str(built), each)
            plain.append(str(next(built.glob("*.whl"))))
        else:
            plain.append(each)
    found: list[Path] = []
    own = "llmgw"
    for minor in reversed(MINORS):
        into = target / minor
        _pip("download", "-qq", "--no-deps", "-d", str(into), *_platform(arch, minor), *plain)
        needs = _needs([*into.glob("*.whl")], {*map(_canonical, have), own})
        if needs:
            _pip("download", "-qq", "-c", str(constraints), "-d", str(into), *_platform(arch, minor, deps=True), *needs)
        found += sorted(
            p for p in into.glob("*.whl") if _canonical(p.name.split("-")[0]) not in {*map(_canonical, have)}
        )
    return found


def own(root: Path, work: Path) -> Path:
    """llmgw's own wheel, built from a copy so that nothing is left in the checkout, and nothing there is packed."""
    copy = work / "tree"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pyc")
    shutil.copytree(root / "src", copy / "src", ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(root / name, copy / name)
    _pip("wheel", "-qq", "--no-deps", "--no-build-isolation", "-w", str(work / "own"), str(copy))
    return next((work / "own").glob("llmgw-*.whl"))


def unpack(wheels: list[Path], site: Path) -> None:
    """Lay the wheels into one tree; a later one wins."""
    site.mkdir()
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                name = _place(entry.filename)
                if name is None or entry.is_dir():
                    continue
                path = site / name
                if not path.resolve().is_relative_to(site.resolve()):
                    sys.exit(f"error: `{wheel.name}` would write to `{entry.filename}`")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(entry))


def tidy(site: Path) -> None:
    """Leave out what differs from build to build or is never used, strip libraries, set modes whatever the umask is."""
    for path in sorted(site.rglob("*")):
        inside = path.relative_to(site).as_posix()
        if path.is_dir():
            path.chmod(0o755)
        elif _DROPPED_FILES.fullmatch(inside) or (path.parent.suffix == ".dist-info" and path.name in _DROPPED_META):
            path.unlink()
        else:
            if re.search(r"\.so(\.\d+)*$", path.name):
                path.write_bytes(strip(path.read_bytes()))
            path.chmod(0o644)


def _place(name: str) -> str | None:
    """Where a wheel's member goes: `NAME.data/purelib/x` is `x`; scripts, headers and data are left out."""
    parts = name.split("/")
    if not parts[0].endswith(".data"):
        return name
    return "/".join(parts[2:]) if len(parts) > 2 and parts[1] in ("purelib", "platlib") else None


def _check_markers(lock: Path) -> None:
    for line in lock.read_text().splitlines():
        if ";" in line and not line.startswith("#"):
            marker = line.split(";", 1)[1]
            names = set(
                re.findall(r"\b(python_version|python_full_version|platform_machine|platform_release|extra)\b", marker)
            )
            if names or not _SAME_EVERYWHERE.search(marker):
                sys.exit(f"error: requirements.lock: `{line.strip()}` depends on the minor or the machine")


def _platform(arch: str, minor: str, *, deps: bool = False) -> list[str]:
    flags = [] if deps else ["--no-deps"]
    flags += ["--only-binary=:all:", "--implementation", "cp", "--python-version", minor]
    for tag in [*(f"manylinux_2_{n}" for n in GLIBCS), "manylinux2014", "manylinux2010", "manylinux1", "linux"]:
        flags += ["--platform", f"{tag}_{arch}"]
    return flags


def _needs(wheels: list[Path], have: set[str]) -> list[str]:
    """Requirements of the wheels that are not already there."""
    found = set()
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            meta = archive.read(name).decode()
        for line in re.findall(r"^Requires-Dist: (.+)$", meta, re.MULTILINE):
            if "extra ==" not in line and _canonical(re.split(r"[^A-Za-z0-9._-]", line)[0]) not in have:
                found.add(line.strip())
    return sorted(found)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _pip(*argv: str) -> None:
    # a date before 1980 cannot be written into a zip; the same one for every build
    env = {**os.environ, "SOURCE_DATE_EPOCH": "315532800", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "LC_ALL": "C.UTF-8"}
    env = {k: v for k, v in env.items() if not k.startswith("PYTHON")}
    subprocess.run([sys.executable, "-I", "-m", "pip", *argv], check=True, env=env, stdout=sys.stderr)
