"""What the first array costs a process in imports."""

from __future__ import annotations

import errno
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


WITHOUT_DESCRIPTORS = """
import numpy as np
import shmreduce
from tests.faults.injection import no_descriptors

shmreduce.install()
for make in (lambda: shmreduce.zeros(3), lambda: shmreduce.share(np.zeros(3))):
    with no_descriptors():
        try:
            make()
        except shmreduce.SegmentError as error:
            print(error.errno)
print(shmreduce.zeros(3))
"""


def test_the_first_shared_array_without_a_descriptor_is_an_error_of_ours() -> None:
    """Nothing is left to be imported then; once a descriptor is free, an array can be made."""
    finished = subprocess.run(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    answers = f"{errno.EMFILE}\n{errno.EMFILE}\n[0. 0. 0.]\n"
    assert finished.stdout == answers, finished.stdout + finished.stderr
