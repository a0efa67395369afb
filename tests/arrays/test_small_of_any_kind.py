"""Small arrays of every class and dtype arrive as the standard pickler would send them."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from shmreduce import pickling, unpickling

pytestmark = pytest.mark.usefixtures("shmreduce_no_leaks")

DTYPES = (
    "f8",
    ">f8",
    "?",
    "S",
    "S3",
    "U",
    "U5",
    ">U5",
    "V7",
    "V",
    "M8[s]",
    "M8[25us]",
    "M8",
    ">m8[D]",
    "f4,i8",
    "O",
    [("x", "u1"), ("y", ">f8", (2, 3))],
    np.dtype([("x", "u1"), ("y", "f8")], align=True),
    np.dtype({"names": ["a"], "formats": ["f8"], "offsets": [8], "itemsize": 32}),
    np.dtype("i4", metadata={"unit": "m"}),
    np.dtype((np.record, [("x", "i4")])),
    np.longdouble,
    np.intc,
    # Neither the module nor the class is in every NumPy.
    getattr(getattr(np, "dtypes", None), "StringDType", lambda: "U2")(),
)


class Tagged(np.ndarray):
    """A class that inherits NumPy's pickle methods; an attribute is lost with them."""

    tag: str | None = None

    def __array_finalize__(self, template: Any) -> None:
        self.tag = getattr(template, "tag", "made anew")


def arrays_of(dtype: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return small arrays of several layouts."""
    whole = np.zeros((4, 6), dtype)
    if not whole.dtype.hasobject and whole.nbytes:
        raw = np.random.default_rng(5).integers(32, 127, whole.nbytes, np.uint8)
        # ASCII letters, which are valid as text of any width if the other bytes are 0.
        unit = 4 if whole.dtype.kind == "U" else 1
        raw[np.arange(raw.size) % unit != 0] = 0
        if unit == 1:
            whole = np.ndarray(whole.shape, whole.dtype, raw.tobytes()).copy()
    return {
        "C": whole,
        "F": np.asfortranarray(whole),
        "gaps": whole[::2, 1::2],
        "backwards": whole[::-1],
        "no elements": whole[:0],
        "no dimensions": whole[1, 1, ...].copy().reshape(()),
        "Tagged": whole.view(Tagged),
        "recarray": whole.view(np.recarray),
        "matrix": whole.view(np.matrix),
        "owner": np.zeros(3, dtype),
    }


def arrived(obj: Any) -> Any:
    data, message = pickling.dumps(obj)
    found = unpickling.loads(data)
    assert message is None or message.is_empty
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", arrays_of("f8"))
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*metadata:UserWarning")
def test_they_arrive_as_from_the_standard_pickler(dtype: Any, layout: str) -> None:
    """The same class, dtype, layout and bytes; but the byte order is kept."""
    sent = arrays_of(dtype)[layout]
    theirs = pickle.loads(pickle.dumps(sent, 5))
    ours = arrived([sent, 1.5])[0]
    assert type(ours) is type(theirs)
    assert ours.shape == theirs.shape
    assert ours.dtype == sent.dtype
    assert ours.dtype.type is theirs.dtype.type
    # NumPy 1 gives the dtype of a pickled date metadata that are empty.
    assert (ours.dtype.metadata or None) == (theirs.dtype.metadata or None)
    assert ours.flags.writeable
    assert ours.flags.aligned
    assert ours.flags.fnc == theirs.flags.fnc
    assert ours.flags.c_contiguous == theirs.flags.c_contiguous
    if sent.dtype.hasobject or sent.dtype.names:
        # What is between the fields may be anything.
        assert repr(ours.tolist()) == repr(sent.tolist())
    else:
        assert ours.tobytes() == sent.tobytes()
    assert getattr(ours, "tag", None) == getattr(theirs, "tag", None)


def test_dtypes_of_two_arrays_are_independent() -> None:
    """The names of fields can be changed; then only those of that array change."""
    one, other = arrived([np.zeros(2, "f4,i8"), np.zeros(3, "f4,i8")])
    one.dtype.names = ("a", "b")
    assert other.dtype.names == ("f0", "f1")
