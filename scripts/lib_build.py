"""What `build_pyz.sh` does once it has its tools: wheels by digest, one tree for every CPython minor, one file."""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(Path(__file__).resolve().parent))

import lib_build_sbom as sbom  # noqa: E402  (`-I` keeps this directory off the path)
import lib_build_wheels as wheels  # noqa: E402
import lib_build_zip as zips  # noqa: E402

ARCHES = ("x86_64", "aarch64")
# -I: neither PYTHONPATH nor the current directory can put other code in our place; -S: nor the system's site-packages
SHEBANG = "/usr/bin/env -S python3 -IS"


def main() -> None:
    parser = argparse.ArgumentParser(prog="build_pyz.sh")
    parser.add_argument("--arch", choices=ARCHES, default=platform.machine())
    parser.add_argument("--with", dest="extra", action="append", default=[], metavar="PACKAGE")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--cache", type=Path, required=True)
    given = parser.parse_args()
    out_dir = given.out or ROOT / "dist" / ("with-" + "-".join(map(short, given.extra)) if given.extra else "")
    version = read_version()
    out = out_dir / f"llmgw-{version}-linux-{given.arch}.pyz"
    bill = out.with_suffix(".cdx.json")
    stamp = given.cache / f"{given.arch}-{digest(str(out_dir.resolve()).encode())[:12]}.stamp"
    key = fingerprint(given.arch, given.extra)
    # third-party packages may have changed on the index or on disk: such a build is never taken for fresh
    if given.force or given.extra or not fresh(stamp, key, out, bill):
        build(given.arch, given.extra, given.cache, version, out, bill)
        stamp.write_text(f"{key} {digest(out.read_bytes())} {digest(bill.read_bytes())}\n")
    write_sums(out_dir, version)
    print(os.path.relpath(out, ROOT) if out.is_relative_to(ROOT) else out)


def build(arch: str, extra: list[str], cache: Path, version: str, out: Path, bill: Path) -> None:
    """Make the file and its bill of materials."""
    lock = ROOT / "requirements.lock"
    with tempfile.TemporaryDirectory(prefix="llmgw-build-") as name:
        work = Path(name)
        site = work / "site"
        found = wheels.locked(lock, arch, cache)
        if extra:
            found += wheels.third_party(extra, lock, arch, work / "extra")
        own = wheels.own(ROOT, work)
        wheels.unpack([*found, own], site)
        wheels.tidy(site)
        packed = work / "packed.pyz"
        argv = [str(Path(sys.executable).with_name("shiv")), "--site-packages", str(site), "-e", "llmgw.cli:main"]
        argv += ["-p", SHEBANG, "--reproducible", "--uncompressed", "-o", str(packed)]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, env=clean_env(work))
        out.parent.mkdir(parents=True, exist_ok=True)
        made = work / "made.pyz"
        zips.repack(packed, made, ROOT / "scripts" / "pyz_main.py")
        place(made, out)
        listing = work / "bill.json"
        listing.write_bytes(sbom.cyclonedx(version, arch, found, digest(out.read_bytes())))
        place(listing, bill)


def place(source: Path, target: Path) -> None:
    """Into place by rename: a reader sees the old file or the new one."""
    temp = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.copyfile(source, temp)
    temp.chmod(0o755 if target.suffix == ".pyz" else 0o644)
    temp.replace(target)


def write_sums(directory: Path, version: str) -> None:
    """SHA256SUMS of this version's files, as `sha256sum` writes it."""
    names = sorted(p.name for p in directory.glob(f"llmgw-{version}-linux-*") if p.suffix in (".pyz", ".json"))
    text = "".join(f"{digest((directory / name).read_bytes())}  {name}\n" for name in names)
    sums = directory / "SHA256SUMS"
    if not sums.exists() or sums.read_text() != text:
        temp = sums.with_name(f".SHA256SUMS.{os.getpid()}.tmp")
        temp.write_text(text)
        temp.replace(sums)


def read_version() -> str:
    match = re.search(r'^__version__ = "([^"]+)"', (ROOT / "src/llmgw/__init__.py").read_text(), re.MULTILINE)
    if match is None:
        sys.exit("error: src/llmgw/__init__.py holds no `__version__`")
    return match[1]


def short(requirement: str) -> str:
    name = Path(requirement).name if "/" in requirement else requirement
    return re.split(r"[^A-Za-z0-9._]", name.removesuffix(".whl"))[0] or "plugin"


def fingerprint(arch: str, extra: list[str]) -> str:
    """A digest of everything the output depends on."""
    files = [p for p in (ROOT / "src").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    files = [p for p in files if ".egg-info" not in str(p)]
    files += [
        ROOT / n for n in ("pyproject.toml", "README.md", "LICENSE", "requirements.lock", "requirements-build.lock")
    ]
    files += [*sorted((ROOT / "scripts").glob("lib_build*.py")), ROOT / "scripts/pyz_main.py"]
    whole = hashlib.sha256(f"{arch} {extra} {sys.version}".encode())
    for path in sorted(files):
        whole.update(f"{path.relative_to(ROOT)} {digest(path.read_bytes())}\n".encode())
    return whole.hexdigest()


def fresh(stamp: Path, key: str, out: Path, bill: Path) -> bool:
    if not (stamp.exists() and out.exists() and bill.exists()):
        return False
    return stamp.read_text().split() == [key, digest(out.read_bytes()), digest(bill.read_bytes())]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def clean_env(work: Path) -> dict[str, str]:
    return {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "HOME": str(work),
        "LC_ALL": "C.UTF-8",
        "TMPDIR": str(work),
    }


if __name__ == "__main__":
    main()
