"""Pickles of one call of a rebuild function: its first argument a handle, the others small.

May import ``pickled_calls`` and ``plain_objects``.

Message after message has the same function and the same other arguments: the shape and
dtype of an array, say. So what stands before and after the handle is pickled, and
unpickled, once. What is made is a pickle as any other, which :func:`pickle.loads` reads.
The call may stand in a tuple of atoms: an array is often sent with a number or a name.
"""

from __future__ import annotations

import marshal
import pickle
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from shmreduce.pickled_calls import BEFORE_NAME, BEGINNING, start_of_call
from shmreduce.plain_objects import ATOMS, says_all

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "HANDLE_AFTER",
    "around_handle",
    "call_of",
    "pickle_around",
    "pickles_beside",
    "place_among_atoms",
]

_MOST = 256
HANDLE_AFTER = 4
"""Bytes between what stands before a handle and the handle: its size."""
_CALLED = pickle.TUPLE + pickle.REDUCE + pickle.STOP
_NOT_CALLED = pickle.TUPLE + pickle.TUPLE2 + pickle.STOP
"""Makes a pickle that ends with a call one of the function and its arguments."""
_WITHOUT_FRAMES = 3
"""The last protocol whose pickles can be put into others just as they are."""
_WITHOUT_REFERENCES = 2
"""The last version of marshal whose bytes depend on the values alone."""
_LONGEST = 1 << 10
"""Bytes of arguments. More are seldom the same again, and might not have room in a packet."""
_MOST_ITEMS, _LONGEST_TEXT = 8, 256
"""Of a tuple, and of the text or bytes in it: what is longer may be better off in a block."""
_TEXTS = (str, bytes)
_AFTER_NAME = pickle.MARK + pickle.BINBYTES


class _Named(NamedTuple):
    """A call, and by which name its function was found."""

    module: str
    name: str
    call: tuple[Callable[..., Any], tuple[Any, ...]]


_around: dict[tuple[Callable[..., Any], bytes], tuple[bytes, bytes] | None] = {}
_calls: dict[bytes, _Named | None] = {}
"""By what stands around the handle."""


def around_handle(
    function: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[bytes, bytes] | None:
    """Return what :func:`pickle_around` puts around a handle.

    Parameters
    ----------
    function : callable
        At the top level of a module.
    arguments : tuple
        What it is called with after the handle.

    Returns
    -------
    (bytes, bytes) or None
        None if an argument is more than an atom or a tuple of atoms, or has bytes, or the
        arguments are long, or the function has no simple name.
    """
    try:
        # Not the arguments themselves: True, 1 and 1.0 are equal.
        key = function, marshal.dumps(arguments, _WITHOUT_REFERENCES)
    except ValueError:
        return None
    if len(key[1]) > _LONGEST:
        return None
    try:
        return _around[key]
    except KeyError:
        if len(_around) >= _MOST:
            _around.clear()
        made = _around[key] = _make_around(function, arguments)
        return made


def _make_around(
    function: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[bytes, bytes] | None:
    # Whatever exports a buffer, a bytearray or a number of NumPy's, has the same key as bytes.
    unmistakable = says_all(arguments) and not _has_bytes(arguments)
    start = start_of_call(function) if unmistakable else None
    if start is None:
        return None
    # Of each but its protocol and its end. What one has put into the memo the next may
    # replace: it is read by that one alone.
    pickles = [pickle.dumps(each, _WITHOUT_FRAMES)[2:-1] for each in arguments]
    return start + _AFTER_NAME, b"".join((*pickles, _CALLED))


def _has_bytes(arguments: tuple[Any, ...]) -> bool:
    return any(
        type(each) is bytes or (type(each) is tuple and _has_bytes(each)) for each in arguments
    )


def pickle_around(handle: bytes, around: tuple[bytes, bytes]) -> bytes:
    """Return the pickle of a call with a handle.

    Examples
    --------
    >>> around = around_handle(pickle_around, (("a", 1), False))
    >>> data = pickle_around(b"handle", around)
    >>> data[HANDLE_AFTER + len(around[0]) :].startswith(b"handle")
    True
    >>> call_of(*around) == (pickle_around, (("a", 1), False))
    True
    """
    start, end = around
    return b"".join((start, len(handle).to_bytes(HANDLE_AFTER, "little"), handle, end))


def place_among_atoms(obj: tuple[Any, ...]) -> int | None:
    """Return where in a short tuple the one item is that is no small atom; None if it is not so.

    Examples
    --------
    >>> place_among_atoms((1, "a", [])), place_among_atoms((1, 2)), place_among_atoms(([], []))
    (2, None, None)
    """
    if len(obj) > _MOST_ITEMS:
        return None
    place = None
    for number, each in enumerate(obj):
        kind = type(each)
        if kind not in ATOMS or (kind in _TEXTS and len(each) > _LONGEST_TEXT):
            if place is not None:
                return None
            place = number
    return place


def pickles_beside(obj: tuple[Any, ...], place: int) -> tuple[bytes, bytes]:
    """Return what stands before and after one item in the pickle of a tuple of atoms."""
    pickles = [
        b"" if number == place else pickle.dumps(each, _WITHOUT_FRAMES)[2:-1]
        for number, each in enumerate(obj)
    ]
    before = b"".join((BEGINNING, pickle.MARK, *pickles[:place]))
    return before, b"".join((*pickles[place + 1 :], pickle.TUPLE, pickle.STOP))


def call_of(start: bytes, end: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """Return the function that a pickle calls and its arguments after the handle.

    Parameters
    ----------
    start, end : bytes
        What stands before the handle and its size, and after.

    Returns
    -------
    (callable, tuple) or None
        None if the pickle is to be read by :mod:`pickle`. The arguments cannot be changed
        by anybody.
    """
    key = start + end
    try:
        found = _calls[key]
    except KeyError:
        if len(_calls) >= _MOST:
            _calls.clear()
    else:
        # The module may have been loaded again: pickle would find what it has now.
        if found is None or _is_current(found):
            return None if found is None else found.call
    found = _calls[key] = _read_call(start, end)
    return None if found is None else found.call


def _is_current(found: _Named) -> bool:
    """Return whether the name leads to the function, and not one with dots."""
    return getattr(sys.modules.get(found.module), found.name, None) is found.call[0]


def _read_call(start: bytes, end: bytes) -> _Named | None:
    usual = start.startswith(BEFORE_NAME) and start.endswith(_AFTER_NAME)
    names = start[len(BEFORE_NAME) : -len(_AFTER_NAME)].split(b"\n")
    if not usual or len(names) != 3 or not end.endswith(_CALLED):
        return None
    function, (_, *others) = pickle.loads(
        b"".join((start, bytes(HANDLE_AFTER), end[: -len(_CALLED)], _NOT_CALLED))
    )
    arguments = tuple(others)
    if not says_all(arguments):
        return None
    module, name, _ = (each.decode() for each in names)
    named = _Named(module, name, (function, arguments))
    return named if _is_current(named) else None
