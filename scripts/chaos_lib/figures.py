"""Figures: percentiles, and a table for people beside JSON for machines."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that `share` (0 to 1) of `values` do not exceed (nearest rank); None when there are none."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def times(values: Sequence[float]) -> dict[str, Any]:
    """p50, p99 and the longest, in seconds."""
    shown = {"p50_s": percentile(values, 0.5), "p99_s": percentile(values, 0.99), "max_s": max(values, default=None)}
    return {"n": len(values), **{name: None if value is None else round(value, 3) for name, value in shown.items()}}


class Result:
    """What one run found. `must` names figures that have to have a value; the others are told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.figures: dict[str, Any] = {}
        self.failures: list[str] = []
        self.skipped = ""

    def tell(self, **figures: Any) -> None:
        self.figures |= figures

    def must(self, what: str, value: Any, wanted: Any = 0) -> None:
        """Note a figure, and a failure when it is not the one wanted."""
        self.figures[what] = value
        if value != wanted:
            self.failures.append(f"{what}: {value}, wanted {wanted}")

    def skip(self, why: str) -> Result:
        self.skipped = why
        return self

    def lines(self) -> list[str]:
        state = f"skipped: {self.skipped}" if self.skipped else "failed" if self.failures else "held"
        rows = [f"{self.name}: {state}"]
        width = max((len(name) for name in self.figures), default=0)
        for name, value in self.figures.items():
            text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
            rows.append(f"  {name.replace('_', ' '):<{width}}  {text}")
        rows += [f"  FAILED {each}" for each in self.failures]
        return rows


def machine() -> dict[str, Any]:
    """Where the figures were made."""
    import os
    import platform

    release = Path("/etc/os-release").read_text() if Path("/etc/os-release").exists() else ""
    name = next((line[13:-1] for line in release.splitlines() if line.startswith("PRETTY_NAME=")), "")
    cpu = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), ":").split(
        ":", 1
    )[1]
    return {
        "cores": os.cpu_count(),
        "cpu": cpu.strip(),
        "system": name,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def report(results: Sequence[Result], as_json: Path | None) -> int:
    """Print the table, write the JSON; 1 when something failed."""
    for result in results:
        print("\n".join(result.lines()), flush=True)
    data = {
        "machine": machine(),
        "runs": {
            each.name: {"figures": each.figures, "failures": each.failures, "skipped": each.skipped} for each in results
        },
    }
    if as_json is not None:
        as_json.write_text(json.dumps(data, indent=1) + "\n")
    else:
        print(json.dumps(data))
    return 1 if any(each.failures for each in results) else 0
