"""Shared memory: segments, blocks, leases, and what happens when processes die.

The modules, lowest first; each may import only those before it:

``locks``       byte locks of open file descriptions
``mapping``     address ranges over a file, shared or private
``layout``      what stands where in a segment's file
``segment``     one open segment: tables, lease transitions under block locks
``ledger``      which forked children may still see this process's memory
``family``      the processes that share one budget and one mailbox
``heap``        the allocator over the segments that this process made
``attachments`` the segments of other processes, opened once
``blocks``      live blocks of this process and the death of their last view
``message``     leases on behalf of one pickled message; handles
``runtime``     the one state of this process; fork, exit, idle return
``inspection``  what is alive on this machine, for people
"""

from __future__ import annotations

# What follows is imported lazily (PEP 562): a plugin that needs one function
# of this package is itself loaded by a module that this package imports.

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shmreduce.memory.attachments import open_process_descriptor
    from shmreduce.memory.blocks import Block
    from shmreduce.memory.message import Message, allocate, find_block, import_block

__all__ = [
    "Block",
    "Message",
    "allocate",
    "find_block",
    "import_block",
    "open_process_descriptor",
]

_DEFINED_IN = {
    "Block": "blocks",
    "Message": "message",
    "allocate": "message",
    "find_block": "message",
    "import_block": "message",
    "open_process_descriptor": "attachments",
}


def __getattr__(name: str) -> object:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_DEFINED_IN[name]}"), name)
    globals()[name] = value
    return value
