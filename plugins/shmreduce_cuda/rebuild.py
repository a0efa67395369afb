"""The receiving side: functions that messages name to rebuild arrays.

May import public names of :mod:`shmreduce`, and ``devices``, ``errors``,
``exports``, ``layout``, ``libraries``, ``messages``, ``runtime`` and ``view`` of
this plugin. Messages contain the functions' names and arguments, so these are a protocol.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from shmreduce import ProducerDied, StaleHandleError, import_block
from shmreduce_cuda.devices import ordinal_of
from shmreduce_cuda.errors import (
    CudaDriverError,
    CudaExpiredError,
    CudaMessageError,
    CudaProducerDied,
    CudaSharingError,
)
from shmreduce_cuda.exports import lease_text
from shmreduce_cuda.layout import Layout
from shmreduce_cuda.libraries import make_array, make_empty
from shmreduce_cuda.messages import read_description
from shmreduce_cuda.runtime import current
from shmreduce_cuda.view import CudaArrayView

if TYPE_CHECKING:
    from shmreduce import Block
    from shmreduce_cuda.imports import Attachment
    from shmreduce_cuda.messages import Description
    from shmreduce_cuda.runtime import Runtime

_STAT_BYTES = 1024
"""More than the longest name of a process, after which its state stands."""
_PATIENCE = 60.0
"""Seconds to wait for a stream of a process of which nobody can say whether it is alive."""

__all__ = ["rebuild_cuda_array", "rebuild_empty_cuda_array", "unwrap"]


def rebuild_cuda_array(fields: tuple[Any, ...], handle: bytes) -> Any:
    """Return an array over the memory of the process that sent it.

    Raises
    ------
    CudaSharingError
        If the memory cannot be opened. The lease is released then.
    """
    description = read_description(fields)
    runtime = current()
    if description.token == runtime.token:
        return _rebuild_here(runtime, description, handle)
    # May raise, so before the lease is taken. The core releases a lease that was not taken
    # at once, but one that was taken lives as long as the traceback.
    ordinal = ordinal_of(description.uuid)
    lease = _take_lease(description, handle)
    attachment = _attach(runtime, description, lease, ordinal)
    _await_event(runtime, description, ordinal)
    mapping = attachment.mapping
    return _make(description, mapping.base, mapping.size, ordinal, attachment)


def rebuild_empty_cuda_array(
    library: str, layout: tuple[Any, ...], extras: dict[str, Any], uuid: bytes | None
) -> Any:
    """Return an array without elements, on its device if that is known.

    Raises
    ------
    CudaDeviceError
        If this process does not see the device.
    """
    ordinal = None if uuid is None else ordinal_of(uuid)
    return make_empty(library, Layout(*layout), extras, ordinal)


def unwrap(array: Any) -> Any:
    """Return the argument, for reducers that replace an object by one for another reducer."""
    return array


def _rebuild_here(runtime: Runtime, description: Description, handle: bytes) -> Any:
    """Return an array over memory of this process, which CUDA does not let it open again."""
    # Looked up before the lease is taken, since until then the message's lease keeps the
    # export.
    export = runtime.exports.find(description.number)
    source = None if export is None else export.source
    _take_lease(description, handle)
    if export is None or source is None:
        raise CudaExpiredError(
            "this process has freed the array that the message refers to; send it again",
            segment=None,
            block=None,
        )
    _await_event(runtime, description, export.ordinal)
    return _make(description, export.base, export.size, export.ordinal, source)


def _make(description: Description, base: int, size: int, ordinal: int, owner: Any) -> Any:
    view = CudaArrayView(
        base + description.offset,
        description.layout,
        ordinal,
        owner,
        read_only=description.read_only,
    )
    return make_array(description.library, view, base, size, description.extras)


def _take_lease(description: Description, handle: bytes) -> Block:
    try:
        lease = import_block(handle)
    except ProducerDied as error:
        raise _died(description) from error
    except StaleHandleError as error:
        raise CudaExpiredError(
            f"process {description.pid} has freed the array behind this message: every receiver "
            "that had it has dropped it. Send it once for each receiver, or keep what "
            "shmreduce_cuda.share() returns for as long as messages of it are to be loaded",
            **error.fields,
        ) from error
    expected = lease_text(description.token, description.number)
    if bytes(lease.buffer) != expected:
        reason = "its lease is that of another array"
        raise CudaMessageError(
            f"not a message of a CUDA array: {reason}. It was damaged or made up", reason=reason
        )
    return lease


def _attach(runtime: Runtime, description: Description, lease: Block, ordinal: int) -> Attachment:
    # Checked even if the memory is open here already: it went away with the sender.
    if not _is_alive(runtime, description):
        raise _died(description)
    runtime.keeper.look_after()
    try:
        return runtime.imports.attach(description, lease, ordinal)
    except CudaDriverError as error:
        if not _is_alive(runtime, description):
            raise _died(description) from error
        here = description.namespace == runtime.namespace
        error.add_note(
            f"The memory belongs to process {description.pid}, which is "
            + ("alive" if here else "in another PID namespace: share it (docker run --pid)")
            + ". Both processes must run as the same user, and use the same GPU instance if the "
            "device is partitioned (MIG)."
        )
        raise


def _await_event(runtime: Runtime, description: Description, ordinal: int) -> None:
    if description.event is None:
        return
    token, handle = description.event
    if token == runtime.token:
        runtime.events.wait_here(ordinal, handle)
        return
    deadline = time.monotonic() + _PATIENCE

    def is_alive() -> bool:
        if description.namespace != runtime.namespace and time.monotonic() > deadline:
            raise CudaSharingError(
                f"the stream on which the array was shared did not get so far within "
                f"{_PATIENCE:.0f} s. Whether its process, {description.pid}, is alive cannot be "
                "seen from here, since it is in another PID namespace: share it (docker run "
                "--pid), or send the array without a stream"
            )
        return _is_alive(runtime, description)

    try:
        happened = runtime.events.wait(ordinal, token, handle, is_alive)
    except CudaDriverError as error:
        if not _is_alive(runtime, description):
            raise _died(description) from error
        raise
    if not happened:
        raise _died(description)


def _died(description: Description) -> CudaProducerDied:
    return CudaProducerDied(
        f"process {description.pid}, which owned the memory of the CUDA array, is dead, and the "
        "memory is gone; send again from a process that lives until its receivers are done",
        pid=description.pid,
        segment=None,
        locator=None,
    )


def _is_alive(runtime: Runtime, description: Description) -> bool:
    """Return False if the sender is known to have ended, collected by its parent or not."""
    if description.namespace != runtime.namespace:
        # In another PID namespace its pid means nothing.
        return True
    try:
        # Not by pathlib: this is done with each message, and takes a quarter of the time.
        stat = os.open(f"/proc/{description.pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        # Nothing was learned about the sender: this process may have too many files open.
        return True
    try:
        text = os.read(stat, _STAT_BYTES)
    except ProcessLookupError:
        # It ended after the file was opened.
        return False
    finally:
        os.close(stat)
    # The name, in parentheses, may contain any characters (proc_pid_stat(5)).
    return text.rpartition(b")")[2].split()[0] not in (b"Z", b"X")
