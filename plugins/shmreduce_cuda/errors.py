"""The errors of the plugin, which all derive from ``CudaSharingError``.

May import public names of :mod:`shmreduce`.
"""

from __future__ import annotations

from shmreduce import InvalidHandleError, ProducerDied, ShmreduceError, StaleHandleError

__all__ = [
    "CudaDeviceError",
    "CudaDriverError",
    "CudaExpiredError",
    "CudaForkError",
    "CudaMemoryError",
    "CudaMessageError",
    "CudaProducerDied",
    "CudaSharingError",
    "CudaUnavailableError",
]


class CudaSharingError(ShmreduceError):
    """Base of every error about CUDA arrays.

    Examples
    --------
    >>> import pickle
    >>> error = CudaMemoryError("managed memory cannot be shared", kind="managed", remedy="copy")
    >>> isinstance(error, CudaSharingError), pickle.loads(pickle.dumps(error)).kind
    (True, 'managed')
    """


class CudaUnavailableError(CudaSharingError):
    """There is no driver that can be used, or it lacks a function.

    Fields: ``reason``.
    """


class CudaForkError(CudaSharingError):
    """The process was forked from one that uses CUDA, and CUDA does not work in it.

    Fields: ``pid`` (of the parent that used CUDA; None if it is not known).
    """


class CudaMemoryError(CudaSharingError):
    """The array's memory is of a kind that cannot be sent.

    Fields: ``kind``, ``remedy``.
    """


class CudaDeviceError(CudaSharingError):
    """The array's device is not visible to this process.

    Fields: ``uuid``, ``visible`` (UUIDs).
    """


class CudaDriverError(CudaSharingError):
    """A call of the driver failed.

    Fields: ``function``, ``code``, ``name`` (of the code).
    """


class CudaMessageError(CudaSharingError, InvalidHandleError):
    """The message was damaged, or made by another version of the plugin.

    Fields: ``reason``.
    """


class CudaExpiredError(CudaSharingError, StaleHandleError):
    """The sender has freed the array that the message refers to.

    Fields: ``segment``, ``block`` (of the lease).
    """


class CudaProducerDied(CudaSharingError, ProducerDied):
    """The process that owns the array's memory died before the array was received.

    Fields: ``pid``, ``segment``, ``locator`` (of the lease; None if the lease outlived
    the memory).
    """
