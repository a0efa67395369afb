"""The contract suite for reducers.

May import public names of :mod:`shmreduce`, ``guard`` and ``processes`` of this
package, and pytest.
"""

from __future__ import annotations

import threading
from multiprocessing.connection import Client, Listener
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import pytest

import shmreduce
from shmreduce.testing.guard import no_leaks
from shmreduce.testing.processes import OtherProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ReducerContract"]

_SIZES = [0, 64, 4096, 1 << 20]
_LARGE = 1 << 20


class ReducerContract:
    """The tests that every reducer must pass. Derive a test class that makes objects.

    The reducer must be registered by an installed plugin, or by
    :func:`shmreduce.register_reducer` at the top level of the test module, so that child
    processes register it too. The test module must be importable by name.

    Attributes
    ----------
    shareable : bool
        Whether ``shmreduce.share`` takes the objects. If False, the tests check that
        it raises ``NotShareableError``.
    picklable : bool
        Whether ordinary pickling can handle the objects, as it must on connections
        to other hosts.

    Examples
    --------
    >>> import numpy as np
    >>> class TestArrays(ReducerContract):
    ...     def make(self, nbytes):
    ...         return np.arange(nbytes // 8, dtype=float)
    ...     def equal(self, first, second):
    ...         return np.array_equal(first, second)
    ...     def write(self, obj):
    ...         obj += 1
    """

    shareable: bool = True
    picklable: bool = True

    def make(self, nbytes: int) -> Any:
        """Return a new object; a test class must define it.

        Parameters
        ----------
        nbytes : int
            About how many bytes the object should have; for 0, as few as possible.

        Returns
        -------
        object
            Equal to all other objects of the same ``nbytes``.
        """
        raise NotImplementedError(f"{type(self).__qualname__} must define make()")

    def equal(self, first: Any, second: Any) -> bool:
        """Return whether two objects have the same contents; by default, by ``==``.

        Parameters
        ----------
        first, second : object
            Results of :meth:`make`, or received objects.

        Returns
        -------
        bool
        """
        return bool(first == second)

    def write(self, obj: Any) -> None:
        """Change an object in place; a test class must define it.

        Parameters
        ----------
        obj : object
            A large result of :meth:`make`, or a received object. Afterwards it must not be
            equal to what it was before.
        """
        raise NotImplementedError(f"{type(self).__qualname__} must define write()")

    @pytest.fixture(autouse=True)
    def _installed_and_nothing_left(self, request: pytest.FixtureRequest) -> Iterator[None]:
        with shmreduce.install(), no_leaks(request):
            yield

    # By value

    @pytest.mark.parametrize("nbytes", _SIZES)
    def test_round_trip(self, nbytes: int) -> None:
        """What is unpickled is of the same class and equal to what was pickled."""
        original = self.make(nbytes)
        received = _round_trip(original)
        assert type(received) is type(original)
        assert self.equal(received, original)

    @pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
    def test_round_trip_through_another_process(self, start_method: str) -> None:
        """Objects come back equal from children of every start method."""
        with OtherProcess(start_method) as other:
            for nbytes in _SIZES:
                original = self.make(nbytes)
                received = other.ask(_echo, original)
                assert type(received) is type(original)
                assert self.equal(received, original)

    @pytest.mark.parametrize("nbytes", _SIZES)
    def test_alone_in_a_channel(self, nbytes: int) -> None:
        """An object that is sent alone arrives equal, even if the reducer has ``buffer_of``."""
        originals = [self.make(nbytes)]
        if self.shareable:
            originals.append(shmreduce.share(originals[0]))
        for original in originals:
            shared = shmreduce.is_shared(original)
            # From the second time on memory is warm, and another code path is taken.
            for _ in range(3):
                received = _through_a_pipe(original)
                assert type(received) is type(original)
                assert self.equal(received, original)
                assert shmreduce.is_shared(received) == shared

    def test_alone_in_a_channel_it_is_independent(self) -> None:
        """Neither side sees the other's writes, even if a received object is forwarded."""
        original = self.make(_LARGE)
        for _ in range(3):
            received = _through_a_pipe(original)
            passed_on = _through_a_pipe(received)
            before = self.make(_LARGE)
            self.write(before)
            self.write(received)
            assert self.equal(received, before)
            assert self.equal(original, self.make(_LARGE))
            assert self.equal(passed_on, self.make(_LARGE))
            self.write(passed_on)
            assert self.equal(passed_on, before)

    def test_large_objects_leave_the_message(self) -> None:
        """A large object's bytes are not in the message but in shared memory."""
        message = bytes(ForkingPickler.dumps(self.make(_LARGE)))
        assert len(message) < _LARGE // 16
        assert self.equal(ForkingPickler.loads(message), self.make(_LARGE))

    def test_the_message_holds_the_moment_of_pickling(self) -> None:
        """The receiver does not see what the sender writes after pickling."""
        original = self.make(_LARGE)
        message = ForkingPickler.dumps(original)
        self.write(original)
        assert self.equal(ForkingPickler.loads(message), self.make(_LARGE))

    def test_what_is_received_is_independent(self) -> None:
        """The sender does not see what the receiver writes."""
        original = self.make(_LARGE)
        received = _round_trip(original)
        self.write(received)
        # Otherwise the tests that write and compare would not notice anything.
        assert not self.equal(received, original), "write() changed nothing that equal() sees"
        assert self.equal(original, self.make(_LARGE))

    def test_what_is_passed_on_is_independent(self) -> None:
        """A received object can be forwarded, and changed, like one that was made here."""
        received = _round_trip(self.make(_LARGE))
        message = ForkingPickler.dumps(received)
        self.write(received)
        passed_on = ForkingPickler.loads(message)
        assert self.equal(passed_on, self.make(_LARGE))
        self.write(passed_on)
        assert self.equal(passed_on, received)

    def test_inside_containers(self) -> None:
        """Objects keep identity inside containers, as with pickling."""
        original = self.make(_LARGE)
        first, second = _round_trip([original, {"again": (original,)}])
        assert second["again"][0] is first
        assert self.equal(first, original)

    # Failures

    def test_what_cannot_be_pickled_leaves_nothing(self) -> None:
        """If the rest of a message cannot be pickled, the object's memory is given back."""
        with pytest.raises(_PickledOnPurposeError):
            ForkingPickler.dumps([self.make(_LARGE), _Unpicklable()])

    def test_what_cannot_be_unpickled_leaves_nothing(self) -> None:
        """If the rest of a message cannot be unpickled, the object's memory is given back."""
        message = ForkingPickler.dumps([_FailsWhenLoaded(), self.make(_LARGE)])
        with pytest.raises(_PickledOnPurposeError):
            ForkingPickler.loads(message)
        message = ForkingPickler.dumps([self.make(_LARGE), _FailsWhenLoaded()])
        with pytest.raises(_PickledOnPurposeError):
            ForkingPickler.loads(message)

    def test_loaded_twice(self) -> None:
        """The second load of one message gives the same contents, or a ShmreduceError."""
        message = ForkingPickler.dumps(self.make(_LARGE))
        first = ForkingPickler.loads(message)
        try:
            second = ForkingPickler.loads(message)
        except shmreduce.ShmreduceError:
            second = self.make(_LARGE)
        assert self.equal(second, self.make(_LARGE))
        self.write(first)
        assert self.equal(second, self.make(_LARGE))

    def test_pickled_twice(self) -> None:
        """An object that is sent several times arrives as independent copies."""
        original = self.make(_LARGE)
        # Two are pickled before either is read, and a third after both were read.
        messages = [ForkingPickler.dumps(original) for _ in range(2)]
        first, second = (ForkingPickler.loads(message) for message in messages)
        third = _round_trip(original)
        for received in (first, second, third):
            assert self.equal(received, original)
        self.write(first)
        assert self.equal(second, original)
        self.write(second)
        assert self.equal(third, original)
        assert self.equal(original, self.make(_LARGE))

    def test_over_tcp(self) -> None:
        """On a connection to another host objects travel by ordinary pickling."""
        if not self.picklable:
            return
        original = self.make(_LARGE)
        received = _send_over_tcp(original)
        assert type(received) is type(original)
        assert self.equal(received, original)

    # Shared

    def test_share_copies(self) -> None:
        """A shared copy is equal and of the same class; the original stays as it is."""
        original = self.make(_LARGE)
        if not self.shareable:
            with pytest.raises(shmreduce.NotShareableError):
                shmreduce.share(original)
            return
        assert not shmreduce.is_shared(original)
        shared = shmreduce.share(original)
        assert shmreduce.is_shared(shared)
        assert type(shared) is type(original)
        assert self.equal(shared, original)
        self.write(shared)
        assert self.equal(original, self.make(_LARGE))

    @pytest.mark.parametrize("nbytes", _SIZES)
    def test_shared_objects_stay_shared(self, nbytes: int) -> None:
        """A shared object of any size arrives as a shared object."""
        if not self.shareable:
            return
        shared = shmreduce.share(self.make(nbytes))
        received = _round_trip(shared)
        assert shmreduce.is_shared(received)
        assert self.equal(received, shared)

    @pytest.mark.parametrize("start_method", ["fork", "spawn"])
    def test_writes_to_shared_objects_show_everywhere(self, start_method: str) -> None:
        """Each side sees what the other writes."""
        if not self.shareable:
            return
        shared = shmreduce.share(self.make(_LARGE))
        expected = self.make(_LARGE)
        self.write(expected)
        with OtherProcess(start_method) as other:
            other.ask(_write, type(self), shared)
            assert self.equal(shared, expected)
            returned = other.ask(_echo, shared)
            self.write(shared)
            assert self.equal(returned, shared)

    def test_read_only_sharing(self) -> None:
        """A receiver cannot write to an object that was shared as ``ro``."""
        if not self.shareable:
            return
        shared = shmreduce.share(self.make(_LARGE), mode="ro")
        with OtherProcess("spawn") as other:
            assert other.ask(_write_fails, type(self), shared)
        assert self.equal(shared, self.make(_LARGE))

    def test_copy_on_write_sharing(self) -> None:
        """If an object was shared as ``cow``, a receiver's writes stay in the receiver."""
        if not self.shareable:
            return
        shared = shmreduce.share(self.make(_LARGE), mode="cow")
        with OtherProcess("spawn") as other:
            changed = other.ask(_write, type(self), shared)
        assert self.equal(shared, self.make(_LARGE))
        assert not self.equal(changed, shared)

    def test_shared_objects_over_tcp(self) -> None:
        """Shared objects too travel by ordinary pickling to other hosts."""
        if not (self.shareable and self.picklable):
            return
        shared = shmreduce.share(self.make(_LARGE))
        received = _send_over_tcp(shared)
        assert not shmreduce.is_shared(received)
        assert self.equal(received, shared)


def _round_trip(obj: Any) -> Any:
    return ForkingPickler.loads(ForkingPickler.dumps(obj))


def _through_a_pipe(obj: Any) -> Any:
    here, there = shmreduce.Pipe(duplex=False)
    # In a thread: with the standard library's pipes, send() waits for the reader of a large
    # message.
    sender = threading.Thread(target=there.send, args=(obj,))
    sender.start()
    try:
        return here.recv() if here.poll(30) else pytest.fail("nothing has arrived")
    finally:
        sender.join(30)
        here.close()
        there.close()


def _send_over_tcp(obj: Any) -> Any:
    """Send a large object to this process by a TCP connection, which could cross hosts."""
    received: list[bytes] = []

    def serve() -> None:
        with listener.accept() as connection:
            received.append(connection.recv_bytes())

    with Listener(("localhost", 0), authkey=b"contract") as listener:
        server = threading.Thread(target=serve)
        server.start()
        with Client(listener.address, authkey=b"contract") as connection:
            connection.send(obj)
            server.join(30)
    assert received, "the connection broke"
    assert len(received[0]) > _LARGE // 2, "the object is not in the message"
    return ForkingPickler.loads(received[0])


class _PickledOnPurposeError(Exception):
    """Raised by objects that were made to fail."""


class _Unpicklable:
    def __reduce__(self) -> Any:
        raise _PickledOnPurposeError("cannot be pickled")


class _FailsWhenLoaded:
    def __reduce__(self) -> Any:
        return _fail, ()


def _fail() -> None:
    raise _PickledOnPurposeError("cannot be unpickled")


# Run in other processes


def _echo(obj: Any) -> Any:
    return obj


def _write(contract: type[ReducerContract], obj: Any) -> Any:
    contract().write(obj)
    return obj


def _write_fails(contract: type[ReducerContract], obj: Any) -> bool:
    try:
        contract().write(obj)
    except Exception:
        return True
    return False
