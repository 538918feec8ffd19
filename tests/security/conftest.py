"""The security tests build on the wire's: a CA, a fleet that writes down, a listener."""

from __future__ import annotations

import sys
from pathlib import Path

for room in ("wire", "flows"):
    sys.path.append(str(Path(__file__).resolve().parent.parent / room))
