"""The receiving side: functions that messages name to rebuild arrays.

May import public names of :mod:`shmreduce`, and ``devices``, ``errors``,
``exports``, ``layout``, ``libraries``, ``messages``, ``runtime`` and ``view`` of
this plugin. The functions' names and parameters are what is written in messages.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmreduce import ProducerDied, StaleHandleError, import_block
from shmreduce_cuda.devices import ordinal_of
from shmreduce_cuda.errors import (
    CudaDriverError,
    CudaExpiredError,
    CudaMessageError,
    CudaProducerDied,
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

__all__ = ["rebuild_cuda_array", "rebuild_empty_cuda_array", "unwrap"]


def rebuild_cuda_array(fields: tuple[Any, ...], handle: bytes) -> Any:
    """Return an array over the memory of the process that sent it.

    Raises
    ------
    CudaSharingError
        If the memory cannot be had; the lease is released then.
    """
    description = read_description(fields)
    runtime = current()
    if description.token == runtime.token:
        return _rebuild_here(runtime, description, handle)
    # Before the lease is taken: what was not taken is released at once by the
    # core, what was taken lives as long as the traceback.
    ordinal = ordinal_of(description.uuid)
    lease = _take_lease(description, handle)
    attachment = _attach(runtime, description, lease, ordinal)
    _await_event(runtime, description, ordinal)
    mapping = attachment.mapping
    return _make(description, mapping.base, mapping.size, ordinal, attachment)


def rebuild_empty_cuda_array(library: str, layout: tuple[Any, ...], extras: dict[str, Any]) -> Any:
    """Return an array without elements."""
    return make_empty(library, Layout(*layout), extras)


def unwrap(array: Any) -> Any:
    """Return the argument: for reducers that hand an array to another one."""
    return array


def _rebuild_here(runtime: Runtime, description: Description, handle: bytes) -> Any:
    """Return an array over memory of this very process, which it cannot open."""
    # Looked up before the lease is taken: the message's lease, which keeps the
    # export, ends with that.
    export = runtime.exports.find(description.number)
    source = None if export is None else export.source
    _take_lease(description, handle)
    if export is None or source is None:
        raise CudaExpiredError(
            "the array behind this message has been given up; send it again",
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
        if _is_alive(current(), description):
            raise _forwarder_died(description, error) from error
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
    # Also where the memory is open here already: it is not the sender's any more.
    if not _is_alive(runtime, description):
        raise _died(description)
    try:
        return runtime.imports.attach(description, lease, ordinal)
    except CudaDriverError as error:
        if not _is_alive(runtime, description):
            raise _died(description) from error
        error.add_note(
            f"The memory is of process {description.pid}, which lives. Both processes must be of "
            "one user and in one PID namespace (docker run --pid), on one GPU instance if the "
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
    try:
        happened = runtime.events.wait(
            ordinal, token, handle, lambda: _is_alive(runtime, description)
        )
    except CudaDriverError as error:
        if not _is_alive(runtime, description):
            raise _died(description) from error
        raise
    if not happened:
        raise _died(description)


def _died(description: Description) -> CudaProducerDied:
    return CudaProducerDied(
        f"process {description.pid}, whose memory the CUDA array is, is dead, and the memory is "
        "gone with it; send again from a process that lives until its receivers are done",
        pid=description.pid,
        segment=None,
        locator=None,
    )


def _forwarder_died(description: Description, error: ProducerDied) -> CudaProducerDied:
    return CudaProducerDied(
        f"the process that sent the CUDA array on was killed before the message was read, and the "
        f"message is lost with it; process {description.pid}, whose memory the array is, lives: "
        "send it again",
        **error.fields,
    )


def _is_alive(runtime: Runtime, description: Description) -> bool:
    """Return False if the sender has ended; a killed one need not have been waited for."""
    if description.namespace != runtime.namespace:
        # Its pid means nothing here.
        return True
    try:
        text = Path(f"/proc/{description.pid}/stat").read_bytes()
    except OSError:
        return False
    # The name, in parentheses, may contain anything: proc_pid_stat(5).
    return text.rpartition(b")")[2].split()[0] not in (b"Z", b"X")
