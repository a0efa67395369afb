"""What the first array costs a process in imports."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
import numpy as np
import shmreduce

before = set(sys.modules)
with shmreduce.install(inline_limit=0):
    from multiprocessing.reduction import ForkingPickler
    ForkingPickler.loads(ForkingPickler.dumps(np.ones(1000)))
print(*sorted(name for name in set(sys.modules) - before if name.startswith("numpy.")))
"""


def test_masked_arrays_are_not_imported_for_others() -> None:
    """The first array makes a process import nothing of NumPy, whose numpy.ma takes long."""
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )
    assert finished.stdout.split() == [], finished.stdout + finished.stderr
