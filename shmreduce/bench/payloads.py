"""The objects that are sent: arrays, objects that contain arrays, and records without any.

May import :mod:`shmreduce.fresh_process`. NumPy and pandas are imported in the
processes that are measured.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["Form", "change_arrays", "make_payload", "marks", "renewed", "size_name", "stamp"]

Form = Literal["array", "list", "nested", "DataFrame", "DataFrame with text", "records"]

_NESTED_ARRAYS = 64


def size_name(nbytes: int) -> str:
    """Return a size as text, for the names of rows.

    Examples
    --------
    >>> size_name(65536), size_name(1 << 30), size_name(10_000), size_name(1_000_000)
    ('64 KiB', '1 GiB', '10 KB', '1 MB')
    """
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    for unit, size in (("MB", 1_000_000), ("KB", 1_000)):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


def make_payload(form: Form, nbytes: int, count: int = 1) -> Any:
    """Make an object to send, which contains NumPy arrays.

    Parameters
    ----------
    form : str
        ``"array"``; ``"list"``: a list of ``count`` arrays; ``"nested"``: dictionaries,
        lists and tuples with 64 arrays; ``"DataFrame"``: ten float columns;
        ``"DataFrame with text"``: two columns of text in addition; ``"records"``: a list of
        ``count`` dictionaries with a number, a date and the like, or one such dictionary.
    nbytes : int
        The size of each array; for ``"nested"`` and DataFrames, of all arrays together.
    count : int
        The number of arrays in the list, or of records.
    """
    import numpy as np

    if form == "array":
        return _array(nbytes)
    if form == "records":
        records = [_record(number) for number in range(count)]
        return records if count > 1 else records[0]
    if form == "list":
        return [_array(nbytes) for _ in range(count)]
    if form == "nested":
        each = nbytes // _NESTED_ARRAYS
        return {
            "layers": [
                {"weights": _array(each), "bias": (number, _array(each))}
                for number in range(_NESTED_ARRAYS // 2)
            ],
            "name": "nested",
        }
    rows = nbytes // 80
    columns: dict[str, Any] = {f"x{number}": np.arange(rows) + number / 8 for number in range(10)}
    if form == "DataFrame with text":
        columns["city"] = [f"city {number % 1000}" for number in range(rows)]
        columns["code"] = [str(number) for number in range(rows)]
    return import_module("pandas").DataFrame(columns)


def change_arrays(payload: Any, change: Callable[[Array], Any]) -> Any:
    """Return ``payload`` with ``change`` applied to the arrays in its containers.

    Examples
    --------
    >>> import numpy as np
    >>> change_arrays({"a": [np.arange(3), "b"]}, np.sum)
    {'a': [np.int64(3), 'b']}
    """
    import numpy as np

    if isinstance(payload, np.ndarray):
        return change(payload)
    if isinstance(payload, dict):
        return {key: change_arrays(value, change) for key, value in payload.items()}
    if isinstance(payload, list | tuple):
        return type(payload)(change_arrays(value, change) for value in payload)
    return payload


def marks(payload: Any) -> list[Any]:
    """Return parts of a payload that identify it: shapes; first, middle and last values."""
    import numpy as np

    if isinstance(payload, np.ndarray):
        return [payload.shape, *(payload[place].item() for place in _places(payload))]
    if isinstance(payload, dict):
        payload = list(payload.values())
    if isinstance(payload, list | tuple):
        # Only the first and the last: reading 10,000 arrays is not timed, but takes time.
        return [len(payload), *marks(payload[0]), *marks(payload[-1])] if payload else [0]
    if type(payload).__name__ == "DataFrame":
        return [payload.shape, payload.iloc[0].tolist(), payload.iloc[-1].tolist()]
    return [payload]


def stamp(payload: Any, number: int) -> None:
    """Write a number into the values that :func:`marks` returns, except those of DataFrames.

    So a message cannot be taken for an earlier one. Arrays that are read-only are left alone.

    Examples
    --------
    >>> import numpy as np
    >>> array = np.arange(5)
    >>> stamp([array], 7)
    >>> array
    array([7, 1, 7, 3, 7])
    """
    import numpy as np

    if isinstance(payload, np.ndarray):
        if payload.flags.writeable:
            for place in _places(payload):
                payload[place] = number % _STAMPS
        return
    if isinstance(payload, dict):
        payload = list(payload.values())
    if isinstance(payload, list | tuple) and payload:
        stamp(payload[0], number)
        stamp(payload[-1], number)


_STAMPS = 256
"""How many numbers there are: they must fit into a byte."""


def renewed(payload: Any) -> Any:
    """Return a payload with new arrays in its containers, over the same memory.

    Some systems send an array that they know by reference to what they sent before. New memory
    would be cold, and its first use would be timed.
    """
    return change_arrays(payload, lambda array: array[:])


def _places(array: Array) -> tuple[int, ...]:
    """Return the places of the values by which an array is identified."""
    return (0, array.size // 2, -1) if array.size else ()


def _array(nbytes: int) -> Array:
    import numpy as np

    if nbytes % 8:
        return np.arange(nbytes, dtype=np.uint8)
    return np.arange(nbytes // 8, dtype=np.float64)


def _record(number: int) -> dict[str, Any]:
    import numpy as np

    return {
        "number": number,
        "at": datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=number),
        "price": Decimal(number) / 8,
        "mean": np.float64(number / 8),
        "tags": ["new", str(number)],
        "id": UUID(int=number),
    }
