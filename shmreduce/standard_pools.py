"""Fails the task of a standard library's pool whose message cannot be loaded or sent.

May import :mod:`shmreduce.errors` and the standard library.

``multiprocessing.pool.Pool`` assumes that its messages can be loaded. If one cannot, the
thread that reads the results ends, or the worker that reads the task does, and callers
wait for ever for their results. With shared memory a message may fail to load, because
no descriptor is free, or a worker was killed before its result was read. Then the pool
gets a message that fails this one task with the error.

A worker that cannot send a result fails the task by a ``MaybeEncodingError``, which has
only the ``repr`` of the error. If the error is one of shmreduce, for example that there is
no room for the result, it is sent instead.
"""

from __future__ import annotations

import importlib
import pickletools
import sys
from typing import Any, NoReturn

from shmreduce.errors import ShmreduceError

__all__ = ["instead_of_encoding_error", "instead_of_message"]

if sys.version_info >= (3, 15):
    # The traceback module imports it when it first formats a traceback. If no descriptor is
    # free then, a worker cannot import it, and ends without answering its task.
    importlib.import_module("_colorize")

_HEAD = 128
"""The numbers of job and part are among this many first bytes of a pool's message."""
_INTEGERS = {"BININT", "BININT1", "BININT2", "LONG1"}
"""Names of the pickle opcodes for integers."""


def instead_of_message(data: Any, error: ShmreduceError) -> tuple[Any, ...] | None:
    """Return a task or a result that fails with ``error``; None if no pool is reading.

    Must be called directly by the function that replaces ``ForkingPickler.loads``, since it
    looks at the frames above that. A message that a task or a callback reads from its own
    connection does not count.
    """
    pool = sys.modules.get("multiprocessing.pool")
    if pool is None:
        return None
    # Frame 0 is this function, 1 loads(), 2 the queue's get() or the connection's recv(),
    # and 3 their caller.
    reader = sys._getframe(3).f_code
    if reader is pool.worker.__code__:
        return (*_numbers(data), _raise, (error,), {})
    if reader is pool.Pool._handle_results.__code__:
        return (*_numbers(data), (False, error))
    return None


def instead_of_encoding_error(message: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a worker's message with the error itself, if that is why a result was not sent.

    Call it with the object that ``ForkingPickler.dump`` gets. Any other message is returned
    unchanged. The error is found in ``sys.exception()``, since the worker sends the message
    in the ``except`` block for it.
    """
    error = sys.exception()
    if not isinstance(error, ShmreduceError) or len(message) != 3:
        return message
    job, part, result = message
    pool = sys.modules.get("multiprocessing.pool")
    if pool is None or type(result) is not tuple or len(result) != 2:
        return message
    told = result[1]
    # Only if it is about this error: in the same block there may be one about another.
    if type(told) is not pool.MaybeEncodingError or told.exc != repr(error):
        return message
    return job, part, (False, error)


def _numbers(data: Any) -> tuple[Any, Any]:
    """Return the numbers of job and part, with which each message begins."""
    opcodes = pickletools.genops(bytes(data[:_HEAD]))
    numbers = (value for opcode, value, _ in opcodes if opcode.name in _INTEGERS)
    return next(numbers), next(numbers)


def _raise(error: ShmreduceError) -> NoReturn:
    raise error
