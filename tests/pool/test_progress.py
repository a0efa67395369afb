"""Progress bars, where they are asked for."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import pytest

from shmreduce import MissingExtraError
from shmreduce.pool import Pool
from tests.pool.work import add, square

FORK: Any = multiprocessing.get_context("fork")


def test_bars_reach_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    """Map, starmap and imap show a bar that counts items; a string is shown beside it."""
    with Pool(2, context=FORK) as pool:
        assert pool.map(square, range(10), progress="squares") == [x * x for x in range(10)]
        assert pool.starmap(add, [(1, 2)] * 4, progress=True) == [3] * 4
        assert list(pool.imap(square, range(6), chunksize=2, progress=True)) == [
            x * x for x in range(6)
        ]
        assert max(pool.imap_unordered(square, iter(range(5)), progress=True)) == 16
    pool.join()
    shown = capsys.readouterr().err
    assert "squares: 100%" in shown
    for count in ("10/10", "4/4", "6/6", "5it"):
        assert count in shown


def test_without_being_asked_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is shown by default."""
    with Pool(1, context=FORK) as pool:
        pool.map(square, range(10))
    pool.join()
    assert capsys.readouterr().err == ""


def test_a_bar_without_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the package and the extra; the pool goes on."""
    with Pool(1, context=FORK) as pool:
        monkeypatch.setitem(sys.modules, "tqdm", None)
        for call in (pool.map, pool.imap, pool.imap_unordered):
            with pytest.raises(MissingExtraError, match=r"tqdm.*shmreduce\[cli\]"):
                call(square, range(3), progress=True)
        assert pool.map(square, range(3)) == [0, 1, 4]
    pool.join()
