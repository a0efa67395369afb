"""The reducer contract, held by arrays of many kinds and by objects that contain them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy import ma

from shmreduce.testing import ReducerContract


class TestFloats(ReducerContract):
    def make(self, nbytes: int) -> Any:
        return np.arange(nbytes // 8, dtype=float)

    def equal(self, first: Any, second: Any) -> bool:
        return bool(first.dtype == second.dtype and np.array_equal(first, second))

    def write(self, obj: Any) -> None:
        obj += 1


class TestBigEndianFortran(TestFloats):
    def make(self, nbytes: int) -> Any:
        array = np.arange(nbytes // 4, dtype=">i4").reshape((2, -1), order="F")
        return np.asfortranarray(array)

    def equal(self, first: Any, second: Any) -> bool:
        # Not the dtype: ordinary pickling, as over TCP, makes native numbers of it.
        return bool(first.flags.f_contiguous and np.array_equal(first, second))


class TestDates(TestFloats):
    def make(self, nbytes: int) -> Any:
        start = np.datetime64("2024-02-29", "s")
        return start + np.arange(nbytes // 8).astype("m8[s]")

    def write(self, obj: Any) -> None:
        obj += np.timedelta64(1, "s")


class TestRecords(ReducerContract):
    def make(self, nbytes: int) -> Any:
        array = np.zeros(nbytes // 16, np.dtype([("a", "i2"), ("b", "f8")], align=True))
        array["b"] = np.arange(len(array))
        return array.view(np.recarray)

    def equal(self, first: Any, second: Any) -> bool:
        return bool(np.array_equal(first, second))

    def write(self, obj: Any) -> None:
        obj.a += 1


class TestMasked(ReducerContract):
    def make(self, nbytes: int) -> Any:
        data = np.arange(nbytes // 8, dtype=float)
        return ma.masked_array(data, mask=data % 2 == 0)

    def equal(self, first: Any, second: Any) -> bool:
        same_masks = np.array_equal(ma.getmaskarray(first), ma.getmaskarray(second))
        return same_masks and np.array_equal(first.data, second.data)

    def write(self, obj: Any) -> None:
        obj[0] = 5
        obj[1] = ma.masked


@dataclass
class Measurement:
    name: str
    values: Any
    flags: Any


class TestDataclass(ReducerContract):
    """Contains arrays; has no reducer and needs none."""

    shareable = False

    def make(self, nbytes: int) -> Any:
        return Measurement("m", np.arange(nbytes // 8, dtype=float), np.zeros(3, bool))

    def equal(self, first: Any, second: Any) -> bool:
        return (first.name, first.values.tolist(), first.flags.tolist()) == (
            second.name,
            second.values.tolist(),
            second.flags.tolist(),
        )

    def write(self, obj: Any) -> None:
        obj.values += 1


class TestDataFrame(ReducerContract):
    shareable = False

    def make(self, nbytes: int) -> Any:
        pandas = pytest.importorskip("pandas")
        rows = nbytes // 16
        return pandas.DataFrame(
            {"x": np.arange(rows, dtype=float), "y": np.arange(rows)}, index=np.arange(rows) * 2
        )

    def equal(self, first: Any, second: Any) -> bool:
        return bool(first.equals(second))

    def write(self, obj: Any) -> None:
        obj.loc[0, "x"] = -1.0


class TestSparseMatrix(ReducerContract):
    shareable = False

    def make(self, nbytes: int) -> Any:
        sparse = pytest.importorskip("scipy.sparse")
        count = max(1, nbytes // 16)
        columns = np.arange(count, dtype=np.int32)
        shape = (1, count)
        return sparse.csr_matrix((np.ones(count), columns, np.array([0, count], "i4")), shape)

    def equal(self, first: Any, second: Any) -> bool:
        return bool(first.shape == second.shape and (first != second).nnz == 0)

    def write(self, obj: Any) -> None:
        obj.data[0] = 7
