"""The parts of shmreduce that are written in C, and whether they can be used.

May import ``interpreter``. ``building`` compiles what is listed here.

There are two kinds. The *allocator* is a plain C library, without which
``shared_allocations`` does not work. The others are extension modules, which do in one
call what a Python module beside them does in many. Without them everything works, but
takes longer.
"""

from __future__ import annotations

import importlib
import os
from os.path import dirname, exists, join
from typing import TYPE_CHECKING, NamedTuple

from shmreduce.interpreter import is_free_threaded

if TYPE_CHECKING:
    from types import ModuleType

__all__ = [
    "ALLOCATOR",
    "BLOCKS",
    "COPIES",
    "FOLDER",
    "MODULES",
    "MODULE_VERSION",
    "PACKETS",
    "PARTS",
    "SLOTS",
    "Part",
    "find_module",
    "reason_unused",
]

MODULE_VERSION = 10
"""Version of the modules' functions; the C sources have the same number."""
FOLDER = dirname(__file__)
"""The package's folder, below which all parts are.

Paths are strings here: every child imports this module, and :mod:`pathlib` takes a tenth of the
time of all that a child imports.
"""
_VARIABLE = "SHMREDUCE_COMPILED"


class Part(NamedTuple):
    """One library.

    Parameters
    ----------
    title : str
        Its name in messages.
    sources : tuple of str
        The paths of its C files. The first has the version; headers are beside it.
    library : str
        The path of the compiled file. It is looked for there and nowhere else.
    module : str, optional
        The dotted name, if it is an extension module.
    """

    title: str
    sources: tuple[str, ...]
    library: str
    module: str | None = None


def _module(title: str, name: str, *others: str) -> Part:
    place = join(FOLDER, *name.split("."))
    return Part(
        title,
        (f"{place}.c", *(f"{place}_{other}.c" for other in others)),
        # The suffix of extension modules that use the stable ABI (PEP 384).
        f"{place}.abi3.so",
        f"shmreduce.{name}",
    )


_PLACE = join(FOLDER, "born", "allocator")
ALLOCATOR = Part("allocator", (f"{_PLACE}.c",), f"{_PLACE}.so")
SLOTS = _module("lease slots", "memory._quick_slots")
BLOCKS = _module(
    "blocks",
    "memory._quick_blocks",
    "objects",
    "handles",
    "steps",
    "receiving",
    "taking",
    "giving",
)
PACKETS = _module("packets", "_quick_packets", "tasks")
COPIES = _module("copies", "_quick_copies")
MODULES = (SLOTS, BLOCKS, PACKETS, COPIES)
PARTS = (ALLOCATOR, *MODULES)


def find_module(part: Part) -> tuple[ModuleType | None, str]:
    """Import a compiled module; return it, or None and the reason.

    Examples
    --------
    >>> module, reason = find_module(PACKETS)
    >>> module is None or not reason
    True
    """
    if os.environ.get(_VARIABLE) == "0":
        return None, f"{_VARIABLE} is 0"
    if is_free_threaded():
        # Before the import: modules for other builds crash it, though it looks for their suffix.
        return None, "this Python is a free-threaded build"
    if part.module is None or not exists(part.library):
        return None, "it was not built"
    try:
        module = importlib.import_module(part.module)
    except ImportError as error:
        return None, str(error)
    if module.VERSION != MODULE_VERSION:
        return None, f"it is of version {module.VERSION}, this is version {MODULE_VERSION}"
    return module, ""


def reason_unused() -> str:
    """Return why one of the modules is not used; an empty string if all are used."""
    return next(filter(None, (find_module(part)[1] for part in MODULES)), "")
