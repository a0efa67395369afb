"""Gives a module of ours the other names of the multiprocessing module that it replaces.

May import ``importing``.

After ``import shmreduce as mp``, ``mp.connection`` is a module of ours. Users of
``multiprocessing`` expect to find ``mp.connection.wait`` there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmreduce.importing import import_late

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["names_of"]


def names_of(module: str) -> Callable[[str], object]:
    """Return a ``__getattr__`` (PEP 562) that finds names in ``multiprocessing.<module>``.

    Examples
    --------
    >>> names_of("connection")("wait")
    <function wait at ...>
    >>> names_of("connection")("nothing")
    Traceback (most recent call last):
        ...
    AttributeError: neither shmreduce.connection nor multiprocessing.connection has 'nothing'
    """

    def find(name: str) -> object:
        try:
            found: object = getattr(import_late(f"multiprocessing.{module}"), name)
        except AttributeError:
            raise AttributeError(
                f"neither shmreduce.{module} nor multiprocessing.{module} has {name!r}", name=name
            ) from None
        return found

    return find
