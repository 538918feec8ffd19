"""`python -m llmgw.testing.fake_engine …`, or `python DIRECTORY …` where nothing of llmgw is on the module path."""

import sys
from pathlib import Path


def _main() -> int:
    if not __package__:  # run by path, perhaps with -I -S
        sys.path[0] = str(Path(__file__).resolve().parents[3])
    from llmgw.testing.fake_engine.program import main

    return main()


if __name__ == "__main__":
    sys.exit(_main())
