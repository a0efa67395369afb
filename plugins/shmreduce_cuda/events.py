"""Events, by which a receiver waits for one stream of the sender instead of all.

May import ``devices``, ``driver``, ``errors`` and ``locks`` of this plugin.

There is one event for each stream that was passed to ``share``. It is never destroyed,
since a receiver may open it later. It is recorded again with each message, which moves
it to a later point of the stream. So a receiver may wait longer than necessary, but never
too short. That is true even if the stream was destroyed and its handle now belongs to a
new stream: before the event is recorded there, the new stream is made to wait for it.
"""

from __future__ import annotations

import threading
from ctypes import byref, c_void_p
from typing import TYPE_CHECKING, Any

from shmreduce_cuda.devices import current_context
from shmreduce_cuda.driver import Bytes64
from shmreduce_cuda.errors import CudaMemoryError, CudaSharingError
from shmreduce_cuda.locks import InterruptibleLock

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmreduce_cuda.driver import Driver

__all__ = ["Events", "stream_handle"]

_FLAGS = 2 | 4
"""``CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS``"""
_NOT_READY = 600
"""``CUDA_ERROR_NOT_READY``"""
_NOT_SUPPORTED = 801
"""``CUDA_ERROR_NOT_SUPPORTED``"""
_PER_THREAD = 2
"""``CU_STREAM_PER_THREAD``"""
_MOST_FOREIGN = 64
"""How many events of other processes are kept open."""
_PAUSE = 0.1
"""Seconds between two checks whether the process whose event is waited for is alive."""


def stream_handle(stream: Any) -> int:
    """Return the handle of a stream of any library.

    Parameters
    ----------
    stream : int or object
        A handle; an object with ``__cuda_stream__``; or a stream of CuPy
        (``ptr``), torch (``cuda_stream``) or numba (``handle`` and ``int``).

    Raises
    ------
    CudaMemoryError
        If it is none of these.

    Examples
    --------
    >>> stream_handle(2)
    2
    """
    if isinstance(stream, int):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        _, handle = protocol() if callable(protocol) else protocol
        return int(handle)
    for name in ("ptr", "cuda_stream"):
        found = getattr(stream, name, None)
        if isinstance(found, int):
            return found
    if hasattr(stream, "handle") and hasattr(stream, "__int__"):
        # numba's. Its handle has several types, and is None for the default stream.
        return int(stream)
    raise CudaMemoryError(
        f"{type(stream).__qualname__} is not a stream; give a handle (an int), or a stream of "
        "CuPy, numba or torch",
        kind="an array with an object that is not a stream",
        remedy="give a handle or a stream",
    )


class Events:
    """The events that one process has made, and those of others that it has opened."""

    def __init__(self) -> None:
        self._lock = InterruptibleLock("recording or opening an event")
        self._own: dict[tuple[int, int, int], tuple[c_void_p, bytes]] = {}
        self._foreign: dict[tuple[bytes, bytes], _Foreign] = {}

    def __len__(self) -> int:
        return len(self._own) + len(self._foreign)

    def record(self, ordinal: int, stream: int) -> bytes | None:
        """Record the event of a stream; return its handle for other processes.

        If events cannot be shared here, waits for the stream and returns None.

        Raises
        ------
        CudaSharingError
            If a signal handler has interrupted this very call to make another one.
        """
        key = ordinal, stream, threading.get_ident() if stream == _PER_THREAD else 0
        with current_context(ordinal) as driver:
            with self._lock:
                known = self._own.get(key) or _make(driver)
                if known is not None:
                    self._own[key] = known
                    event, handle = known
                    # The handle may have belonged to a destroyed stream whose work is not
                    # done. A receiver that waits for that work must not be satisfied by this
                    # stream's.
                    driver.call("cuStreamWaitEvent", stream, event, 0)
                    driver.call("cuEventRecord", event, stream)
                    return handle
            # Without the lock: those that wait for other streams need not wait for this one.
            driver.call("cuStreamSynchronize", stream)
            return None

    def wait_here(self, ordinal: int, handle: bytes) -> None:
        """Wait for an event of this process, which only other processes can open by handle."""
        events = [event for event, own in list(self._own.values()) if own == handle]
        with current_context(ordinal) as driver:
            for event in events:
                driver.call("cuEventSynchronize", event)

    def wait(
        self, ordinal: int, token: bytes, handle: bytes, is_alive: Callable[[], bool]
    ) -> bool:
        """Wait for an event of another process; return False if that dies first.

        Raises
        ------
        CudaDriverError
            If the event cannot be opened or waited for.
        RuntimeError
            If no thread can be started to wait in.
        """
        with current_context(ordinal) as driver, self._lock:
            event = self._open(driver, ordinal, (token, handle))
            code = driver.attempt("cuEventQuery", event.event)
            if code == _NOT_READY:
                event.waiters += 1
            elif code:
                raise driver.failure("cuEventQuery", code)
            else:
                return True
        waiting = _Waiting(event, self._lock)
        try:
            waiting.start()
        except BaseException:
            # No thread can be started.
            waiting.end()
            raise
        while waiting.is_alive():
            waiting.join(_PAUSE)
            if waiting.is_alive() and not is_alive():
                return False
        if waiting.error is not None:
            raise waiting.error
        return True

    def _open(self, driver: Driver, ordinal: int, key: tuple[bytes, bytes]) -> _Foreign:
        known = self._foreign.pop(key, None)
        if known is None:
            event = c_void_p()
            driver.call("cuIpcOpenEventHandle", byref(event), Bytes64.from_buffer_copy(key[1]))
            known = _Foreign(event, ordinal)
            self._drop_oldest()
        # Inserted at the end, so that the first one was used longest ago.
        self._foreign[key] = known
        return known

    def _drop_oldest(self) -> None:
        idle = [key for key, each in self._foreign.items() if not each.waiters]
        if len(self._foreign) < _MOST_FOREIGN or not idle:
            return
        oldest = self._foreign.pop(idle[0])
        with current_context(oldest.ordinal) as driver:
            driver.call("cuEventDestroy_v2", oldest.event)


class _Foreign:
    """An event of another process, and how many threads wait for it."""

    __slots__ = ("event", "ordinal", "waiters")

    def __init__(self, event: c_void_p, ordinal: int) -> None:
        self.event = event
        self.ordinal = ordinal
        self.waiters = 0


class _Waiting(threading.Thread):
    """Waits for an event, in a thread that can be abandoned.

    CUDA does not promise that ``cuEventSynchronize`` returns if the process whose stream
    must reach the event dies. Polling with ``cuEventQuery`` instead might never end, since
    the sender may record the event again and again.
    """

    def __init__(self, event: _Foreign, lock: InterruptibleLock) -> None:
        super().__init__(name="shmreduce-cuda-event", daemon=True)
        self._event = event
        self._waiters_lock = lock
        self.error: CudaSharingError | None = None

    def run(self) -> None:
        """Wait for the event."""
        try:
            with current_context(self._event.ordinal) as driver:
                driver.call("cuEventSynchronize", self._event.event)
        except CudaSharingError as error:
            self.error = error
        finally:
            self.end()

    def end(self) -> None:
        """Stop using the event, which may be destroyed from now on."""
        with self._waiters_lock:
            self._event.waiters -= 1


def _make(driver: Driver) -> tuple[c_void_p, bytes] | None:
    event, handle = c_void_p(), Bytes64()
    code = driver.attempt("cuEventCreate", byref(event), _FLAGS)
    if code == _NOT_SUPPORTED:
        return None
    if code:
        raise driver.failure("cuEventCreate", code)
    code = driver.attempt("cuIpcGetEventHandle", byref(handle), event)
    if code:
        driver.call("cuEventDestroy_v2", event)
        if code == _NOT_SUPPORTED:
            return None
        raise driver.failure("cuIpcGetEventHandle", code)
    return event, bytes(handle)
