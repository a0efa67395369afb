"""Lets a module of ours that stands in for one of the standard library have its names, too.

May import the standard library only.

``import shmreduce as mp`` makes ``mp.connection`` a module of ours. Users of
``multiprocessing`` expect ``mp.connection.wait`` there, too.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

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
            found: object = getattr(import_module(f"multiprocessing.{module}"), name)
        except AttributeError:
            raise AttributeError(
                f"neither shmreduce.{module} nor multiprocessing.{module} has {name!r}", name=name
            ) from None
        return found

    return find
