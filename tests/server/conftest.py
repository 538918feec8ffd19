"""The control plane's tests build their nodes as the domain's tests do."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "domain"))
