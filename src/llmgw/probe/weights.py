"""Model files on this node: which there are, whether they are whole, and where a profile's model is."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from attrs import evolve, frozen

from llmgw.domain.facts import Finding, Truth, WeightsFile
from llmgw.errors import FileError
from llmgw.probe.gguf import MAX_HEADER_BYTES, GgufError, GgufHeader, NeedMore, parse_header
from llmgw.units import format_size

MAX_DEPTH = 6
MAX_ENTRIES = 20_000
MAX_MODELS = 1_000
_FIRST_READ = 1 << 20
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_ST_HEADER_CAP = 32 << 20
_INDEX_CAP = 32 << 20


@frozen
class Part:
    """One weights file: its size, whether it is whole, and what it is known by."""

    path: Path
    size_bytes: int
    complete: Finding
    fingerprint: str
    header: GgufHeader | None = None


def find_model(name: str, dirs: Sequence[str]) -> Path | None:
    """Look a profile's model up in the model directories, in order.

    Args:
        name: path relative to a model directory, or an absolute path inside one.
        dirs: model directories, absolute.

    Returns:
        The first that exists: a file, or a directory of safetensors; None when there is none.

    Raises:
        FileError: the path leads out of the model directory, by `..` or by a link.
    """
    if not name or "\0" in name or ".." in Path(name).parts:
        raise FileError(f"model {name!a} is refused", cause="it must be a path inside a model directory, without `..`")
    inside_none: Path | None = None
    for directory in dirs:
        base = Path(directory)
        candidate = base / name
        try:
            if not candidate.exists():
                continue
            real = candidate.resolve()
            inside = real.is_relative_to(base.resolve())
        except (OSError, RuntimeError):  # a loop of links
            continue
        if inside:
            return candidate
        inside_none = inside_none or real
    if inside_none is not None:
        raise FileError(
            f"model {name!a} is refused",
            cause=f"it leads to `{inside_none}`, outside the model directories",
            hint="add that directory to `model_dirs`",
        )
    return None


def read_gguf(path: Path) -> tuple[GgufHeader, bytes]:
    """The header of a GGUF file and the bytes it is made of. Reads, never maps: a file cut short must not kill us.

    Raises:
        GgufError: it is no GGUF file, or its header ends beyond the file; in words.
        OSError: the file cannot be read.
    """
    with path.open("rb") as handle:
        data, want = b"", _FIRST_READ
        while True:
            more = handle.read(want - len(data))
            data += more
            try:
                header = parse_header(data)
            except NeedMore:
                if not more or len(data) < want or want >= MAX_HEADER_BYTES:
                    raise
                want = min(want * 8, MAX_HEADER_BYTES)
            else:
                return header, data[: header.data_start]


class WeightsScanner:
    """Scans model directories; reads a file again only when its size or time has changed. For one thread at a time."""

    def __init__(self, dirs: Sequence[str]) -> None:
        self._dirs = tuple(dirs)
        self._known: dict[str, tuple[tuple[int, int, int], Part]] = {}

    def scan(self) -> tuple[tuple[WeightsFile, ...], tuple[str, ...]]:
        """Look at every model directory.

        Returns:
            The models found, and sentences about what could not be looked at.
        """
        found: dict[str, WeightsFile] = {}
        notes: list[str] = []
        seen: set[str] = set()
        for directory in self._dirs:
            for folder, files in _walk(Path(directory), notes):
                for model in self._models(folder, files, seen):
                    if len(found) >= MAX_MODELS:
                        notes.append(f"more than {MAX_MODELS} models: the rest is not reported")
                        break
                    found.setdefault(model.path, model)
        self._known = {path: kept for path, kept in self._known.items() if path in seen}
        return tuple(found.values()), tuple(dict.fromkeys(notes))

    def look(self, folder: Path, names: Sequence[str]) -> tuple[WeightsFile, ...]:
        """The models that the files `names` of one folder make up."""
        return tuple(self._models(folder, names, set()))

    def _models(self, folder: Path, files: Sequence[str], seen: set[str]) -> Iterator[WeightsFile]:
        sets: dict[tuple[str, int], dict[int, str]] = {}
        for name in files:
            if not name.endswith(".gguf"):
                continue
            split = _SPLIT.fullmatch(name)
            if split:
                sets.setdefault((split[1], int(split[3])), {})[int(split[2])] = name
                continue
            part = self._part(folder / name, seen, gguf=True)
            if part is not None:
                cache = part.header.cache_bytes_per_token if part.header else None
                yield WeightsFile(str(part.path), part.size_bytes, "gguf", part.complete, part.fingerprint, cache)
        for (stem, total), numbered in sets.items():
            parts = [part for n in sorted(numbered) if (part := self._part(folder / numbered[n], seen, gguf=True))]
            if parts:
                yield _split_set(folder, stem, total, sorted(numbered), parts)
        tensors = [name for name in files if name.endswith(".safetensors")]
        if tensors and "config.json" in files:
            parts = [part for name in sorted(tensors) if (part := self._part(folder / name, seen, gguf=False))]
            yield _safetensors(folder, files, parts)

    def _part(self, path: Path, seen: set[str], *, gguf: bool) -> Part | None:
        try:
            stat = path.stat()
        except OSError:
            return None
        key = str(path)
        seen.add(key)
        state = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        known = self._known.get(key)
        if known is not None and known[0] == state:
            return known[1]
        part = _look(path, stat, gguf=gguf)
        self._known[key] = (state, part)
        return part


class Incomplete:
    """Says whether a model of several files lacks one, by its set or its index. For one thread at a time."""

    def __init__(self) -> None:
        self._scanner = WeightsScanner(())

    def __call__(self, path: Path) -> str:
        """Why the model at `path` is not whole; "" when it is, or when it cannot be told from its headers."""
        try:
            if path.is_dir():
                folder, names = path, tuple(sorted(each.name for each in path.iterdir() if each.is_file()))
            elif split := _SPLIT.fullmatch(path.name):
                folder, stem = path.parent, f"{split[1]}-"
                names = tuple(sorted(each.name for each in folder.iterdir() if each.name.startswith(stem)))
            else:  # a single file is the engine's to judge: its own last line is the diagnosis
                return ""
        except OSError:
            return ""
        for model in self._scanner.look(folder, names):
            words = model.complete.words
            # a header that cannot be read at all is the engine's to tell: it may know a newer format
            if model.complete.value is Truth.NO and "incomplete:" in words:
                return words
        return ""


def _look(path: Path, stat: os.stat_result, *, gguf: bool) -> Part:
    try:
        if gguf:
            header, raw = read_gguf(path)
            return Part(path, stat.st_size, _whole(stat.st_size, header), _fingerprint(stat, raw), header)
        end, raw = _safetensors_end(path)
    except (GgufError, OSError, ValueError) as error:
        words = error.words() if isinstance(error, GgufError) else getattr(error, "strerror", None) or str(error)
        truth = Truth.UNKNOWN if isinstance(error, OSError) else Truth.NO
        said = f"cannot be read: {words}" if truth is Truth.UNKNOWN else f"incomplete or damaged: {words}"
        return Part(path, stat.st_size, Finding(truth, said), _fingerprint(stat, b""))
    return Part(path, stat.st_size, _sized(stat.st_size, end), _fingerprint(stat, raw))


def _whole(size: int, header: GgufHeader) -> Finding:
    sized = _sized(size, header.data_end)
    if sized.value is Truth.YES and header.unknown_types:
        types = ", ".join(str(kind) for kind in header.unknown_types)
        return Finding(Truth.UNKNOWN, f"has tensors of type {types}, whose size llmgw does not know")
    return sized


def _sized(size: int, end: int) -> Finding:
    if size < end:
        return Finding(
            Truth.NO, f"incomplete: {format_size(size)} of {format_size(end)} are here ({size} of {end} bytes)"
        )
    return Finding(Truth.YES, "complete")


def _split_set(folder: Path, stem: str, total: int, numbers: Sequence[int], parts: Sequence[Part]) -> WeightsFile:
    missing = [number for number in range(1, min(total, 99_999) + 1) if number not in numbers]
    if missing:
        shown = ", ".join(str(number) for number in missing[:5]) + (" …" if len(missing) > 5 else "")
        complete = Finding(Truth.NO, f"incomplete: {len(missing)} of {total} parts are missing ({shown})")
    else:
        complete = _worst(parts, f"complete, {total} parts")
        wrong = next((p for p in parts if p.header and p.header.split and p.header.split[1] != total), None)
        if wrong is not None and complete.value is Truth.YES:
            complete = Finding(Truth.NO, f"damaged: `{wrong.path.name}` belongs to a set of another size")
    return WeightsFile(
        str(folder / f"{stem}-00001-of-{total:05d}.gguf"),
        sum(part.size_bytes for part in parts),
        "gguf",
        complete,
        _joined(parts),
        parts[0].header.cache_bytes_per_token if parts[0].header else None,
    )


def _safetensors(folder: Path, files: Sequence[str], parts: Sequence[Part]) -> WeightsFile:
    complete = _worst(parts, f"complete, {len(parts)} file{'' if len(parts) == 1 else 's'}")
    index = "model.safetensors.index.json"
    if index in files and complete.value is Truth.YES:
        try:
            with (folder / index).open("rb") as handle:
                wanted = json.loads(handle.read(_INDEX_CAP))["weight_map"].values()
            missing = sorted({str(name) for name in wanted} - set(files))
        except (OSError, ValueError, KeyError, AttributeError, RecursionError):
            complete = Finding(Truth.NO, f"damaged: `{index}` is not readable")
        else:
            if missing:
                complete = Finding(Truth.NO, f"incomplete: `{missing[0]}` and {len(missing) - 1} others are missing")
                if len(missing) == 1:
                    complete = evolve(complete, words=f"incomplete: `{missing[0]}` is missing")
    size = sum(part.size_bytes for part in parts)
    return WeightsFile(str(folder), size, "safetensors", complete, _joined(parts))


def _safetensors_end(path: Path) -> tuple[int, bytes]:
    """Where the last tensor ends. Format: 8 bytes little-endian length, that much JSON, tensors by `data_offsets`."""
    with path.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if not 2 <= length <= _ST_HEADER_CAP:
            raise ValueError("not a safetensors file")
        raw = handle.read(length)
    if len(raw) < length:
        raise ValueError("the header goes on beyond the end of the file")
    try:
        header = json.loads(raw)
        ends = [int(tensor["data_offsets"][1]) for name, tensor in header.items() if name != "__metadata__"]
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError("the header is not one of safetensors") from error
    return 8 + length + max(ends, default=0), raw


def _worst(parts: Sequence[Part], good: str) -> Finding:
    for truth in (Truth.NO, Truth.UNKNOWN):
        for part in parts:
            if part.complete.value is truth:
                return Finding(truth, f"`{part.path.name}` is {part.complete.words}")
    return Finding(Truth.YES, good)


def _fingerprint(stat: os.stat_result, header: bytes) -> str:
    return f"{stat.st_size}-{stat.st_mtime_ns:x}-{hashlib.sha256(header).hexdigest()[:16]}"


def _joined(parts: Sequence[Part]) -> str:
    return hashlib.sha256("\n".join(part.fingerprint for part in parts).encode()).hexdigest()[:32]


def _walk(base: Path, notes: list[str]) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Every folder below `base` with its files. Links to folders are not followed, to files only inside `base`."""
    try:
        real_base = base.resolve()
        if not base.is_dir():
            missing = "is not a directory" if base.exists() else "does not exist (is its disk mounted?)"
            notes.append(f"model directory `{base}` {missing}")
            return
    except (OSError, RuntimeError) as error:
        notes.append(f"model directory `{base}` cannot be read: {error}")
        return
    left, pending = MAX_ENTRIES, [(base, 0)]
    while pending:
        folder, depth = pending.pop()
        files: list[str] = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    left -= 1
                    if left < 0:
                        notes.append(f"model directory `{base}` has more than {MAX_ENTRIES} entries: not all were seen")
                        break
                    if entry.is_dir(follow_symlinks=False):
                        if depth < MAX_DEPTH and not entry.name.startswith((".fetching-", "lost+found")):
                            pending.append((Path(entry.path), depth + 1))
                    elif entry.is_file() and _inside(entry, real_base):
                        files.append(entry.name)
        except OSError as error:
            notes.append(f"`{folder}` cannot be read: {error.strerror or error}")
        yield folder, tuple(sorted(files))
        if left < 0:
            return


def _inside(entry: os.DirEntry[str], base: Path) -> bool:
    if not entry.is_symlink():
        return True
    try:
        return Path(entry.path).resolve().is_relative_to(base)
    except (OSError, RuntimeError):
        return False
