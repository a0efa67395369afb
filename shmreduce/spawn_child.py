"""What a process of the spawn family does, and how it tells its parent the outcome.

May import :mod:`shmreduce.descriptor`, :mod:`shmreduce.interrupts`, ``anonymous`` and
``loading`` of the memory, :mod:`shmreduce.parent_death`, :mod:`shmreduce.pickling`,
:mod:`shmreduce.prctl` and ``tracebacks``.

The outcome is written to an unnamed file that the parent made, not to a pipe:
the child never waits for a reader, the parent never waits for the rest of a
message, and what a killed child left behind is there whole or not at all.
"""

from __future__ import annotations

import _thread
import contextlib
import enum
import os
import pickle
import sys
import time
import weakref
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from shmreduce.descriptor import Descriptor
from shmreduce.interrupts import Interrupts, take_over
from shmreduce.memory.anonymous import anonymous_file
from shmreduce.parent_death import cut_lifelines, die_with_parent, parent_is_gone
from shmreduce.prctl import set_thread_name
from shmreduce.tracebacks import formatted

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PicklerChoice", "Raised", "ReportFile", "Returned", "SpawnCall", "run_call"]

_EMPTY, _COMPLETE = b"\0", b"\1"
_NAME_BYTES = 15
"""What the kernel keeps of a thread's name."""


class PicklerChoice(enum.Enum):
    """How results and exceptions are pickled: as the context pickles arguments."""

    STANDARD = "by the standard library's pickler, which shmreduce.install() may have taught"
    OWN = "by the pickler of shmreduce"

    def dumps(self, obj: object) -> bytes:
        """Return an object as bytes for the parent."""
        if self is PicklerChoice.STANDARD:
            return bytes(ForkingPickler.dumps(obj))
        # Not needed in each process, and not quick to import.
        from shmreduce import pickling

        data, message = pickling.dumps(obj)
        if message is not None:
            message.commit()
        return bytes(data)

    def loads(self, data: bytes) -> Any:
        """Return the object that a child has pickled."""
        if self is PicklerChoice.STANDARD:
            return ForkingPickler.loads(data)
        from shmreduce import pickling

        return pickling.loads(data)

    def discard(self, data: bytes) -> None:
        """Give back the shared memory of what a child has pickled and nobody has loaded."""
        from shmreduce.memory.loading import discard_message

        discard_message(data)


@dataclass(frozen=True)
class Returned:
    """The function returned; ``result`` is pickled, None if it was not asked for."""

    result: bytes | None


@dataclass(frozen=True)
class Raised:
    """The function raised.

    ``error`` is the pickled exception, None if pickling failed for ``reason``;
    ``at`` is the time of the system's monotonic clock.
    """

    at: float
    text: str
    error: bytes | None
    reason: str


class ReportFile:
    """An unnamed file for one outcome, shared by the parent and one child.

    Written once, by the child; read by the parent once the child has ended.
    """

    def __init__(self) -> None:
        self._file = Descriptor(anonymous_file("shmreduce-outcome"))
        os.pwrite(self._file.fileno(), _EMPTY, 0)

    def write(self, outcome: Returned | Raised) -> None:
        """Write the outcome; it counts once it is written to the end."""
        number = self._file.fileno()
        rest = memoryview(pickle.dumps(outcome))
        position = len(_EMPTY)
        while rest:
            written = os.pwrite(number, rest, position)
            position += written
            rest = rest[written:]
        os.pwrite(number, _COMPLETE, 0)

    def read(self) -> Returned | Raised | None:
        """Return the outcome; None if the child has not told any."""
        return _outcome_in(self._file)

    def close(self) -> None:
        """Give the file up; its memory is freed with the last process that has it."""
        self._file.close()

    def give_up(self, pickler: PicklerChoice) -> None:
        """Close the file; what the outcome holds and nobody has loaded is given back.

        To be called by the parent, once the child has ended. Nothing happens if
        the file is closed.
        """
        _give_up(self._file, pickler)

    def give_up_when_dropped(self, pickler: PicklerChoice) -> None:
        """See to it that the file, when it is dropped in this process, is given up first."""
        weakref.finalize(self, _give_up_elsewhere, self._file, pickler, os.getpid()).atexit = False


def _outcome_in(file: Descriptor) -> Returned | Raised | None:
    with os.fdopen(os.dup(file.fileno()), "rb") as stream:
        stream.seek(0)
        mark, content = stream.read(1), stream.read()
    if mark != _COMPLETE:
        return None
    outcome: Returned | Raised = pickle.loads(content)
    return outcome


def _give_up_elsewhere(file: Descriptor, pickler: PicklerChoice, owner: int) -> None:
    # A forked child drops what it inherited, and what it inherited is its parent's.
    if os.getpid() != owner:
        return
    data = _last_taken_from(file)
    if data is not None:
        # The collector may come while this very thread holds a lock that is needed for it.
        # Where no thread can be had, what is left goes with the last process that has it.
        with contextlib.suppress(RuntimeError):
            _thread.start_new_thread(pickler.discard, (data,))


def _give_up(file: Descriptor, pickler: PicklerChoice) -> None:
    data = _last_taken_from(file)
    if data is not None:
        pickler.discard(data)


def _last_taken_from(file: Descriptor) -> bytes | None:
    """Close a file; return what is pickled in the outcome that it held."""
    if file.closed:
        return None
    try:
        outcome = _outcome_in(file)
    except OSError:
        # No descriptor is free.
        outcome = None
    file.close()
    if outcome is None:
        return None
    return outcome.error if isinstance(outcome, Raised) else outcome.result


@dataclass(frozen=True)
class SpawnCall:
    """One child's work, made by the parent; pickled where the start method pickles.

    ``starting`` is None or a pipe with one byte for each child, written when
    all of them have been started.
    """

    function: Callable[..., Any]
    index: int
    arguments: tuple[Any, ...]
    wants_result: bool
    pickler: PicklerChoice
    report: ReportFile
    parent: int
    lifeline: Descriptor
    death_signal: int
    starting: Descriptor | None


def run_call(call: SpawnCall) -> None:
    """Call the function in this process, tell the outcome, and let the process end.

    Raises
    ------
    SystemExit
        The function's own, so that its exit code is kept; with code 1 if the
        function raised something else.
    """
    try:
        take_over()
        if call.death_signal:
            die_with_parent(call.lifeline, call.death_signal, call.parent)
        _name_process(call)
        if call.starting is not None:
            _wait_for_others(call.starting)
        result = call.function(call.index, *call.arguments)
        data = call.pickler.dumps(result) if call.wants_result else None
        call.report.write(Returned(data))
    except SystemExit as error:
        # As Python takes it: anything else is printed, and is a failure.
        if error.code is None or (isinstance(error.code, int) and error.code == 0):
            call.report.write(Returned(call.pickler.dumps(None)))
        raise
    # KeyboardInterrupt too: a function that was interrupted has not succeeded.
    except BaseException as error:
        with Interrupts(every=True):
            call.report.write(_describe(error, call.pickler))
        sys.exit(1)
    finally:
        if parent_is_gone():
            # The interpreter waits for this process's own children before it ends.
            cut_lifelines()


def _wait_for_others(starting: Descriptor) -> None:
    if not os.read(starting.fileno(), 1):
        # The parent has given up.
        raise SystemExit(1)


def _describe(error: BaseException, pickler: PicklerChoice) -> Raised:
    at = time.monotonic()
    # Without the frame of run_call.
    trace = error.__traceback__ and error.__traceback__.tb_next
    text = formatted(error, trace)
    try:
        return Raised(at, text, pickler.dumps(error), "")
    except Exception as failure:
        return Raised(at, text, None, f"{type(failure).__name__}: {failure}")


def _name_process(call: SpawnCall) -> None:
    """Show function and index in ``ps`` and ``top``; the index is what must be told."""
    if sys.platform != "linux":
        return
    name = getattr(call.function, "__name__", type(call.function).__name__)
    index = f":{call.index}"
    kept = name.encode()[: _NAME_BYTES - len(index)].decode("utf-8", "ignore")
    set_thread_name(kept + index)
