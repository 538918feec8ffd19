"""Made trees, and an nvidia-smi that answers from recorded captures the way the tool does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llmgw.system.commands import Completed

DATA = Path(__file__).parent / "data"


def make_tree(root: Path, files: Mapping[str, str]) -> str:
    """Write `files` (absolute path -> text) below `root`; returns the root for `Tree`."""
    for path, text in files.items():
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return str(root)


def captures() -> dict[str, dict[str, str]]:
    """Recorded hosts: title -> field -> cell."""
    lines = (DATA / "nvidia-smi-query.txt").read_text().splitlines()
    fields = lines[0].split("--query-gpu=", 1)[1].split(" ", 1)[0].split(",")
    hosts, title = {}, ""
    for line in lines[2:]:
        if line.startswith("#"):
            title = line[2:].split("__", 1)[1]
        elif line.strip():
            hosts[title] = dict(zip(fields, [cell.strip() for cell in line.split(",")], strict=True))
    return hosts


class RecordedSmi:
    """A Runner: nvidia-smi over `rows`, other programs by `others`. Keeps every argv it was given."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, str]] = (),
        *,
        listing: str = "",
        version: str = "",
        lost: Mapping[str, str] | None = None,
        says: Completed | None = None,
        unknown_fields: Sequence[str] = (),
        others: Callable[[Sequence[str]], Completed] | None = None,
    ) -> None:
        self.rows = list(rows)
        self.listing = listing
        self.version = version
        self.lost = dict(lost or {})
        self.says = says
        self.unknown_fields = set(unknown_fields)
        self.others = others
        self.calls: list[tuple[str, ...]] = []

    def run(self, argv, *, timeout_s, env=None, cwd=None, output_cap=1 << 20, stdin=b""):
        argv = tuple(argv)
        self.calls.append(argv)
        if not argv[0].endswith("nvidia-smi"):
            return self.others(argv) if self.others else Completed(argv, 1, "", "no such program here")
        if self.says is not None:
            return self.says
        if "-L" in argv:
            return Completed(argv, 0, self.listing, "")
        if "--version" in argv:
            return Completed(argv, 0, self.version, "")
        query = next(arg for arg in argv if arg.startswith("--query-gpu=")).removeprefix("--query-gpu=").split(",")
        for name in query:
            if name in self.unknown_fields:
                return Completed(argv, 2, f'Field "{name}" is not a valid field to query.\n\n', "")
        chosen = argv[argv.index("-i") + 1] if "-i" in argv else None
        if chosen is None and self.lost:
            return Completed(argv, 15, "".join(f"{words}\n" for words in self.lost.values()), "")
        if chosen in self.lost:
            return Completed(argv, 15, f"{self.lost[chosen]}\n", "")
        rows = [row for row in self.rows if chosen is None or row["pci.bus_id"].lower().endswith(chosen)]
        return Completed(argv, 0, "".join(", ".join(row[name] for name in query) + "\n" for row in rows), "")


def smi_says(text: str, code: int, **more) -> RecordedSmi:
    """An nvidia-smi that says the same to everything."""
    return RecordedSmi(says=Completed(("nvidia-smi",), code, text, "", **more))
