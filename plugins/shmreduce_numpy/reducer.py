"""The reducer of NumPy arrays that is registered, which does not import NumPy.

May import public names of :mod:`shmreduce`; the rest of the plugin only inside
functions, since it imports NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shmreduce import Reducer

if TYPE_CHECKING:
    from shmreduce import Block, Message, Mode

__all__ = ["NumpyReducer"]


class NumpyReducer(Reducer):
    """Lets arrays, and arrays of subclasses, travel by shared memory.

    Ordinary pickling is used for arrays that hold Python objects, for small arrays, and
    for what a subclass's own pickle methods add to the bytes.
    """

    types = ("numpy.ndarray",)
    subclasses = True

    def prepare(self) -> None:
        """Import what the other methods need; whoever has an array has imported NumPy."""
        import_module("shmreduce_numpy.blocks")
        import_module("shmreduce_numpy.reduction")
        import_module("shmreduce_numpy.sharing")

    def reduce(self, obj: Any, message: Message) -> Any:
        """See :func:`shmreduce_numpy.reduction.reduce_array`."""
        from shmreduce_numpy.reduction import reduce_array

        # From now on it is called without this method: for each of thousands of small arrays
        # that saves a tenth of the time. Not a cached_property, which before CPython 3.12 has
        # a lock that would stay taken in a child that is forked meanwhile.
        self.__dict__["reduce"] = reduce_array
        return reduce_array(obj, message)

    def buffer_of(self, obj: Any, at_least: int) -> Any:
        """See :func:`shmreduce_numpy.reduction.buffer_of_array`."""
        from shmreduce_numpy.reduction import buffer_of_array

        self.__dict__["buffer_of"] = buffer_of_array
        return buffer_of_array(obj, at_least)

    def share(self, obj: Any, mode: Mode) -> Any:
        """See :func:`shmreduce_numpy.sharing.share_array`."""
        from shmreduce_numpy.sharing import share_array

        return share_array(obj, mode)

    def find_block(self, obj: Any) -> Block | None:
        """See :func:`shmreduce_numpy.blocks.find_block_of`."""
        from shmreduce_numpy.blocks import find_block_of

        return find_block_of(obj)
