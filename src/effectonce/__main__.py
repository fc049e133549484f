"""``python -m effectonce`` is the command line."""

import sys

from .ops.cli import main

if __name__ == "__main__":
    sys.exit(main())
