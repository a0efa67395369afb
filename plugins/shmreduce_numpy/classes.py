"""How arrays of a class may be pickled: as NumPy does, or by the class's own methods.

May import NumPy.
"""

from __future__ import annotations

import enum
import sys
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

__all__ = [
    "Protocol",
    "address_of",
    "base_of",
    "dtype_of",
    "flags_of",
    "is_masked",
    "mask_of",
    "nbytes_of",
    "protocol_of",
    "shape_of",
    "strides_of",
]

# NumPy's own descriptors, since a subclass may redefine these attributes.
base_of: Any = np.ndarray.base.__get__
dtype_of: Any = np.ndarray.dtype.__get__
flags_of: Any = np.ndarray.flags.__get__
nbytes_of: Any = np.ndarray.nbytes.__get__
shape_of: Any = np.ndarray.shape.__get__
strides_of: Any = np.ndarray.strides.__get__
_interface_of: Any = np.ndarray.__array_interface__.__get__


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Return the address of the array's first element."""
    address: int = _interface_of(array)["data"][0]
    return address


class Protocol(enum.Enum):
    """The class whose pickle methods a class of arrays has."""

    ARRAY = "those of numpy.ndarray"
    MASKED = "those of numpy.ma.MaskedArray"
    OWN = "some of its own"


_METHODS = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")

# Weak, since classes may be made and dropped at run time.
_known: WeakKeyDictionary[type, Protocol] = WeakKeyDictionary()


def protocol_of(cls: type[np.ndarray[Any, Any]]) -> Protocol:
    """Return whose pickle methods ``cls`` inherits.

    A class with its own method pickles more than array and class, in a form that only
    it knows.

    Examples
    --------
    >>> protocol_of(np.recarray)
    <Protocol.ARRAY: 'those of numpy.ndarray'>
    >>> class Tagged(np.ndarray):
    ...     def __reduce__(self):
    ...         return super().__reduce__()
    >>> protocol_of(Tagged)
    <Protocol.OWN: 'some of its own'>
    """
    known = _known.get(cls)
    if known is None:
        if _methods_of(cls) == _methods_of(np.ndarray):
            known = Protocol.ARRAY
        elif is_masked(cls) and _methods_of(cls) == _methods_of(np.ma.MaskedArray):
            known = Protocol.MASKED
        else:
            known = Protocol.OWN
        _known[cls] = known
    return known


def is_masked(cls: type) -> bool:
    """Return whether arrays of a class have masks."""
    # numpy.ma is not imported here, which would take longer than importing this plugin. If
    # there is a masked array, it has been imported.
    return "numpy.ma" in sys.modules and issubclass(cls, np.ma.MaskedArray)


def mask_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Return the mask of a masked array; None if it has none (``numpy.ma.nomask``)."""
    mask = np.ma.getmask(array)
    # The mask of a record, such as an element of a structured masked array, is not an array
    # but a numpy.void.
    return None if mask is np.ma.nomask else np.asanyarray(mask)


def _methods_of(cls: type) -> list[Any]:
    return [getattr(cls, name, None) for name in _METHODS]
