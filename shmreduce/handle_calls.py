"""Pickles of one call of a rebuild function, whose first argument is a handle.

May import ``importing``, ``pickled_calls`` and ``plain_objects``.

Many messages have the same function and the same other arguments, such as the shape and
dtype of an array. So the parts of the pickle before and after the handle are made, and
read, only once. The result is an ordinary pickle, which :func:`pickle.loads` can read.
The call may be in a tuple of atoms: an array is often sent with a number or a name.
"""

from __future__ import annotations

import marshal
import pickle
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from shmreduce.importing import while_importing
from shmreduce.pickled_calls import BEFORE_NAME, BEGINNING, start_of_call
from shmreduce.plain_objects import ATOMS, only_atoms

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "LENGTH_PREFIX",
    "around_handle",
    "call_of",
    "pickle_around",
    "pickles_beside",
    "place_among_atoms",
]

_MOST = 256
"""How many calls are remembered. With more, all are forgotten."""
LENGTH_PREFIX = 4
"""Bytes of BINBYTES's length prefix, which is between the first part and the handle."""
_CALLED = pickle.TUPLE + pickle.REDUCE + pickle.STOP
"""The end of a pickle that calls the function."""
_NOT_CALLED = pickle.TUPLE + pickle.TUPLE2 + pickle.STOP
"""Another end, which makes a tuple of the function and its arguments instead."""
_WITHOUT_FRAMES = 3
"""The last protocol without frames: its pickles can be put into others unchanged."""
_WITHOUT_REFERENCES = 2
"""The last version of marshal whose output depends on the values alone."""
_LONGEST = 1 << 10
"""Bytes of arguments. Longer ones are seldom repeated, and may not fit into a packet."""
_MOST_ITEMS, _LONGEST_TEXT = 8, 256
"""Items of a tuple, and bytes of a text in it. Longer ones may be better off in a block."""
_LONGEST_NUMBER = 8 * _LONGEST_TEXT
"""Bits."""
_TEXTS = (str, bytes)
_AFTER_NAME = pickle.MARK + pickle.BINBYTES


class _Named(NamedTuple):
    """A call, and the name under which its function was found."""

    module: str
    name: str
    call: tuple[Callable[..., Any], tuple[Any, ...]]


_around: dict[tuple[Callable[..., Any], bytes], tuple[bytes, bytes] | None] = {}
_calls: dict[bytes, _Named | None] = {}
"""The calls by the bytes around the handle."""


def around_handle(
    function: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[bytes, bytes] | None:
    """Return the bytes that :func:`pickle_around` puts around a handle.

    Parameters
    ----------
    function : callable
        A function at the top level of a module.
    arguments : tuple
        The arguments after the handle.

    Returns
    -------
    (bytes, bytes) or None
        None if an argument is neither an atom nor a tuple of atoms, or is or contains
        bytes; if the arguments are long; or if the function has no simple name.
    """
    try:
        # Marshalled, since True, 1 and 1.0 are equal keys.
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
    # Not for bytes: marshal writes any object with a buffer, such as a bytearray or a NumPy
    # scalar, as bytes, so the key would be ambiguous.
    unmistakable = only_atoms(arguments) and not _has_bytes(arguments)
    start = start_of_call(function) if unmistakable else None
    if start is None:
        return None
    # Without PROTO in front and STOP at the end. Their memo indexes overlap, which does no
    # harm, since each pickle reads only the entries that it has put there itself.
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
    >>> data[LENGTH_PREFIX + len(around[0]) :].startswith(b"handle")
    True
    >>> call_of(*around) == (pickle_around, (("a", 1), False))
    True
    """
    start, end = around
    return b"".join((start, len(handle).to_bytes(LENGTH_PREFIX, "little"), handle, end))


def place_among_atoms(obj: tuple[Any, ...]) -> int | None:
    """Return the index of the only item of a short tuple that is not a small atom, or None.

    None if the tuple is long, or if there is no such item or more than one.

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
        is_long = (kind in _TEXTS and len(each) > _LONGEST_TEXT) or (
            kind is int and each.bit_length() > _LONGEST_NUMBER
        )
        if is_long or kind not in ATOMS:
            if place is not None:
                return None
            place = number
    return place


def pickles_beside(obj: tuple[Any, ...], place: int) -> tuple[bytes, bytes]:
    """Return the bytes before and after one item in the pickle of a tuple of atoms."""
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
        The bytes before the handle's size, and after the handle.

    Returns
    -------
    (callable, tuple) or None
        None if :mod:`pickle` must read the pickle. The arguments are immutable, so they can
        be used for several calls.
    """
    key = start + end
    try:
        found = _calls[key]
    except KeyError:
        if len(_calls) >= _MOST:
            _calls.clear()
    else:
        # The module may have been reloaded, and pickle would use its new function.
        if found is None or _is_current(found):
            return None if found is None else found.call
    # It imports the function's module.
    found = _calls[key] = while_importing(_read_call, start, end)
    return None if found is None else found.call


def _is_current(found: _Named) -> bool:
    """Return whether the module has the function under this name, which has no dots."""
    return getattr(sys.modules.get(found.module), found.name, None) is found.call[0]


def _read_call(start: bytes, end: bytes) -> _Named | None:
    usual = start.startswith(BEFORE_NAME) and start.endswith(_AFTER_NAME)
    names = start[len(BEFORE_NAME) : -len(_AFTER_NAME)].split(b"\n")
    if not usual or len(names) != 3 or not end.endswith(_CALLED):
        return None
    function, (_, *others) = pickle.loads(
        b"".join((start, bytes(LENGTH_PREFIX), end[: -len(_CALLED)], _NOT_CALLED))
    )
    arguments = tuple(others)
    if not only_atoms(arguments):
        return None
    module, name, _ = (each.decode() for each in names)
    named = _Named(module, name, (function, arguments))
    return named if _is_current(named) else None
