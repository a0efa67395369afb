"""Fails the task of a standard library's pool whose message cannot be loaded or sent.

May import :mod:`shmreduce.errors` and the standard library.

``multiprocessing.pool.Pool`` assumes that its messages can be loaded. If one cannot, the
thread that reads the results ends, or the worker that reads the task does, and callers
wait for ever for their results. With shared memory a message may fail to load, because
no descriptor is free, or a worker was killed before its result was read. Then the pool
gets a message that fails this one task with the error.

A worker that cannot send a result fails the task itself, by a ``MaybeEncodingError``. Of
the error, such as that there is no room for the result, that has nothing but the ``repr``.
Where the error is one of shmreduce, it is sent instead.
"""

from __future__ import annotations

import importlib
import pickletools
import sys
from typing import Any, NoReturn

from shmreduce.errors import ShmreduceError

__all__ = ["instead_of_encoding_error", "instead_of_message"]

if sys.version_info >= (3, 15):
    # What formats a traceback imports it when it first does. A worker that cannot, for want
    # of a descriptor, ends, and does not say what has become of its task.
    importlib.import_module("_colorize")

_HEAD = 128
"""Bytes at the beginning of a pool's message that have its two numbers among them."""
_INTEGERS = {"BININT", "BININT1", "BININT2", "LONG1"}
"""Names of the opcodes for integers of a pickle."""


def instead_of_message(data: Any, error: ShmreduceError) -> tuple[Any, ...] | None:
    """Return a task or a result that fails with ``error``; None if no pool is reading.

    To be called by what ``ForkingPickler.loads`` is. A message that a task or a
    callback reads from a connection of its own is no pool's.
    """
    pool = sys.modules.get("multiprocessing.pool")
    if pool is None:
        return None
    # This function, loads, the queue's get or the connection's recv, who called that.
    reader = sys._getframe(3).f_code
    if reader is pool.worker.__code__:
        return (*_numbers(data), _raise, (error,), {})
    if reader is pool.Pool._handle_results.__code__:
        return (*_numbers(data), (False, error))
    return None


def instead_of_encoding_error(message: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a worker's message with the error itself, if that is why a result was not sent.

    To be called with what ``ForkingPickler.dump`` is given. Returns any other message as
    it is. The worker is handling the error while it tells of it: the error is found there.
    """
    error = sys.exception()
    if not isinstance(error, ShmreduceError) or len(message) != 3:
        return message
    job, part, result = message
    pool = sys.modules.get("multiprocessing.pool")
    if pool is None or type(result) is not tuple or len(result) != 2:
        return message
    told = result[1]
    # What another error has told in the same handler is not replaced.
    if type(told) is not pool.MaybeEncodingError or told.exc != repr(error):
        return message
    return job, part, (False, error)


def _numbers(data: Any) -> tuple[Any, Any]:
    """Return the job's number and that of the part, with which each message begins."""
    opcodes = pickletools.genops(bytes(data[:_HEAD]))
    numbers = (value for opcode, value, _ in opcodes if opcode.name in _INTEGERS)
    return next(numbers), next(numbers)


def _raise(error: ShmreduceError) -> NoReturn:
    raise error
