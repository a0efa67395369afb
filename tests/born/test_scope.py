"""Where shared_allocations() begins and where it ends."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import os
import sys
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce.born import allocations
from shmreduce.born.heap import _turn, get_heap
from shmreduce.testing import OtherProcess
from tests.born.allocator import LARGE, counters, filled, handler_name, is_born
from tests.interrupter import HandlerInterrupter

if TYPE_CHECKING:
    from collections.abc import Iterator

BORN = str(Path(allocations.__file__).parent)

pytestmark = pytest.mark.usefixtures("allocator")


def born_now() -> bool:
    return is_born(np.empty(LARGE, np.uint8))


def test_blocks_may_be_nested() -> None:
    """What is inside ends with the outermost block."""
    with shmreduce.shared_allocations():
        with shmreduce.shared_allocations():
            assert born_now()
        assert born_now()
    assert not born_now()


def test_a_block_is_entered_once_at_a_time() -> None:
    """The object that the function returns stands for one block, which may begin again."""
    block = shmreduce.shared_allocations()
    for _ in range(3):
        with block:
            with pytest.raises(RuntimeError, match="has been entered"), block:
                pass
            assert born_now()
        assert not born_now()


def test_a_block_ends_with_an_exception() -> None:
    """However it is left, NumPy allocates by itself afterwards."""
    with pytest.raises(ZeroDivisionError), shmreduce.shared_allocations():
        _ = 1 // 0
    assert not born_now()
    assert handler_name() == "default_allocator"


def yielding() -> Iterator[bool]:
    with shmreduce.shared_allocations():
        while True:
            yield born_now()


def test_generators_may_leave_their_blocks_in_any_order() -> None:
    """Two generators, the first of which ends first: it ends with the last of them."""
    first, second = yielding(), yielding()
    assert next(first)
    assert next(second)
    first.close()  # type: ignore[attr-defined]
    assert next(second)
    assert born_now()
    second.close()  # type: ignore[attr-defined]
    assert not born_now()
    assert handler_name() == "default_allocator"


def test_a_generator_closed_in_another_thread_ends_its_block() -> None:
    """No array is born afterwards, though the context is one that the closer cannot reach."""
    generator = yielding()
    assert next(generator)
    thread = threading.Thread(target=generator.close)  # type: ignore[attr-defined]
    thread.start()
    thread.join(30)
    assert not born_now()
    with shmreduce.shared_allocations():
        assert born_now()
    assert handler_name() == "default_allocator"


def test_threads_begin_without_it_and_do_not_end_that_of_others() -> None:
    """What is in use belongs to the thread that entered."""
    found = []
    with shmreduce.shared_allocations():

        def work() -> None:
            found.append(born_now())
            with shmreduce.shared_allocations():
                found.append(born_now())
            found.append(born_now())

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(30)
        assert born_now()
    assert found == [False, True, False]


def test_tasks_of_asyncio_each_have_their_own() -> None:
    """A task that is inside does not take others in."""

    async def inside(entered: asyncio.Event, leave: asyncio.Event) -> bool:
        with shmreduce.shared_allocations():
            entered.set()
            await leave.wait()
            return born_now()

    async def outside(entered: asyncio.Event, leave: asyncio.Event) -> bool:
        await entered.wait()
        found = born_now()
        leave.set()
        return found

    async def both() -> list[bool]:
        events = asyncio.Event(), asyncio.Event()
        return list(await asyncio.gather(inside(*events), outside(*events)))

    assert asyncio.run(both()) == [True, False]


def test_a_context_that_is_copied_inside_gives_ordinary_memory_later() -> None:
    """A copied context keeps the handler; when no block is open it is as NumPy's own."""
    with shmreduce.shared_allocations():
        copied = contextvars.copy_context()
        assert copied.run(born_now)
    assert not copied.run(born_now)


def test_the_handler_of_somebody_else_comes_back() -> None:
    """What was in use before the first block is in use after the last."""
    from shmreduce.born.library import load
    from shmreduce_numpy.handler import memory_handlers

    before = memory_handlers.get()
    other = memory_handlers.make(load().functions._replace(context=1))
    memory_handlers.set(other)
    try:
        with shmreduce.shared_allocations():
            assert memory_handlers.get() is not other
        assert memory_handlers.get() is other
    finally:
        memory_handlers.set(before)


def use_a_block(here: Any, there: Any) -> None:
    with shmreduce.shared_allocations():
        here.send(filled(9))
        assert (there.recv() == 9).all()


def interrupted(when: int) -> bool:
    """Use a block, with an interrupt; return whether it came to that."""
    here, there = shmreduce.Pipe()
    interrupter = HandlerInterrupter(when, BORN)
    sys.setprofile(interrupter)
    try:
        use_a_block(here, there)
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
        here.close()
        there.close()
    return interrupter.fired


def interrupt_everywhere() -> None:
    with shmreduce.shared_allocations():
        witness = filled(77)
        _ = filled(78)
    # What strikes the end of a block that was being left is told of, and ends there.
    sys.unraisablehook = lambda _: None
    # Each leaves a block unused, over which the next go, so a step of one would not end.
    when, step = 1, 3
    while interrupted(when):
        gc.collect()
        assert not len(allocations._open)
        assert not born_now()
        assert not _turn.lock.locked()
        assert (witness == 77).all()
        when += step
    assert when > 40
    here, there = shmreduce.Pipe()
    use_a_block(here, there)
    here.close()
    there.close()
    assert counters().idle_bytes


def test_an_interrupt_at_any_instant_leaves_nothing_switched_on() -> None:
    """KeyboardInterrupt wherever a handler can run in entering, moving and leaving: afterwards
    arrays are ordinary ones, those that live are whole, and the next block works.
    """
    # In a process of its own: a message that was being sent may keep its block.
    with OtherProcess("spawn") as other:
        other.ask(interrupt_everywhere)


@pytest.mark.parametrize("outer", [False, True], ids=["one block", "two blocks"])
def test_a_forked_child_leaves_its_parents_block_to_it(outer: bool) -> None:
    """It makes its arrays elsewhere, and its parent's stay as they are."""
    with contextlib.ExitStack() as stack:
        pipe = shmreduce.Pipe()
        for end in pipe:
            stack.callback(end.close)
        if outer:
            stack.enter_context(shmreduce.shared_allocations())
        inner = shmreduce.shared_allocations()
        with inner:
            # Blocks of arrays that were moved, received and dropped are used again.
            moved = []
            for _ in range(4):
                pipe[0].send(filled(1))
                moved.append(pipe[1].recv())
            moved.clear()
            heap = get_heap()
            heap.collect()
            assert heap.warm
            kept = filled(2)
            reader, writer = os.pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if not pid:
                os.read(reader, 1)
                inner.__exit__(None, None, None)
                arrays = [filled(66) for _ in range(3)]
                os._exit(0 if (arrays[0] == 66).all() and (kept == 2).all() else 1)
            with shmreduce.shared_allocations():
                others = [filled(3) for _ in range(3)]
            os.write(writer, b"!")
            os.close(reader)
            os.close(writer)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            assert (kept == 2).all()
            assert all((each == 3).all() for each in others)
            assert is_born(filled(4))
        del kept, others
