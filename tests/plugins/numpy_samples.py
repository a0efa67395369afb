"""Hypothesis strategies for arrays of every dtype that can travel and of every layout."""

from __future__ import annotations

from typing import Any

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np

__all__ = ["arrays", "dtypes", "views", "written_back_to"]

Array = np.ndarray[Any, Any]

_SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6)


def _scalar_dtypes() -> st.SearchStrategy[np.dtype[Any]]:
    return st.one_of(
        hnp.boolean_dtypes(),
        hnp.integer_dtypes(endianness="?"),
        hnp.unsigned_integer_dtypes(endianness="?"),
        hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64, 128)),
        hnp.complex_number_dtypes(endianness="?", sizes=(64, 128, 256)),
        hnp.datetime64_dtypes(endianness="?"),
        hnp.timedelta64_dtypes(endianness="?"),
        hnp.byte_string_dtypes(min_len=1, max_len=9),
        hnp.unicode_string_dtypes(endianness="?", min_len=1, max_len=5),
        st.integers(1, 20).map(lambda size: np.dtype(f"V{size}")),
    )


@st.composite
def _structured_dtypes(draw: st.DrawFn) -> np.dtype[Any]:
    dtype: Any = draw(
        hnp.nested_dtypes(_scalar_dtypes(), max_leaves=4, max_itemsize=200).filter(
            lambda dtype: dtype.shape == ()
        )
    )
    if dtype.names is None:
        dtype = np.dtype([("only", dtype)])
    fields = [(name, dtype.fields[name][0]) for name in dtype.names]
    return np.dtype(fields, align=draw(st.booleans()))


def dtypes() -> st.SearchStrategy[np.dtype[Any]]:
    """Return dtypes of fixed size without Python objects, structured ones included."""
    return st.one_of(_scalar_dtypes(), _structured_dtypes())


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """Return an array of any bits in C or Fortran order.

    Bits, not values: gaps between fields, and NaNs with a payload, must arrive
    as they are.
    """
    dtype = draw(dtypes())
    shape = draw(_SHAPES)
    order: Any = draw(st.sampled_from("CF"))
    array = np.empty(shape, dtype, order=order)
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    bits = np.frombuffer(random.bytes(array.nbytes), np.uint8)
    if array.nbytes:
        flat = array.reshape(-1, order="A") if array.ndim else array.reshape(1)
        flat.view(np.uint8)[:] = bits
    return array


@st.composite
def views(draw: st.DrawFn, array: Array) -> Array:
    """Return a view of an array: sliced, reversed, transposed, broadcast, read-only or all."""
    view = array
    if view.ndim:
        index = draw(hnp.basic_indices(view.shape, allow_newaxis=True, allow_ellipsis=False))
        # With an ellipsis the result is an array always: random bits make no
        # valid text that could be taken out.
        view = view[(*index, ...) if isinstance(index, tuple) else (index, ...)]
        view = view.transpose(draw(st.permutations(range(view.ndim))))
    if draw(st.booleans()) and view.ndim < 5:
        view = np.broadcast_to(view, (draw(st.integers(1, 3)), *view.shape))
    elif draw(st.booleans()):
        view = view.view()
        view.flags.writeable = False
    return view


def written_back_to(array: Array) -> Any:
    """Return an iterator that has a copy of an array, and writes it back when it is closed."""
    options: Any = {"op_flags": [["readwrite", "updateifcopy"]], "casting": "equiv"}
    return np.nditer(array, op_dtypes=[array.dtype.newbyteorder()], **options)
