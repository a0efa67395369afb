"""Objects that offer their buffers out of band (PEP 574)."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest

import shmreduce
from shmreduce import pickling, unpickling
from shmreduce.memory import message as message_module
from tests.channels.channels import context_of, within

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Children

LARGE = 1 << 18


class Holder:
    """Offers its buffers out of band, as a library's class would."""

    def __init__(self, *buffers: Any) -> None:
        self.buffers = buffers

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Holder, tuple(pickle.PickleBuffer(each) for each in self.buffers)


class Crooked(Holder):
    """Offers a buffer that is not contiguous."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Holder, (pickle.PickleBuffer(memoryview(bytes(LARGE))[::2]),)


@pytest.fixture
def pipe(shmreduce_no_leaks: None) -> Iterator[tuple[Any, Any]]:
    """Both ends of a pipe, in this process."""
    here, there = shmreduce.Pipe()
    yield here, there
    here.close()
    there.close()


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the blocks that messages take from now on."""
    found: list[int] = []
    allocate = message_module.Message.allocate

    def recording(self: Any, nbytes: int) -> Any:
        found.append(nbytes)
        return allocate(self, nbytes)

    monkeypatch.setattr(message_module.Message, "allocate", recording)
    return found


def test_all_large_buffers_of_a_message_share_a_block(
    pipe: tuple[Any, Any], sizes: list[int]
) -> None:
    """One block holds them, each at a multiple of 64; small ones stay in the pickle."""
    here, there = pipe
    buffers = [bytes([number]) * (LARGE + number) for number in range(5)]
    here.send([Holder(*buffers), Holder(b"small")])
    first, second = there.recv()
    assert len(sizes) == 1
    assert [bytes(each) for each in first.buffers] == buffers
    assert bytes(second.buffers[0]) == b"small"
    places = [np.frombuffer(each, "u1").ctypes.data for each in first.buffers]
    assert all(place % 64 == 0 for place in places)
    assert max(places) - min(places) < 5 * (LARGE + 128)


def test_buffers_stay_writable_or_read_only(pipe: tuple[Any, Any]) -> None:
    """As at the sender; writing does not reach the sender."""
    here, there = pipe
    mine = bytearray(LARGE)
    here.send(Holder(mine, bytes(LARGE)))
    writable, fixed = (memoryview(each) for each in there.recv().buffers)
    writable[0] = 9
    assert mine[0] == 0
    assert fixed.readonly
    with pytest.raises(TypeError):
        fixed[0] = 9


def test_buffers_are_what_they_were_when_sent(pipe: tuple[Any, Any]) -> None:
    """The copy is made by ``send``."""
    here, there = pipe
    mine = bytearray(LARGE)
    here.send(Holder(mine))
    mine[5] = 1
    assert memoryview(there.recv().buffers[0])[5] == 0


class ZeroCopy(bytearray):
    """The example in the documentation of the pickle module."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return type(self)._reconstruct, (pickle.PickleBuffer(self),), None

    @classmethod
    def _reconstruct(cls, obj: Any) -> Any:
        with memoryview(obj) as view:
            exporter: Any = view.obj
            return exporter if type(exporter) is cls else cls(exporter)


def test_what_a_buffer_is_a_view_of_has_the_same_bytes(pipe: tuple[Any, Any]) -> None:
    """Not those of other buffers, nor the rest of the block."""
    here, there = pipe
    sent = [ZeroCopy(b"a" * (LARGE + 1)), ZeroCopy(b"b" * (LARGE + 3))]
    here.send(sent)
    assert there.recv() == sent
    here.send(Holder(bytes(LARGE + 1)))
    (received,) = there.recv().buffers
    assert memoryview(received.obj).nbytes == LARGE + 1


def test_without_room_the_buffers_are_in_the_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no block they are pickled in the ordinary way."""
    monkeypatch.setattr(message_module.Message, "allocate", lambda *_: None)
    data, message = pickling.dumps(Holder(bytes(LARGE)))
    assert message is None
    assert bytes(unpickling.loads(data).buffers[0]) == bytes(LARGE)


def test_buffer_in_pieces_is_an_error_as_always(pipe: tuple[Any, Any]) -> None:
    """The pickle module says that such a buffer cannot be pickled; nothing is left behind."""
    here, there = pipe
    with pytest.raises(pickle.PicklingError):
        here.send([Holder(bytes(LARGE)), Crooked()])
    assert not there.poll()


def test_error_after_buffers_were_loaded_releases_the_block(pipe: tuple[Any, Any]) -> None:
    """The leak guard of the fixture sees the rest."""
    here, there = pipe
    for _ in range(3):
        here.send([Holder(bytes(LARGE)), Failing()])
        with pytest.raises(ZeroDivisionError):
            there.recv()


class Failing:
    """Cannot be unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return divmod, (1, 0)


def test_pandas(pipe: tuple[Any, Any]) -> None:
    """A data frame arrives whole and can be changed without the sender's noticing."""
    here, there = pipe
    frame = pd.DataFrame(
        {"a": np.arange(LARGE), "b": np.linspace(0, 1, LARGE), "c": ["x", "y"] * (LARGE // 2)}
    )
    here.send(frame)
    received = there.recv()
    pd.testing.assert_frame_equal(received, frame)
    received["a"] += 1
    assert frame["a"][0] == 0
    del received


def test_arrow(pipe: tuple[Any, Any]) -> None:
    """A table of Arrow arrives in one block."""
    arrow = pytest.importorskip("pyarrow")
    here, there = pipe
    table = arrow.table({"a": np.arange(LARGE), "b": [str(each) for each in range(LARGE)]})
    here.send(table)
    assert there.recv().equals(table)


def total(holder: Holder, queue: Any) -> None:
    """Tell what is in the buffers."""
    queue.put([sum(memoryview(each)[:10]) for each in holder.buffers])


def test_buffers_in_the_arguments_of_a_process(children: Children) -> None:
    """They reach children under every start method."""
    context = context_of(children)
    queue = context.SimpleQueue()
    process = children.start(total, Holder(b"\1" * LARGE, b"\2" * LARGE, b"\3"), queue)
    assert within(queue.get) == [10, 20, 3]
    children.join(process)
    queue.close()
