"""What the packaging tests share; the helpers are in `conftest_packaging.py`."""

from conftest_packaging import interpreter, pyz

__all__ = ["interpreter", "pyz"]
