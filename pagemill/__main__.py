"""`python -m pagemill` is the console script `pagemill`."""

from __future__ import annotations

import sys

from pagemill.cli import main

if __name__ == "__main__":
    sys.exit(main())
