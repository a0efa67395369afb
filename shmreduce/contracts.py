"""The contracts that plugins implement.

Reducers, sharing strategies, array factories and memory handlers.

May import :mod:`shmreduce.errors` only; the memory layer is named in
annotations alone.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    Protocol,
    get_args,
    runtime_checkable,
)

from shmreduce.errors import ConfigurationError, NotShareableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shmreduce.memory.blocks import Block
    from shmreduce.memory.message import Message

__all__ = [
    "AllocatorFunctions",
    "ArrayFactory",
    "MemoryHandlers",
    "Mode",
    "Reducer",
    "SegmentFile",
    "SharingStrategy",
    "check_mode",
    "check_nbytes",
]

Mode = Literal["rw", "ro", "cow"]
"""How a shared block appears to its receivers.

``rw``: everybody sees everybody's writes. ``ro``: receivers cannot write.
``cow``: each receiver writes into private pages of its own.
"""

_MODES = get_args(Mode)


def check_mode(mode: str) -> None:
    """Raise unless ``mode`` is one of the modes.

    Raises
    ------
    ConfigurationError
        Its message lists the modes.
    """
    if mode not in _MODES:
        raise ConfigurationError(
            f"mode={mode!r}: must be one of {', '.join(map(repr, _MODES))}",
            setting="mode",
            value=mode,
        )


def check_nbytes(nbytes: int) -> int:
    """Return a number of bytes as an int; it may be an integer of NumPy's.

    Raises
    ------
    ConfigurationError
        If it is not an integer, or negative.
    """
    try:
        count = operator.index(nbytes)
    except TypeError:
        count = -1
    if count < 0:
        raise ConfigurationError(
            f"nbytes must be an integer of 0 or more, not {nbytes!r}",
            setting="nbytes",
            value=nbytes,
        )
    return count


class Reducer(ABC):
    """Turns objects of some types into handles of shared memory.

    A reducer is found by type. ``types`` holds classes, or qualified names
    such as ``"numpy.ndarray"`` for classes whose module need not be imported
    yet. With ``subclasses`` the reducer is also asked for subclasses; the
    nearest class of the object's MRO that has a reducer wins.

    Examples
    --------
    >>> class Plain(Reducer):
    ...     types = ("mypackage.Signal",)
    ...     def reduce(self, obj, message):
    ...         return NotImplemented
    >>> Plain().subclasses
    False
    """

    types: Sequence[type | str] = ()
    subclasses: bool = False

    def prepare(self) -> None:
        """Import what the other methods need, if that was not done before.

        Called before the reducer is asked for the first time about an object of a class,
        at least once in each process that was not forked. Forks of other threads wait
        meanwhile: a child that was forked during an import could never import the same
        module (https://docs.python.org/3/library/os.html#os.fork). Do nothing else here.
        A second call must do no harm. The default does nothing.
        """

    @abstractmethod
    def reduce(self, obj: Any, message: Message) -> Any:
        """Return what ``__reduce__`` would return, with handles for the buffers.

        Parameters
        ----------
        obj : object
            An instance of one of ``types``; it stays the caller's.
        message : Message
            The message being pickled. Blocks taken from it belong to the
            message and are given back if pickling fails.

        Returns
        -------
        tuple or NotImplemented
            ``(rebuild, args)`` as in the pickle protocol, where ``rebuild``
            is importable by name at the receiver; ``NotImplemented`` asks for
            ordinary pickling.
        """

    def buffer_of(
        self, obj: Any, at_least: int
    ) -> tuple[Any, Callable[..., Any], tuple[Any, ...]] | None:
        """Return the one buffer that ``obj`` consists of, and how to rebuild ``obj`` from it.

        This lets a message take a shortcut past the pickler if it is one such object, or a
        tuple of one and some numbers, strings and None. The result must be the same as
        without it: :meth:`reduce` must send the buffer by :meth:`Message.carry`, and name
        the same function.

        Parameters
        ----------
        obj : object
            An instance of one of ``types``; it stays the caller's.
        at_least : int
            If the buffer has fewer bytes than this, the answer is used only if it is a
            shared block. So :meth:`reduce`, too, must not pickle a small object before
            it has called :meth:`Message.carry`, which says whether it can be sent so.

        Returns
        -------
        (bytes-like, callable, tuple) or None
            The buffer is C-contiguous and has the bytes of ``obj`` and no others. If
            ``obj`` lies in a block (:func:`shmreduce.find_block`), it is a memoryview of
            the whole block. The receiver calls the function, which must be importable by
            name, with a handle and the items of the tuple: numbers, strings, None, and
            tuples of these. None, the default, means that :meth:`reduce` is called.
        """
        return None

    def share(self, obj: Any, mode: Mode) -> Any:
        """Return a shared copy of ``obj``; ``obj`` itself is never touched.

        Parameters
        ----------
        obj : object
            An instance of one of ``types``.
        mode : {"rw", "ro", "cow"}
            For :func:`shmreduce.allocate`.

        Returns
        -------
        object
            The caller's. Its memory lives as long as it does.

        Raises
        ------
        NotShareableError
            If the type has no shared form, which is the default.
        """
        raise NotShareableError(
            f"{type(obj).__qualname__} objects cannot be shared: their reducer "
            f"{type(self).__qualname__} does not implement share(); send them by value",
            type_name=type(obj).__qualname__,
            reason="share() not implemented",
        )

    def find_block(self, obj: Any) -> Block | None:
        """Return the block that ``obj``'s memory lies in, or None if it has none.

        Parameters
        ----------
        obj : object
            An instance of one of ``types``.

        Returns
        -------
        Block or None
            From :func:`shmreduce.find_block`. None is the default.
        """
        return None

    def unusable_reason(self) -> str | None:
        """Return why the reducer does not work on this machine, or None if it does.

        ``shmreduce plugins`` and ``shmreduce doctor`` show the answer to users. A
        reducer that needs a driver looks for it here.
        """
        return None


@dataclass(frozen=True)
class SegmentFile:
    """An open file that a strategy made to back one segment.

    Parameters
    ----------
    fd : int
        Open for reading and writing, close-on-exec; the caller owns it.
    name : str or None
        The name that must be removed with :meth:`SharingStrategy.unlink`. None for a
        file without a name, which the kernel frees when nobody has it open any more.
    """

    fd: int
    name: str | None


class SharingStrategy(ABC):
    """Makes segments, names them for other processes and opens them there.

    The core does everything else on the file descriptors: mapping, locks,
    leases, reservation. There is an example in the specification of the hook
    ``shmreduce_strategies``; ``shmreduce_fd`` and ``shmreduce_filesystem`` are
    two more.

    Attributes
    ----------
    name : str
        Users choose the strategy by it: an identifier of at most 32 bytes.
    """

    name: str

    @abstractmethod
    def unusable_reason(self) -> str | None:
        """Return why the strategy does not work here, or None if it does."""

    @abstractmethod
    def create(self, size: int, token: str) -> SegmentFile:
        """Make a file of exactly ``size`` bytes, sparse, zero-filled, mode 0600.

        Parameters
        ----------
        size : int
            Bytes, a multiple of the page size.
        token : str
            The segment's identity, 32 unguessable hexadecimal digits, for use
            in names.

        Returns
        -------
        SegmentFile
            It belongs to the core, which closes the descriptor.

        Raises
        ------
        OSError
            The system call's own error, which the core turns into one that says what
            failed and where. If it raises, it leaves no file and no descriptor behind.
        """

    @abstractmethod
    def locator(self, file: SegmentFile) -> str:
        """Return text by which another process can :meth:`open` the file.

        Parameters
        ----------
        file : SegmentFile
            Open in the calling process, which need not be its maker. Its
            ``name`` may be None although the file has one.

        Returns
        -------
        str
            Without NUL characters, and of at most 32,768 bytes. Valid for as long as the calling
            process has the file open. Receivers of what others send on may use it, too.
        """

    @abstractmethod
    def open(self, locator: str) -> SegmentFile:
        """Open a segment's file under a new open file description.

        Parameters
        ----------
        locator : str
            From :meth:`locator`, in this process or another.

        Returns
        -------
        SegmentFile
            The caller owns the descriptor, and checks that this is the segment that it
            looked for.

        Raises
        ------
        OSError
            ``FileNotFoundError`` if the file, or the process that held it, is
            gone.
        """

    def unlink(self, name: str) -> None:
        """Remove a name; do nothing if it has been removed already.

        Parameters
        ----------
        name : str
            The name of a :class:`SegmentFile`, or one of :meth:`names`.
        """

    def names(self) -> Iterable[str]:
        """List the names of this user's segments on this machine.

        Those whose owner is dead are among them: the core removes them.

        Returns
        -------
        iterable of str
            Absolute paths, which the core opens itself.

        Raises
        ------
        OSError
            If they cannot be listed.
        """
        return ()


@runtime_checkable
class ArrayFactory(Protocol):
    """Makes the shared arrays of ``shmreduce.empty``, ``zeros`` and the like.

    A plugin returns one from the hook ``shmreduce_array_factory``. The arrays lie in
    blocks of :func:`shmreduce.allocate`, and belong to the caller. ``shmreduce_numpy``
    has the factory for NumPy.

    If it has a method ``prepare()``, too, that is called before the first array is made,
    for the reason and under the rules of :meth:`Reducer.prepare`.
    """

    def empty(self, shape: Any, dtype: Any, order: str, mode: Mode) -> Any:
        """Return an uninitialised shared array.

        Parameters
        ----------
        shape : int or sequence of int
            Length of each axis.
        dtype : object
            What the user passed, None by default.
        order : {"C", "F"}
            Memory layout.
        mode : {"rw", "ro", "cow"}
            How receivers see the array; here it is writable.

        Raises
        ------
        NotShareableError
            If elements of that type cannot be shared.
        OutOfSharedMemoryError, BudgetExceededError
            From :func:`shmreduce.allocate`, if there is no room.
        """

    def zeros(self, shape: Any, dtype: Any, order: str, mode: Mode) -> Any:
        """Return a shared array of zeros; parameters and errors are those of :meth:`empty`."""

    def ones(self, shape: Any, dtype: Any, order: str, mode: Mode) -> Any:
        """Return a shared array of ones; parameters and errors are those of :meth:`empty`."""

    def full(self, shape: Any, fill_value: Any, dtype: Any, order: str, mode: Mode) -> Any:
        """Return a shared array filled with ``fill_value``.

        Parameters
        ----------
        fill_value : scalar or array_like
            The value of every element. Other parameters, and errors, are those of
            :meth:`empty`.
        """

    def array(self, obj: Any, dtype: Any, order: str, mode: Mode) -> Any:
        """Return a shared copy of anything that makes an array.

        Parameters
        ----------
        obj : array_like
            It is not changed.
        dtype : object
            What the user passed, None by default.
        order : {"K", "A", "C", "F"}
            Memory layout.
        mode : {"rw", "ro", "cow"}
            How receivers see the array; here it is writable.

        Raises
        ------
        NotShareableError, OutOfSharedMemoryError, BudgetExceededError
            As for :meth:`empty`.
        """


class AllocatorFunctions(NamedTuple):
    """Addresses of C functions that allocate memory in shared blocks, and free it.

    They have the signatures of NEP 49 (https://numpy.org/neps/nep-0049.html). They never
    call Python, and may be called at any time, even after the interpreter has ended.
    Pass to ``free`` and ``reallocate`` only memory that the other functions returned.

    Parameters
    ----------
    context : int
        The first argument of each function.
    allocate : int
        ``void *(void *context, size_t size)``
    allocate_zeroed : int
        ``void *(void *context, size_t count, size_t size)``
    reallocate : int
        ``void *(void *context, void *memory, size_t size)``
    free : int
        ``void (void *context, void *memory, size_t size)``
    """

    context: int
    allocate: int
    allocate_zeroed: int
    reallocate: int
    free: int


@runtime_checkable
class MemoryHandlers(Protocol):
    """Changes where an array library allocates the memory of new arrays.

    A *handler* is an object of the library that stands for a set of allocation
    functions. Each thread, or each context of :mod:`contextvars`, has its own current
    handler. An array keeps the handler that it was made with. The specification of the
    hook ``shmreduce_memory_handlers`` has an example.
    """

    def make(self, functions: AllocatorFunctions) -> Any:
        """Return a handler that allocates with these functions.

        Parameters
        ----------
        functions : AllocatorFunctions
            Valid in this process only.

        Returns
        -------
        object
            Always the same one for the same functions. It is never freed, since arrays
            keep the handler that they were made with.
        """

    def get(self) -> Any:
        """Return the current handler of this thread or context."""

    def set(self, handler: Any) -> None:
        """Make a handler the current one: new arrays use it from now on.

        Parameters
        ----------
        handler : object
            From :meth:`make` or :meth:`get`.
        """
