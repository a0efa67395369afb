"""The factory of arrays that are born shared, which imports NumPy for the first one.

May import public names of :mod:`shmreduce`; the rest of the plugin only inside
functions, since it imports NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmreduce import Mode

__all__ = ["NumpyArrayFactory"]


class NumpyArrayFactory:
    """Shared counterparts of ``numpy.empty``, ``zeros``, ``ones``, ``full`` and ``array``.

    Each returns a plain ``numpy.ndarray`` in its own shared block. In this process it is
    writeable whatever its mode. ``shape``, ``dtype`` and ``order`` mean the same as for
    NumPy. If the dtype holds Python objects, each raises
    :class:`shmreduce.NotShareableError`.
    """

    def prepare(self) -> None:
        """Import NumPy, and what the other methods need."""
        import_module("shmreduce_numpy.sharing")

    def empty(self, shape: Any, dtype: Any, order: str, mode: Mode) -> Any:
        """Return an array with the contents that the memory had before."""
        from shmreduce_numpy.sharing import new_array

        return new_array(shape, dtype, order, mode)

    def zeros(self, shape: Any, dtype: Any, order: str, mode: Mode) -> Any:
        """Return an array of zeros."""
        from shmreduce_numpy.sharing import new_array

        return new_array(shape, dtype, order, mode, zeroed=True)

    def ones(self, shape: Any, dtype: Any, order: str, mode: Mode) -> Any:
        """Return an array of ones."""
        return self.full(shape, 1, float if dtype is None else dtype, order, mode)

    def full(self, shape: Any, fill_value: Any, dtype: Any, order: str, mode: Mode) -> Any:
        """Return an array of ``fill_value``; if ``dtype`` is None, of its dtype."""
        import numpy as np

        from shmreduce_numpy.sharing import fill, new_array

        if dtype is None:
            dtype = np.asarray(fill_value).dtype
        # A structured dtype may have gaps between its fields, which fill() does not write.
        array = new_array(shape, dtype, order, mode, zeroed=np.dtype(dtype).names is not None)
        fill(array, fill_value)
        return array

    def array(self, obj: Any, dtype: Any, order: str, mode: Mode) -> Any:
        """Return a shared copy of anything that ``numpy.asarray`` takes."""
        from shmreduce_numpy.sharing import array_like

        return array_like(obj, dtype, order, mode)
