"""The maker of arrays that are born shared, without NumPy until the first one.

May import public names of :mod:`shmreduce`; the rest of the plugin only inside
functions, since it imports NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmreduce import Mode

__all__ = ["NumpyArrayFactory"]


class NumpyArrayFactory:
    """Shared counterparts of ``numpy.empty``, ``zeros``, ``ones``, ``full`` and ``array``.

    Each returns a plain ``numpy.ndarray``, writeable here whatever its mode,
    whose memory is a shared block of its own. ``shape``, ``dtype`` and
    ``order`` mean what they mean to NumPy. A dtype with Python objects inside
    is a :class:`shmreduce.NotShareableError`.
    """

    def empty(self, shape: Any, dtype: Any, order: str, mode: Mode) -> Any:
        """Return an array of whatever the memory held before."""
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
        """Return an array of ``fill_value``, of its dtype where ``dtype`` is None."""
        import numpy as np

        from shmreduce_numpy.sharing import fill, new_array

        if dtype is None:
            dtype = np.asarray(fill_value).dtype
        # Zeroed first where it matters: a structured fill leaves gaps as they were.
        array = new_array(shape, dtype, order, mode, zeroed=np.dtype(dtype).names is not None)
        fill(array, fill_value)
        return array

    def array(self, obj: Any, dtype: Any, order: str, mode: Mode) -> Any:
        """Return a shared copy of anything that ``numpy.asarray`` takes."""
        from shmreduce_numpy.sharing import array_like

        return array_like(obj, dtype, order, mode)
