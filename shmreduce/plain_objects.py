"""Recognises small objects for which, and for whose parts, no reducer would be called.

May import :mod:`shmreduce.process_registry`.

Most messages are such objects: a number, a few words, a function and its arguments.
``pickle.dumps`` can pickle them, which is five times as fast as a pickler that looks
for a reducer for each part.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import TYPE_CHECKING, Any

from shmreduce.process_registry import get_registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["ATOMS", "REPLACED_OVERRIDE", "UNASKED", "is_plain", "only_atoms", "override_of_others"]

ATOMS = frozenset((type(None), bool, int, float, str, bytes))
"""Types for which a pickler never calls ``reducer_override``."""
UNASKED = ATOMS | {tuple, list, dict, set, frozenset, FunctionType}
"""Types for whose objects no reducer's ``buffer_of`` is called."""
REPLACED_OVERRIDE = "_shmreduce_replaced_override"
"""The attribute of our own ``reducer_override`` that has the one which it replaced, or None."""
_ATTRIBUTES = ForkingPickler.__dict__
"""A view. No base class has a ``reducer_override``, and it takes a quarter of the time of
``getattr`` to find that out."""
_FEW_ITEMS, _FEW_LEVELS = 16, 3
"""Limits of what :func:`is_plain` looks at: for more, it would take as long as pickling."""


def override_of_others() -> Callable[..., Any] | None:
    """Return the ``reducer_override`` of another library in ``ForkingPickler``, if any."""
    override: Callable[..., Any] | None = _ATTRIBUTES.get("reducer_override")
    if override is None:
        return None
    found: Callable[..., Any] | None = getattr(override, REPLACED_OVERRIDE, override)
    return found


def is_plain(obj: Any, depth: int = _FEW_LEVELS) -> bool:
    """Return whether ``pickle.dumps`` pickles an object as our picklers would.

    Examples
    --------
    >>> is_plain((1, ["a", None])), is_plain(1j), is_plain((is_plain, (1,)))
    (True, False, True)
    """
    kind = type(obj)
    if kind in ATOMS:
        return True
    if kind is dict:
        if len(obj) > _FEW_ITEMS or not _are_atoms(obj):
            return False
        # A list, because other threads may change the dictionary.
        obj = list(obj.values())
    elif kind is tuple or kind is list:
        if len(obj) > _FEW_ITEMS:
            return False
    elif kind is set or kind is frozenset:
        return len(obj) <= _FEW_ITEMS and _are_atoms(obj)
    else:
        return kind is FunctionType and _functions_are_plain()
    # A loop: all() of a generator takes twice as long for so few.
    for each in obj:
        if type(each) not in ATOMS and not (depth > 0 and is_plain(each, depth - 1)):
            return False
    return True


def _are_atoms(objects: Iterable[Any]) -> bool:
    return ATOMS.issuperset(map(type, objects))


def _functions_are_plain() -> bool:
    # A pickler asks reducer_override about a function, but not its dispatch_table.
    return override_of_others() is None and get_registry().find(FunctionType) is None


def only_atoms(arguments: Any) -> bool:
    """Return whether arguments are a tuple of nothing but atoms, and tuples of atoms."""
    if type(arguments) is not tuple:
        return False
    for each in arguments:
        kind = type(each)
        if kind not in ATOMS and (kind is not tuple or not ATOMS.issuperset(map(type, each))):
            return False
    return True
