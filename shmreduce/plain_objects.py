"""Small objects about whose parts nobody would be asked when they are pickled.

May import :mod:`shmreduce.process_registry`.

Most messages are such: a number, a few words, the call of a function with them. The
pickler of the language does for them, which is five times as quick as one that
asks for the reducer of each part.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import TYPE_CHECKING, Any

from shmreduce.process_registry import get_registry

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ATOMS", "PASSES_ON", "UNASKED", "is_plain", "override_of_others", "says_all"]

ATOMS = frozenset((type(None), bool, int, float, str, bytes))
"""What a pickler never asks anybody about."""
UNASKED = ATOMS | {tuple, list, dict, set, frozenset, FunctionType}
"""What a pickler asks nobody about, or, of containers and functions, nobody of one buffer."""
PASSES_ON = "_shmreduce_passes_on"
"""Where a ``reducer_override`` that asks our registry itself keeps the next."""
_FEW_ITEMS, _FEW_LEVELS = 16, 3
"""How far an object is looked at: further would take as long as pickling."""


def override_of_others() -> Callable[..., Any] | None:
    """Return the ``reducer_override`` that somebody else has given to ``ForkingPickler``."""
    override: Callable[..., Any] | None = getattr(ForkingPickler, "reducer_override", None)
    if override is None:
        return None
    found: Callable[..., Any] | None = getattr(override, PASSES_ON, override)
    return found


def is_plain(obj: Any, depth: int = _FEW_LEVELS) -> bool:
    """Whether ``pickle.dumps`` does for an object what any of our picklers would.

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
    # A pickler writes the name of one without a look at its tables of reducers.
    return override_of_others() is None and get_registry().find(FunctionType) is None


def says_all(arguments: Any) -> bool:
    """Return whether arguments are atoms, and tuples of atoms."""
    if type(arguments) is not tuple:
        return False
    for each in arguments:
        kind = type(each)
        if kind not in ATOMS and (kind is not tuple or not ATOMS.issuperset(map(type, each))):
            return False
    return True
