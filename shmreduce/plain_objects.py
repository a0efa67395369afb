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
    from collections.abc import Callable

__all__ = ["ATOMS", "REPLACED_OVERRIDE", "UNASKED", "is_plain", "only_atoms", "override_of_others"]

ATOMS = frozenset((type(None), bool, int, float, str, bytes))
"""Types for which a pickler never calls ``reducer_override``."""
UNASKED = ATOMS | {tuple, list, dict, set, frozenset, FunctionType}
"""Types for whose objects no reducer's ``buffer_of`` is called."""
REPLACED_OVERRIDE = "_shmreduce_replaced_override"
"""The attribute of our own ``reducer_override`` that has the one which it replaced, or None."""
_FEW_ITEMS, _FEW_LEVELS = 16, 3
"""Limits of what :func:`is_plain` looks at: for more, it would take as long as pickling."""


def override_of_others() -> Callable[..., Any] | None:
    """Return the ``reducer_override`` of another library in ``ForkingPickler``, if any."""
    override: Callable[..., Any] | None = getattr(ForkingPickler, "reducer_override", None)
    if override is None:
        return None
    found: Callable[..., Any] | None = getattr(override, REPLACED_OVERRIDE, override)
    return found


def is_plain(obj: Any, depth: int = _FEW_LEVELS) -> bool:
    """Return whether ``pickle.dumps`` pickles an object as our picklers would.

    Examples
    --------
    >>> is_plain((1, ["a", None])), is_plain({1}), is_plain((is_plain, (1,)))
    (True, False, True)
    """
    kind = type(obj)
    if kind in ATOMS:
        return True
    if kind is tuple or kind is list:
        if len(obj) > _FEW_ITEMS:
            return False
        # A loop: all() of a generator takes twice as long for so few.
        for each in obj:
            if type(each) not in ATOMS and not (depth > 0 and is_plain(each, depth - 1)):
                return False
        return True
    if kind is dict:
        return not obj or (
            len(obj) <= _FEW_ITEMS
            and ATOMS.issuperset(map(type, obj))
            and is_plain(list(obj.values()), depth)
        )
    return kind is FunctionType and _functions_are_plain()


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
