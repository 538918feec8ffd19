"""The last step: the same members in one order, with one date, and our own first words in front of shiv's bootstrap."""

from __future__ import annotations

import zipfile
from pathlib import Path

_DATE = (1980, 1, 1, 0, 0, 0)


def repack(packed: Path, target: Path, main: Path) -> None:
    """Write `packed`, a zip application with a shebang, anew: sorted, compressed, `__main__.py` replaced."""
    with zipfile.ZipFile(packed) as source, target.open("wb") as out:
        with packed.open("rb") as raw:
            out.write(raw.readline())
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as made:
            for name in sorted(source.namelist()):
                if name.endswith("/"):
                    continue
                data = main.read_bytes() if name == "__main__.py" else source.read(name)
                entry = zipfile.ZipInfo(name, _DATE)
                entry.create_system = 3
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = 0o100644 << 16
                made.writestr(entry, data)
