"""A message that is sent while another is being pickled moves nothing."""

from __future__ import annotations

import pickle
import zlib
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce import ReducerError, import_block
from shmreduce.moving import moves_of
from tests.born.allocator import LARGE, filled

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("allocator", "shmreduce_no_leaks")


class Store:
    """Keeps an array as its receiver has it, by one kind of message or another."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self._pipe = shmreduce.Pipe()

    def by_stock_message(self, array: Any) -> None:
        """Keep it by what the standard library's channels send."""
        self.kept.append(ForkingPickler.loads(bytes(ForkingPickler.dumps(array))))

    def by_pipe(self, array: Any) -> None:
        """Keep it by a pipe of shmreduce."""
        self._pipe[0].send(array)
        self.kept.append(self._pipe[1].recv())

    def by_pipe_in_a_list(self, array: Any) -> None:
        """Keep it by a pipe of shmreduce, as a part of something."""
        self._pipe[0].send([array])
        self.kept += self._pipe[1].recv()

    def close(self) -> None:
        self.kept.clear()
        for end in self._pipe:
            end.close()


class Stored:
    """Stores its array when it is pickled, and takes it along, or not."""

    def __init__(self, store: Callable[[Any], None], array: Any, *, along: bool) -> None:
        self.store = store
        self.array = array
        self.along = along

    def __reduce__(self) -> Any:
        self.store(self.array)
        return list, ((self.array,) if self.along else (),)


@pytest.mark.parametrize("along", [False, True], ids=["stored", "stored and sent"])
@pytest.mark.parametrize("way", ["by_stock_message", "by_pipe", "by_pipe_in_a_list"])
def test_what_an_object_sends_while_it_is_pickled_is_a_copy(
    pipe: tuple[Any, Any], way: str, along: bool
) -> None:
    """Neither writes of the sender show in it, nor what is made when the sender has
    dropped the array.
    """
    store = Store()
    with shmreduce.install(), shmreduce.shared_allocations():
        array = filled(1)
        pipe[0].send(Stored(getattr(store, way), array, along=along))
        received = pipe[1].recv()
        array[:] = 5
        assert (store.kept[0] == 1).all()
        del array
        others = [filled(6) for _ in range(3)]
        assert (store.kept[0] == 1).all()
        assert [(each == 1).all() for each in received] == [True] * along
        received.clear()
        others.clear()
        store.close()


def unpack(data: bytes) -> Any:
    return pickle.loads(zlib.decompress(data))


class Compressed:
    """Pickles its array by itself, into bytes in which no handle can be found."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __reduce__(self) -> Any:
        return unpack, (zlib.compress(bytes(ForkingPickler.dumps(self.array))),)


def test_a_pickle_within_a_pickle_may_be_compressed(pipe: tuple[Any, Any]) -> None:
    """What is in it arrives, though its handles do not stand in the message."""
    with shmreduce.install(), shmreduce.shared_allocations():
        array = filled(1)
        pipe[0].send(Compressed(array))
        assert (pipe[1].recv() == 1).all()


class Hiding(shmreduce.Reducer):
    """Breaks the rule that a handle stands in the pickle as it is."""

    types = (Compressed,)

    def reduce(self, obj: Any, message: Any) -> Any:
        address = obj.array.__array_interface__["data"][0]
        handle = message.move(address, obj.array.nbytes)
        return bytes.fromhex, (handle.hex(),)


def test_a_reducer_that_hides_the_handle_is_told_so(pipe: tuple[Any, Any]) -> None:
    """If the array has to be copied; nothing is held, and the array moves another time."""
    reducer = Hiding()
    shmreduce.register_reducer(reducer)
    try:
        with shmreduce.shared_allocations():
            array = filled(1)
            with pytest.raises(ReducerError, match="move"):
                pipe[0].send(Compressed(array))
            assert (array == 1).all()
            pipe[0].send(array)
            array[:] = 2
            assert (pipe[1].recv() == np.ones(LARGE, array.dtype)).all()
    finally:
        shmreduce.unregister_reducer(reducer)


def test_a_hidden_handle_leaves_nothing_held_in_a_complete_message() -> None:
    """Such as that of a pool of the standard library's channels: there is no other copy of it."""
    reducer = Hiding()
    shmreduce.register_reducer(reducer)
    try:
        with shmreduce.install(), shmreduce.shared_allocations():
            held: list[Any] = [Compressed(filled(1))]
            array = held[0].array
            with moves_of(held) as moves:
                data = bytes(ForkingPickler.dumps(held[0]))
                held.clear()
                with pytest.raises(ReducerError, match="move"):
                    moves.settle(data)
            assert (array == 1).all()
            # The message itself is its reader's to end.
            import_block(ForkingPickler.loads(data))
    finally:
        shmreduce.unregister_reducer(reducer)
