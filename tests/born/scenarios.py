"""What must hold around a fork, at the end of the interpreter, under interrupts, without room.

Each function is a whole program: it is run in an interpreter of its own, by the
tests with the allocator as it is, and by ``test_guards`` with one of its guards
taken out, when it must fail.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import signal
import sys
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce.born import library
from shmreduce.born.heap import get_heap
from shmreduce.born.library import load
from shmreduce.memory.runtime import Runtime, current
from shmreduce.process_registry import get_memory_handlers
from tests.born.allocator import LARGE, address_of, counters, entry_of, filled, is_born

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmreduce.memory.ledger import Fork

__all__ = ["RUN", "SCENARIOS"]

RUN = """
import sys, warnings
# CPython 3.12 and later warn of a fork with threads, which is what one scenario is about.
warnings.simplefilter("ignore", DeprecationWarning)
from tests.born.scenarios import SCENARIOS
SCENARIOS[sys.argv[1]]()
"""
"""A program that runs the scenario that its argument names."""

PATIENCE = 30.0


def check(fact: Any) -> None:
    """Fail if something does not hold, in a forked child too."""
    if not fact:
        raise AssertionError(f"line {sys._getframe(1).f_lineno}")


class Child:
    """A forked child that does one thing when it is told to."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._wait, self._go = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self._go)
                os.read(self._wait, 1)
                work()
                status = 0
            finally:
                os._exit(status)
        os.close(self._wait)

    def finish(self) -> None:
        """Tell it to, and wait until it has ended well."""
        os.close(self._go)
        _, status = os.waitpid(self.pid, 0)
        check(status == 0)


def child_that_sees(array: Any) -> Child:
    """Fork a child that looks, when it is told to, whether the array's ones are there."""
    return Child(lambda: check((array == 1).all()))


def arrays_are_copied_by_a_fork() -> None:
    """Neither process sees what the other writes after the fork."""
    with shmreduce.shared_allocations():
        array = filled(1)

        def work() -> None:
            check((array == 1).all())
            array[:] = 3

        child = Child(work)
        array[:] = 2
        child.finish()
        check((array == 2).all())


def a_block_waits_for_the_children_that_may_see_it() -> None:
    """What lived at a fork is not used again before the child has gone, and is then."""
    with shmreduce.shared_allocations():
        array = filled(1)
        address = address_of(array)
        child = child_that_sees(array)
        del array

        def fresh() -> list[int]:
            get_heap().tend()
            return [address_of(each) for each in [filled(9) for _ in range(8)]]

        check(address not in fresh())
        child.finish()
        check(address in fresh())
        # What is written there reaches a receiver again.
        here, there = shmreduce.Pipe()
        numbers = range(10, 18)
        arrays = [filled(number) for number in numbers]
        check(address in [address_of(each) for each in arrays])
        for _ in numbers:
            held = [arrays.pop(0)]
            here.send_last(held)
        check([int(there.recv().max()) for _ in numbers] == list(numbers))


def a_moved_block_waits_for_its_receiver() -> None:
    """New arrays get other memory until the receiver of a moved one has dropped it."""
    here, there = shmreduce.Pipe()
    with shmreduce.shared_allocations():
        array = filled(1)
        address = address_of(array)
        held = [array]
        del array
        here.send_last(held)
        for _ in range(3):
            fresh = [filled(9) for _ in range(4)]
            get_heap().tend()
            check(address not in [address_of(each) for each in fresh])
            del fresh
        received = there.recv()
        check((received == 1).all())
        others = [filled(9) for _ in range(4)]
        get_heap().tend()
        check((received == 1).all())
        check(all((each == 9).all() for each in others))


def what_is_kept_is_copied() -> None:
    """An array that somebody still has when it is sent stays that somebody's."""
    here, there = shmreduce.Pipe()
    with shmreduce.shared_allocations():
        array = filled(1)
        here.send(array)
        array[:] = 2
        received = there.recv()
        check((received == 1).all())
        received[:] = 3
        check((array == 2).all())


class Forking:
    """Forks while it is pickled, and lets the parent write then."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.child: Child | None = None

    def __reduce__(self) -> Any:
        array = self.array
        self.child = child_that_sees(array)
        self.array = None
        array[:] = 5
        return int, ()


def a_fork_in_the_middle_of_a_message() -> None:
    """An array that a child has seen since it was named in a message is copied after all, as
    it is when the message is complete.
    """
    here, there = shmreduce.Pipe()
    with shmreduce.shared_allocations():
        array = filled(1)
        forking = Forking(array)
        held = [(array, forking)]
        del array
        here.send_last(held)
        received, _ = there.recv()
        check((received == 5).all())
        received[:] = 6
        check(forking.child is not None)
        if forking.child is not None:
            forking.child.finish()


def what_is_made_in_the_middle_of_a_fork_is_apart() -> None:
    """An array made after the pages were made private, and before the fork, is ordinary."""
    made: list[Any] = []
    shown: list[Any] = []

    def make() -> None:
        made.extend(filled(1) for _ in range(4))
        shown.append(made[0])

    # Hooks run in the opposite order: this one after the allocator's own.
    os.register_at_fork(before=make)
    with shmreduce.shared_allocations():
        warm = [filled(1) for _ in range(4)]
        del warm

        def work() -> None:
            for array in made:
                array[:] = 3

        Child(work).finish()
        check(all((array == 1).all() for array in made))


def a_block_that_a_child_sees_is_not_given_to_a_receiver() -> None:
    """An array that lived at a fork is copied when it is sent: the child still sees it."""
    here, there = shmreduce.Pipe()
    with shmreduce.shared_allocations():
        array = filled(1)
        child = child_that_sees(array)
        held = [array]
        del array
        here.send_last(held)
        received = there.recv()
        received[:] = 2
        child.finish()


def a_child_uses_nothing_of_its_parents() -> None:
    """A child's arrays lie elsewhere, and what it frees stays its parent's."""
    with shmreduce.shared_allocations():
        arrays = [filled(number) for number in range(4)]
        spare = filled(99)
        mine = [address_of(each) for each in [*arrays, spare]]
        del spare

        def work() -> None:
            with shmreduce.shared_allocations():
                inherited = arrays[:]
                arrays.clear()
                del inherited
                fresh = [filled(50) for _ in range(10)]
                check(all(is_born(each) for each in fresh))
                check(not {address_of(each) for each in fresh} & set(mine))

        child = Child(work)
        child.finish()
        check([int(each[-1]) for each in arrays] == [0, 1, 2, 3])
        check(all((each == each[0]).all() for each in arrays))
        get_heap().tend()
        again = [filled(60) for _ in range(10)]
        check([int(each[-1]) for each in arrays] == [0, 1, 2, 3])
        check(all((each == 60).all() for each in again))


def a_child_inside_the_block_gets_ordinary_memory_until_it_enters_one() -> None:
    """The handler is inherited, the parent's blocks are not."""
    with shmreduce.shared_allocations():
        warm = filled(1)
        del warm

        def work() -> None:
            check(not is_born(filled(2)))
            with shmreduce.shared_allocations():
                check(is_born(filled(3)))
            child = Child(lambda: check(not is_born(filled(4))))
            child.finish()

        Child(work).finish()


def files_with_the_numbers_of_closed_descriptors_are_apart() -> None:
    """Who closes all descriptors, as daemons do, keeps the arrays; files that are opened
    then are neither shown in arrays nor written to by them.
    """
    # Of arrays that a child shares now.
    warnings.simplefilter("ignore", shmreduce.ShmreduceWarning)
    with shmreduce.shared_allocations():
        before, freed = filled(1), filled(1)
        child_that_sees(before).finish()
        del freed
        after = filled(1)
        os.closerange(3, 4096)
        other = os.memfd_create("other")
        os.ftruncate(other, 1 << 30)
        for _ in range(64):
            os.dup(other)
        get_heap().tend()
        fresh = [filled(1) for _ in range(4)]
        child_that_sees(after).finish()
        check(all((array == 1).all() for array in (before, after, *fresh)))
        check(os.fstat(other).st_blocks == 0)


def a_segment_that_others_have_closed_is_not_registered() -> None:
    """The allocator takes no descriptor that may be another file's, and has its table's room."""
    with shmreduce.shared_allocations():
        heap = get_heap()
        segment = next(each for each in heap.segments if each.token in heap._numbers)
    other = os.memfd_create("other")
    os.ftruncate(other, 1 << 30)
    os.dup2(other, segment.fd)
    heap._numbers.pop(segment.token)
    check(heap._number_of(segment) is None)
    check(segment.token not in heap._numbers)


def a_child_that_frees_all_of_a_range_forgets_it() -> None:
    """Its parent's ranges do not fill its table."""
    with shmreduce.shared_allocations():
        array = filled(1)
        allocator, pages = load(), mmap.mmap(-1, 1 << 20)
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        number = entry_of(array).range

        def work() -> None:
            nonlocal array
            del array
            check(allocator.add_range(address, len(pages), 0, 0) == number)

        Child(work).finish()


def another_try_to_load_the_allocator_registers_nothing_twice() -> None:
    """The first was interrupted when its fork hooks were there."""

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(library, "also_prepare", interrupted)
        load()
    counters = load().counters
    Child(lambda: None).finish()
    check(counters.forks == 1)
    check(counters.forking == 0)


def threads_may_allocate_while_others_fork() -> None:
    """Arrays made and dropped at any instant of a fork are never the child's and the
    parent's at once.
    """
    stop = threading.Event()
    wrong: list[str] = []
    shown: dict[int, Any] = {}

    def allocate(seed: int) -> None:
        generator = random.Random(seed)
        with shmreduce.shared_allocations():
            while not stop.is_set():
                number = generator.randrange(256)
                array = filled(number, 1 << 17)
                shown[seed] = (number, array)
                again = filled(number ^ 255, 1 << 17)
                if not (array == number).all():
                    wrong.append(f"{array[0]} is not {number}")
                del again

    def work() -> None:
        deadline = time.monotonic() + 0.05
        while time.monotonic() < deadline:
            for number, array in list(shown.values()):
                check((array == number).all())

    threads = [threading.Thread(target=allocate, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(12):
            Child(work).finish()
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)
    check(not wrong)


def _first_array_during_a_fork(interrupt: Callable[[Callable[[], object]], object]) -> bool:
    """Load the allocator and make its first array while another thread is about to fork.

    ``interrupt`` lets that thread call a function before it forks. Returns whether the array was
    born in shared memory.
    """
    current()
    # Otherwise the thread would import these, and forks and imports wait for each other.
    get_memory_handlers()
    shared_allocations = shmreduce.shared_allocations
    forks, made, forked = (threading.Event() for _ in range(3))
    shown: list[Any] = []
    born: list[bool] = []

    def make() -> None:
        check(forks.wait(PATIENCE))
        with shared_allocations():
            shown.append(filled(1))
            born.append(is_born(shown[0]))
            made.set()
            check(forked.wait(PATIENCE))
            shown.clear()
            for _ in range(8):
                filled(9)
            shown.extend(filled(9) for _ in range(8))

    def wait() -> None:
        if not forked.is_set():
            forks.set()
            check(made.wait(PATIENCE))

    interrupt(wait)
    maker = threading.Thread(target=make)
    maker.start()
    child = Child(lambda: check((shown[0] == 1).all()))
    forked.set()
    maker.join(PATIENCE)
    check(len(shown) == 8)
    child.finish()
    with shmreduce.shared_allocations():
        check(is_born(filled(2)))
    return born[0]


def the_first_array_at_the_end_of_a_forks_hooks_is_apart() -> None:
    """Nothing knows any more that it has to be kept apart, so it is an ordinary array."""

    def interrupt(wait: Callable[[], object]) -> None:
        prepare = Runtime.before_fork

        def prepare_and_wait(runtime: Runtime, fork: Fork) -> None:
            prepare(runtime, fork)
            wait()

        patch = pytest.MonkeyPatch()
        patch.setattr(Runtime, "before_fork", prepare_and_wait)

    check(not _first_array_during_a_fork(interrupt))


def the_first_array_at_the_beginning_of_a_forks_hooks_is_apart() -> None:
    """It is born in shared memory, and its pages are made private before the fork."""
    # Registered last, so it is called first, and no hook of the allocator is on the list.
    check(_first_array_during_a_fork(lambda wait: os.register_at_fork(before=wait)))


def interrupts_come_at_any_instant() -> None:
    """Ctrl-C hundreds of times while arrays are made, moved and dropped: each is whole."""
    generator = random.Random(5)
    here, there = shmreduce.Pipe()
    witness: list[tuple[int, Any]] = []
    interrupts = 0

    def interrupt(_number: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    # Importing NumPy and finding plugins is not what is to be interrupted.
    with shmreduce.shared_allocations():
        here.send(filled(3))
        there.recv()
    # A file that was open()ed and not entered yet is closed by its death, which says so.
    warnings.filterwarnings("ignore", "unclosed file", ResourceWarning)
    signal.signal(signal.SIGALRM, interrupt)
    for _ in range(100):
        try:
            signal.setitimer(signal.ITIMER_REAL, generator.uniform(0.0002, 0.004))
            with shmreduce.shared_allocations():
                for number in range(1000):
                    array = filled(number)
                    witness = [*witness[-4:], (number % 256, array)]
                    small = np.zeros(LARGE // 4, np.uint8)
                    check(not small.any())
                    small[:] = 1
        except KeyboardInterrupt:
            interrupts += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, array in witness:
            check((array == number).all())
        check(not is_born(filled(1)))
    check(interrupts > 60)
    with shmreduce.shared_allocations():
        here.send(filled(3))
        check((there.recv() == 3).all())


def _struck_behind(name: str) -> None:
    """Let Ctrl-C come right behind the next call of a function of the allocator that succeeds."""
    allocator = load()
    function = getattr(allocator, name)

    def strike(*arguments: Any) -> Any:
        result = function(*arguments)
        if result == -1 or (name == "drop_range" and not result):
            return result
        setattr(allocator, name, function)
        raise KeyboardInterrupt

    setattr(allocator, name, strike)


def an_interrupt_behind_a_range_that_was_added() -> None:
    """The range is not added twice: the arrays in it are found when they are freed."""
    _struck_behind("add_range")
    with pytest.raises(KeyboardInterrupt), shmreduce.shared_allocations():
        pass
    with shmreduce.shared_allocations():
        first, second = filled(1), filled(2, 2 * LARGE)
        check(is_born(first) and is_born(second))
        del first, second
        check(is_born(filled(3)))


def an_interrupt_behind_a_range_that_was_dropped() -> None:
    """Its number becomes another segment's; the segment that had it gets one of its own."""
    with shmreduce.shared_allocations():
        filled(1)
        heap = get_heap()
    _struck_behind("drop_range")
    # As a heap does that needs room.
    with pytest.raises(KeyboardInterrupt), heap.exclusive():
        heap.cool(0)
    shmreduce.set_sharing_strategy("file_system")
    with shmreduce.shared_allocations():
        others = filled(2)
    shmreduce.set_sharing_strategy("file_descriptor")
    with shmreduce.shared_allocations():
        ours = filled(3)
        check(is_born(others) and is_born(ours))
        numbers = {entry_of(array).range for array in (others, ours)}
        check(len(numbers) == 2)
        check((others == 2).all() and (ours == 3).all())
        del ours
        check(is_born(filled(4)))


def ranges_have_no_address_in_common() -> None:
    """One that is added again has its number; one whose segment is gone makes room."""
    allocator, pages = load(), mmap.mmap(-1, 1 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    first, second = os.memfd_create("first"), os.memfd_create("second")
    number = allocator.add_range(address, len(pages), first, 0)
    check(allocator.add_range(address, len(pages), first, 0) == number)
    check(allocator.add_range(address + mmap.PAGESIZE, len(pages) // 2, second, 0) == number)
    check(allocator.lend(number, 0, address + mmap.PAGESIZE, mmap.PAGESIZE))


class Last:
    """Uses an array while the interpreter ends."""

    def __init__(self, array: Any, name: str) -> None:
        self.array = array
        self.name = name

    def __del__(self, write: Any = os.write) -> None:
        # Globals may be gone by now, NumPy's own too; defaults are not.
        last = int(self.array[-1])
        write(1, f"{self.name} {last} {self.array.tobytes().count(last)}\n".encode())


def arrays_live_to_the_very_end() -> None:
    """Arrays that are freed while the interpreter ends, in modules and cycles, are whole."""
    kept: dict[str, Any] = {}
    # Cleared late, and after the hooks of atexit; sys is the last of all modules.
    vars(sys.modules["__main__"])["kept"] = kept
    with shmreduce.shared_allocations():
        kept["module"] = Last(filled(1), "module")
        cycle: list[Any] = [Last(filled(2), "cycle")]
        cycle.append(cycle)
        kept["array"] = filled(3)
        vars(sys)["shmreduce_test"] = Last(filled(4), "sys")
    block = shmreduce.shared_allocations()
    block.__enter__()
    # It is never left.
    kept["inside"] = Last(filled(5), "inside")
    threading.Thread(target=lambda: kept.update(thread=filled(6))).start()


def a_freed_array_gives_its_memory_back_to_a_later_region() -> None:
    """Cooled, lent again and cleared: zeros are zeros, and what lives is whole."""
    with shmreduce.install(idle_keep=0):
        generator = random.Random(3)
        living: list[tuple[int, Any]] = []
        for _ in range(25):
            with shmreduce.shared_allocations():
                for _ in range(10):
                    size = generator.randrange(1 << 17, 1 << 22)
                    number = generator.randrange(1, 256)
                    clean = np.zeros(size, np.uint8)
                    check(not clean.any())
                    clean[:] = number
                    living.append((number, clean))
                    if len(living) > 12:
                        living.pop(generator.randrange(len(living)))
            heap = get_heap()
            if generator.random() < 0.5:
                with heap.exclusive():
                    heap.cool(0)
            for number, array in living:
                check((array == number).all())
        check(counters().served > 100)


def no_room_means_ordinary_memory() -> None:
    """An array for which the budget has no room is made all the same, elsewhere."""
    with shmreduce.install(budget=64 << 20), shmreduce.shared_allocations():
        large = np.ones(100 << 20, np.uint8)
        check(not is_born(large))
        check(large.all())
    with shmreduce.install(), shmreduce.shared_allocations():
        check(not is_born(np.empty(1 << 60, "V0")))
        try:
            np.empty(1 << 58, np.uint8)
        except MemoryError:
            return
        check(False)


def no_room_for_a_copy_is_an_error_and_leaves_the_array() -> None:
    """An array that somebody keeps needs a copy; without room for one nothing is sent."""
    here, there = shmreduce.Pipe()
    with shmreduce.install(budget=64 << 20), shmreduce.shared_allocations():
        array = filled(1, 15 << 20)
        check(is_born(array))
        try:
            here.send([array, filled(2, 14 << 20), [filled(3, 14 << 20), array[1:]]])
        except shmreduce.BudgetExceededError:
            pass
        else:
            check(False)
        check((array == 1).all())
        check(not there.poll(0))
        here.send(filled(4))
        check((there.recv() == 4).all())
    here.close()
    there.close()


def once_there_is_room_again_arrays_are_born_again() -> None:
    """That there was none at one look is not the last word, whatever was asked for then."""
    with shmreduce.install(budget=1 << 20), shmreduce.shared_allocations():
        _ = np.ones(70 << 20, np.uint8)
        get_heap().tend()
        check(not is_born(np.ones(50 << 20, np.uint8)))
    with shmreduce.install(), shmreduce.shared_allocations():
        check(is_born(np.ones(50 << 20, np.uint8)))


SCENARIOS = {
    function.__name__: function
    for function in (
        arrays_are_copied_by_a_fork,
        a_block_waits_for_the_children_that_may_see_it,
        a_moved_block_waits_for_its_receiver,
        what_is_kept_is_copied,
        a_fork_in_the_middle_of_a_message,
        what_is_made_in_the_middle_of_a_fork_is_apart,
        a_block_that_a_child_sees_is_not_given_to_a_receiver,
        a_child_uses_nothing_of_its_parents,
        a_child_inside_the_block_gets_ordinary_memory_until_it_enters_one,
        files_with_the_numbers_of_closed_descriptors_are_apart,
        a_segment_that_others_have_closed_is_not_registered,
        a_child_that_frees_all_of_a_range_forgets_it,
        another_try_to_load_the_allocator_registers_nothing_twice,
        threads_may_allocate_while_others_fork,
        the_first_array_at_the_end_of_a_forks_hooks_is_apart,
        the_first_array_at_the_beginning_of_a_forks_hooks_is_apart,
        interrupts_come_at_any_instant,
        an_interrupt_behind_a_range_that_was_added,
        an_interrupt_behind_a_range_that_was_dropped,
        ranges_have_no_address_in_common,
        arrays_live_to_the_very_end,
        a_freed_array_gives_its_memory_back_to_a_later_region,
        no_room_means_ordinary_memory,
        no_room_for_a_copy_is_an_error_and_leaves_the_array,
        once_there_is_room_again_arrays_are_born_again,
    )
}
