"""The interpreter's own checks find nothing, and nothing grows over time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.soak import soak

SECONDS = float(os.environ.get("SHMREDUCE_SOAK_SECONDS", "4"))
"""How long the soak takes here; ``python -m tests.faults.soak`` takes 30 minutes."""
_ROOT = Path(__file__).parent.parent.parent
_MEBIBYTE = 1 << 20

USE_EVERYTHING = """
import multiprocessing
import numpy as np
import shmreduce as mp

def double(array):
    return array * 2

if __name__ == "__main__":
    with mp.install(strategy={strategy!r}, inline_limit=4096):
        for context in (mp.get_context({method!r}), multiprocessing.get_context({method!r})):
            with context.Pool(2) as pool:
                arrays = [np.full(50_000, number) for number in range(4)]
                assert [each[0] for each in pool.map(double, arrays)] == [0, 2, 4, 6]
                pool.close()
                pool.join()
            queue = context.Queue()
            queue.put(mp.share(np.ones(50_000)))
            process = context.Process(target=double, args=(queue.get(timeout=30),))
            process.start()
            process.join(30)
            assert process.exitcode == 0
            process.close()
            queue.close()
            queue.join_thread()
        with mp.get_context({method!r}).Manager() as manager:
            table = manager.dict()
            table[1] = np.ones(50_000)
            assert table[1].sum() == 50_000
            del table
        with mp.ProcessPoolExecutor(2) as executor:
            assert executor.submit(double, np.ones(50_000)).result(30)[0] == 2
    print("all well")
"""


@pytest.mark.parametrize(
    ("method", "strategy"), [("fork", "file_descriptor"), ("spawn", "file_system")]
)
def test_the_development_mode_is_silent(method: str, strategy: str, tmp_path: Path) -> None:
    """With ``-X dev``, warnings as errors, faulthandler and the debug allocator, nothing
    is written to standard error by any of the processes.
    """
    program = tmp_path / "use.py"
    program.write_text(USE_EVERYTHING.format(method=method, strategy=strategy))
    finished = subprocess.run(
        [
            *(sys.executable, "-X", "dev", "-X", "faulthandler", "-W", "error"),
            # From 3.15 on an error, too: a standard Queue has a thread, beside which this forks.
            *("-W", "ignore:This process:DeprecationWarning", str(program)),
        ],
        env={
            **os.environ,
            "PYTHONMALLOC": "debug",
            "PYTHONPATH": os.pathsep.join([str(_ROOT), *sys.path]),
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert finished.stdout == "all well\n", finished.stderr[-3000:]
    assert finished.stderr == ""
    assert finished.returncode == 0


@pytest.mark.usefixtures("shmreduce_no_leaks")
@pytest.mark.timeout(60 + SECONDS)
def test_a_soak_is_flat() -> None:
    """With everything in use and processes being killed, memory, descriptors and blocks
    are no more at the end than they were soon after the start.
    """
    samples = list(soak(SECONDS, every=SECONDS / 40))
    assert len(samples) >= 8
    early, late = samples[len(samples) // 4 : len(samples) // 2], samples[-len(samples) // 4 :]
    assert samples[-1].killed > 0
    for attribute, slack in (
        ("resident", 8 * _MEBIBYTE),
        ("shared", 8 * _MEBIBYTE),
        ("descriptors", 4),
    ):
        before = max(getattr(each, attribute) for each in early)
        after = min(getattr(each, attribute) for each in late)
        assert after <= before + slack, f"{attribute}: {before}, then {after}"
