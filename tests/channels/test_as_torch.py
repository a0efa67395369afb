"""What torch.multiprocessing's own tests check for tensors, with arrays in our contexts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce.memory.inspection import all_names
from tests.channels.channels import context_of, eventually, within
from tests.conftest import START_METHODS

if TYPE_CHECKING:
    from tests.conftest import Children

SHAPE = (64, 1024)


def where(array: Any) -> int:
    """Return the address of an array's first element."""
    return int(array.__array_interface__["data"][0])


# What children do


def write(array: Any, view: Any) -> None:
    array[0] = 1
    view[:] = 4


def look_at_two_messages(connection: Any) -> None:
    first, second = connection.recv(), connection.recv()
    connection.send((where(first) == where(second), np.shares_memory(first, second)))


def look_at_views(connection: Any) -> None:
    whole, row, column, again = connection.recv()
    whole[1, 2] = 7
    places = (where(row) - where(whole), where(column) - where(whole), where(again) - where(whole))
    connection.send((places, row[2], column[1], again.strides))


def double_in_place(array: Any) -> Any:
    array *= 2
    return array + 1


def read_attribute(connection: Any) -> None:
    # As an attribute of the process object, and not as its argument.
    this: Any = shmreduce.current_process()
    connection.send(float(this.array.sum()))


def look_at_empty_ones(connection: Any) -> None:
    arrays = connection.recv()
    found = [(each.shape, each.dtype.str, shmreduce.is_shared(each)) for each in arrays]
    connection.send(found)


def answer(connection: Any) -> Any:
    return within(connection.recv)


@pytest.fixture
def ends(children: Children) -> Any:
    """Both ends of a pipe of ours."""
    here, there = context_of(children).Pipe()
    yield here, there
    here.close()
    there.close()


# The cases


def test_child_writes_to_array_and_view(children: Children) -> None:
    """What a child writes to a shared array and to a view of it shows here."""
    context_of(children)
    array = shmreduce.zeros(SHAPE)
    children.join(children.start(write, array, array[:, 5:7]))
    assert (array[0, :5] == 1).all()
    assert (array[:, 5:7] == 4).all()
    assert (array[1:, 7:] == 0).all()


def test_the_same_array_twice_is_one_mapping(children: Children, ends: Any) -> None:
    """Sent in two messages, a shared array is the same memory at the receiver."""
    here, there = ends
    array = shmreduce.ones(SHAPE)
    process = children.start(look_at_two_messages, there)
    here.send(array)
    here.send(array)
    assert answer(here) == (True, True)
    children.join(process)


def test_views_in_one_message_keep_their_places(children: Children, ends: Any) -> None:
    """The whole, a row, a column and the whole again are one memory at the receiver."""
    here, there = ends
    array = shmreduce.zeros(SHAPE)
    process = children.start(look_at_views, there)
    here.send((array, array[1], array[:, 2], array))
    places, in_row, in_column, strides = answer(here)
    assert places == (array.strides[0], 2 * array.strides[1], 0)
    assert (in_row, in_column, strides) == (7, 7, array.strides)
    assert array[1, 2] == 7
    children.join(process)


def test_pool_changes_its_inputs_and_returns_new_arrays(children: Children) -> None:
    """``map`` over shared arrays changes them in place; the results are arrays of their own."""
    arrays = [shmreduce.full(SHAPE, value) for value in (1.0, 2.0, 3.0)]
    with context_of(children).Pool(2) as pool:
        results = pool.map(double_in_place, arrays)
    pool.join()
    assert [each[0, 0] for each in arrays] == [2, 4, 6]
    assert [each[-1, -1] for each in results] == [3, 5, 7]
    assert not any(shmreduce.is_shared(each) for each in results)


def test_array_as_attribute_of_a_process(children: Children, ends: Any) -> None:
    """An array that a process object has goes along with it."""
    here, there = ends
    process = children.context.Process(target=read_attribute, args=(there,))
    process.array = np.ones(SHAPE)
    process.start()
    children.started.append(process)
    assert answer(here) == np.prod(SHAPE)
    children.join(process)


def test_empty_arrays(children: Children, ends: Any) -> None:
    """Arrays without elements arrive with shape and dtype, shared ones as shared."""
    here, there = ends
    process = children.start(look_at_empty_ones, there)
    here.send([np.empty((0, 3), "f4"), shmreduce.zeros((4, 0), "i2")])
    assert answer(here) == [((0, 3), "<f4", False), ((4, 0), "<i2", True)]
    children.join(process)


@pytest.mark.parametrize(
    "children", [(method, "file_system") for method in START_METHODS], indirect=True
)
def test_file_is_there_on_the_way_and_gone_afterwards(children: Children, ends: Any) -> None:
    """Under ``file_system`` a message's memory has a name until nobody needs it any more."""
    here, there = ends
    process = children.start(send_and_wait, there)
    assert here.poll(30)
    assert names_of(process)
    array = here.recv()
    here.send("read")
    children.join(process)
    assert array.sum() == np.prod(SHAPE)
    del array
    eventually(lambda: not names_of(process))


def names_of(process: Any) -> set[str]:
    """Return the names of segments of one process; other tests may run beside this one."""
    return {name for name in all_names() if f"-{process.pid}-" in name}


def send_and_wait(connection: Any) -> None:
    connection.send(np.ones(SHAPE))
    assert connection.recv() == "read"


def test_is_shared_follows_the_memory() -> None:
    """Views of shared arrays are shared; copies, and results, are not."""
    array = shmreduce.zeros(SHAPE)
    assert shmreduce.is_shared(array)
    assert shmreduce.is_shared(array[3:, ::2].T)
    assert not shmreduce.is_shared(array.copy())
    assert not shmreduce.is_shared(array + 1)
    assert not shmreduce.is_shared(np.zeros(SHAPE))
