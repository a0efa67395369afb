"""What a process of ``spawn`` or ``start_processes`` does, and how it reports the outcome.

May import :mod:`shmreduce.descriptor`, ``importing``, :mod:`shmreduce.interrupts`,
``anonymous`` and ``loading`` of the memory, :mod:`shmreduce.parent_death`,
:mod:`shmreduce.pickling`, :mod:`shmreduce.prctl`, ``tracebacks`` and
:mod:`shmreduce.unpickling`.

The child writes the outcome to an unnamed file that the parent made, not to a pipe. So
the child never waits for a reader, the parent never waits for the rest of a message,
and the outcome of a child that was killed is either complete or does not count.
"""

from __future__ import annotations

import _thread
import contextlib
import enum
import errno
import os
import pickle
import sys
import time
import weakref
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from shmreduce.descriptor import Descriptor
from shmreduce.importing import import_late
from shmreduce.interrupts import Interrupts, take_over
from shmreduce.memory.anonymous import anonymous_zeros
from shmreduce.parent_death import cut_lifelines, die_with_parent, parent_is_gone
from shmreduce.prctl import LONGEST_NAME, set_thread_name
from shmreduce.tracebacks import formatted, in_one_line

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PicklerChoice", "Raised", "ReportFile", "Returned", "SpawnCall", "run_call"]

_COMPLETE = b"\1"


class PicklerChoice(enum.Enum):
    """How results and exceptions are pickled: in the way the context pickles arguments."""

    STANDARD = "by the standard library's pickler, which shmreduce.install() may have taught"
    OWN = "by the pickler of shmreduce"

    def dumps(self, obj: object) -> bytes:
        """Return an object as bytes for the parent."""
        if self is PicklerChoice.STANDARD:
            return bytes(ForkingPickler.dumps(obj))
        # Imported late: it takes long to import, and not every process needs it.
        import_late("shmreduce.pickling")
        from shmreduce import pickling

        data, message = pickling.dumps(obj)
        if message is not None:
            message.commit()
        return bytes(data)

    def loads(self, data: bytes) -> Any:
        """Unpickle an object of a child."""
        if self is PicklerChoice.STANDARD:
            return ForkingPickler.loads(data)
        import_late("shmreduce.unpickling")
        from shmreduce import unpickling

        return unpickling.loads(data)

    def discard(self, data: bytes) -> None:
        """Give back the shared memory of a child's object that nobody has loaded."""
        import_late("shmreduce.memory.loading")
        from shmreduce.memory.loading import discard_message

        discard_message(data)


@dataclass(frozen=True)
class Returned:
    """The function returned. ``result`` is its pickled result, None if nobody wants it."""

    result: bytes | None


@dataclass(frozen=True)
class Raised:
    """The function raised an exception.

    ``error`` is the pickled exception, or None if pickling failed; ``reason`` says why.
    ``at`` is the time by the system's monotonic clock.
    """

    at: float
    text: str
    error: bytes | None
    reason: str


class ReportFile:
    """An unnamed file for one outcome, shared by the parent and one child.

    The child writes it once. The parent reads it after the child has ended.
    """

    def __init__(self) -> None:
        # The first byte says whether the outcome is complete: 0 for no.
        self._file = Descriptor(anonymous_zeros("shmreduce-outcome", len(_COMPLETE)))
        self._identity = _identity_of(self._file)

    def lost(self) -> bool:
        """Whether other code has closed the descriptor, as daemons do.

        Its number may be that of another file by now.
        """
        try:
            return _identity_of(self._file) != self._identity
        except OSError:
            return True

    def write(self, outcome: Returned | Raised) -> None:
        """Write the outcome. It counts only after all of it has been written.

        Raises
        ------
        OSError
            If the file is lost.
        """
        if self.lost():
            raise OSError(errno.EBADF, "the function has closed the file for its outcome")
        number = self._file.fileno()
        rest = memoryview(pickle.dumps(outcome))
        position = len(_COMPLETE)
        while rest:
            written = os.pwrite(number, rest, position)
            position += written
            rest = rest[written:]
        os.pwrite(number, _COMPLETE, 0)

    def read(self) -> Returned | Raised | None:
        """Return the outcome; None if the child has not written one completely."""
        return _outcome_in(self._file)

    def close(self) -> None:
        """Close the file. The kernel frees it when no process has it open any more."""
        self._file.close()

    def give_up(self, pickler: PicklerChoice) -> None:
        """Close the file, and give back the memory of an outcome that nobody has loaded.

        The parent calls it after the child has ended. Does nothing if the file is closed.
        """
        _give_up(self._file, pickler)

    def give_up_when_dropped(self, pickler: PicklerChoice) -> None:
        """Call :meth:`give_up` in this process when the object is dropped."""
        weakref.finalize(self, _give_up_elsewhere, self._file, pickler, os.getpid()).atexit = False


def _identity_of(file: Descriptor) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino


def _outcome_in(file: Descriptor) -> Returned | Raised | None:
    # By position, as it is written: no descriptor need be free for that.
    number = file.fileno()
    content = memoryview(bytearray(os.fstat(number).st_size))
    position = 0
    while found := os.preadv(number, [content[position:]], position):
        position += found
    start = len(_COMPLETE)
    if content[:start] != _COMPLETE:
        return None
    outcome: Returned | Raised = pickle.loads(content[start:])
    return outcome


def _give_up_elsewhere(file: Descriptor, pickler: PicklerChoice, owner: int) -> None:
    # A forked child also drops the object, but the memory belongs to the parent.
    if os.getpid() != owner:
        return
    data = _take_pickle(file)
    if data is not None:
        # In a new thread: the cycle collector may run this while the current thread holds
        # a lock that discarding needs. If no thread can be started, the memory is freed
        # with the last process that has it open.
        with contextlib.suppress(RuntimeError):
            _thread.start_new_thread(pickler.discard, (data,))


def _give_up(file: Descriptor, pickler: PicklerChoice) -> None:
    data = _take_pickle(file)
    if data is not None:
        pickler.discard(data)


def _take_pickle(file: Descriptor) -> bytes | None:
    """Close a file; return the pickle in its outcome, if there is one."""
    if file.closed:
        return None
    try:
        outcome = _outcome_in(file)
    except OSError:
        # Other code has closed the descriptor, as daemons do.
        outcome = None
    file.close()
    if outcome is None:
        return None
    return outcome.error if isinstance(outcome, Raised) else outcome.result


@dataclass(frozen=True)
class SpawnCall:
    """One child's work. The parent makes it; all start methods but ``fork`` pickle it.

    ``starting`` is None, or a pipe to which the parent writes one byte for each child when
    all children have been started.
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
    """Call the function in this process, write the outcome, and let the process end.

    Raises
    ------
    SystemExit
        If the function raised SystemExit, the same, which keeps its exit code. If it raised
        anything else, with code 1.
    """
    try:
        take_over()
        if call.death_signal:
            die_with_parent(call.lifeline, call.death_signal, call.parent)
        _name_process(call)
        if call.starting is not None:
            _wait_for_others(call.starting)
        _report_success(call, call.function(call.index, *call.arguments))
    except SystemExit as error:
        # As for Python, None and 0 are success; any other code is a failure.
        if error.code is None or (isinstance(error.code, int) and error.code == 0):
            _report_success(call, None)
        raise
    # KeyboardInterrupt too: a function that was interrupted has not succeeded.
    except BaseException as error:
        with Interrupts(every=True):
            call.report.write(_describe(error, call.pickler))
        sys.exit(1)
    finally:
        if parent_is_gone():
            # At exit, multiprocessing waits for this process's own children: end them.
            cut_lifelines()


def _wait_for_others(starting: Descriptor) -> None:
    if not os.read(starting.fileno(), 1):
        # End of file: the parent could not start all children.
        raise SystemExit(1)


def _report_success(call: SpawnCall, result: object) -> None:
    if call.wants_result:
        call.report.write(Returned(call.pickler.dumps(result)))
    elif not call.report.lost():
        call.report.write(Returned(None))
    # Otherwise the exit code says all that anybody wants to know.


def _describe(error: BaseException, pickler: PicklerChoice) -> Raised:
    at = time.monotonic()
    # Leave out the frame of run_call.
    trace = error.__traceback__ and error.__traceback__.tb_next
    text = formatted(error, trace)
    try:
        return Raised(at, text, pickler.dumps(error), "")
    except Exception as failure:
        return Raised(at, text, None, in_one_line(failure))


def _name_process(call: SpawnCall) -> None:
    """Show function and index in ``ps`` and ``top``; cut the function's name, not the index."""
    if sys.platform != "linux":
        return
    # str(), since a callable object may have anything there.
    name = str(getattr(call.function, "__name__", type(call.function).__name__))
    index = f":{call.index}"
    kept = name.encode()[: LONGEST_NAME - len(index)].decode("utf-8", "ignore")
    set_thread_name(kept + index)
