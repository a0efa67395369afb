"""``python -m shmreduce`` is the command ``shmreduce``.

May import :mod:`shmreduce.cli`.
"""

from __future__ import annotations

import sys

from shmreduce.cli import main

if __name__ == "__main__":
    sys.exit(main())
