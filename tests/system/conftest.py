"""The servers that tests of several rooms talk to live beside the installer's tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "install"))
