"""Room that runs out: an error with a name, bounded memory, and all goes on when it is back."""

from __future__ import annotations

import errno
import multiprocessing
import os
import queue as standard_queue
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce.memory import locks, runtime
from shmreduce.memory.inspection import process_state
from shmreduce.memory.layout import CHUNK_SLOTS, LOCK_CHUNK, SHARED
from shmreduce.testing.processes import OtherProcess
from tests.faults.room import few_mappings, limited_cgroup, run_script, small_tmpfs

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE = 30.0
MEBIBYTE = 1 << 20
SMALL_MESSAGES = int(os.environ.get("SHMREDUCE_SMALL_MESSAGES", "20000"))
"""How many small messages are sent; the long form sends 1,000,000."""

_kept: list[Any] = []


@pytest.fixture(params=["file_descriptor", "file_system"])
def strategy(request: pytest.FixtureRequest, shmreduce_no_leaks: None) -> Iterator[str]:
    """Arrays of 4 KiB and more travel by shared memory, with each strategy."""
    with shmreduce.install(strategy=request.param, inline_limit=4096):
        yield request.param


def keep_full(nbytes: int) -> int:
    """Take shared memory in pieces until there is no more; return how many bytes."""
    taken = 0
    try:
        while True:
            _kept.append(shmreduce.ones(nbytes, np.uint8))
            taken += nbytes
    except shmreduce.BudgetExceededError:
        return taken


def drop() -> None:
    """Drop all, and keep none of it warm."""
    _kept.clear()
    for heap in runtime.current().heaps:
        with heap.exclusive():
            heap.cool(0)


def room(nbytes: int) -> int:
    """Return the budget of which the family, as other tests have left it, can use so much."""
    drop()
    return sum(reserved for _, reserved in runtime.current().family.members()) + nbytes


@pytest.mark.usefixtures("strategy")
def test_a_budget_holds_for_several_processes_together() -> None:
    """Three processes that take what they get never have more than the budget together,
    each is told so by name, and one gets what the others have given back.
    """
    budget = room(24 * MEBIBYTE)
    with (
        shmreduce.install(budget=budget),
        OtherProcess("fork") as first,
        OtherProcess("fork") as second,
    ):
        taken = [other.ask(keep_full, MEBIBYTE) for other in (first, second)]
        with pytest.raises(shmreduce.BudgetExceededError) as caught:
            shmreduce.ones(8 * MEBIBYTE, np.uint8)
        assert sum(taken) <= 24 * MEBIBYTE
        assert caught.value.in_use <= budget
        first.ask(drop)
        array = shmreduce.ones(8 * MEBIBYTE, np.uint8)
        assert second.ask(keep_full, MEBIBYTE) >= 8 * MEBIBYTE
        second.kill()
        del array
        assert len(shmreduce.ones(16 * MEBIBYTE, np.uint8)) == 16 * MEBIBYTE


IN_A_CGROUP = """
import os, sys
open(sys.argv[1] if len(sys.argv) > 1 else {members!r}, "w").write(str(os.getpid()))
import numpy as np
import shmreduce
shmreduce.install(strategy="file_descriptor", budget=1 << 40)
kept = []
try:
    while len(kept) < 400:
        kept.append(shmreduce.ones(1 << 20, np.uint8))
except shmreduce.OutOfSharedMemoryError as error:
    assert not isinstance(error, shmreduce.BudgetExceededError), error
    assert error.available < {limit}, error
assert 2 < len(kept) < {limit} >> 20, len(kept)
assert all(int(each.sum()) == 1 << 20 for each in kept)
count = len(kept)
kept.clear()
kept = [shmreduce.ones(1 << 20, np.uint8) for _ in range(count // 2)]
print("all well")
"""


def test_the_limit_of_a_cgroup_is_an_error_and_no_kill() -> None:
    """Where a container's memory ends there is an error, before the kernel kills anybody."""
    limit = 160 * MEBIBYTE
    with limited_cgroup(limit) as members:
        finished = run_script(IN_A_CGROUP.format(members=str(members), limit=limit))
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert finished.stdout == "all well\n"


IN_SMALL_SHM = """
import numpy as np
import shmreduce
import shmreduce as mp

def double(array):
    return array * 2

if __name__ == "__main__":
    mp.set_start_method("fork")
    with mp.Pool(2) as pool:
        # 96 MiB are under way at a time.
        arrays = [np.full(12 << 20, number, np.uint8) for number in range(8)]
        for number, array in enumerate(pool.map(double, arrays)):
            assert (array == 2 * number).all()
    with shmreduce.install(strategy="file_system"):
        kept = []
        try:
            while True:
                kept.append(shmreduce.ones(1 << 20, np.uint8))
        except shmreduce.OutOfSharedMemoryError as error:
            assert error.errno == 28, error
        assert 30 < len(kept) <= 64, len(kept)
        assert all(each.all() for each in kept)
        del kept[10:]
        with mp.Pool(2) as pool:
            assert (pool.apply(double, (np.ones(8 << 20, np.uint8),)) == 2).all()
    print("all well")
"""


def test_a_small_shared_memory_file_system_is_enough() -> None:
    """With a /dev/shm of 64 MiB as in a container, the default strategy sends more than
    that, and ``file_system`` says when it is full and goes on when it is not.
    """
    before = small_tmpfs(Path("/dev/shm"), 64)
    finished = run_script(IN_SMALL_SHM, *before, SHMREDUCE_DIRECTORY="/dev/shm")
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert finished.stdout == "all well\n"


def echo_all(incoming: Any, outgoing: Any) -> None:
    """Send back what comes, until None comes."""
    while (array := incoming.get()) is not None:
        outgoing.put(array + 1)
    outgoing.put(None)


def send_many_around(method: str, strategy: str) -> None:
    """Send arrays to two processes and back, through own and stock queues."""
    import shmreduce as mp

    with shmreduce.install(strategy=strategy, inline_limit=4096):
        contexts: list[Any] = [mp.get_context(method), multiprocessing.get_context(method)]
        for context in contexts:
            there, back = context.Queue(), context.Queue()
            workers = [context.Process(target=echo_all, args=(there, back)) for _ in range(2)]
            for each in workers:
                each.start()
            for number in range(60):
                there.put(np.full(5000 + 4000 * number, number % 100, np.uint8))
            for _ in range(60):
                array = back.get(timeout=PATIENCE)
                assert (array == array[0]).all()
            for _ in workers:
                there.put(None)
            for each in workers:
                each.join(PATIENCE)
                assert each.exitcode == 0


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_few_descriptors_are_enough(strategy: str) -> None:
    """Under ``ulimit -n 64`` two workers get and send arrays of many sizes."""
    script = (
        "from tests.faults.room import few_descriptors\n"
        "from tests.faults.test_exhaustion import send_many_around\n"
        f"with few_descriptors(64):\n    send_many_around('fork', {strategy!r})\n"
        "print('all well')"
    )
    finished = run_script(script)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout == "all well\n"


def make_copies_on_write(count: int) -> list[Any]:
    _kept.append(shmreduce.ones(4096, np.uint8))
    both = [shmreduce.share(np.full(4096, 5, np.uint8), mode="cow") for _ in range(2 * count)]
    # Neighbours would become one mapping.
    return both[::2]


@pytest.mark.usefixtures("strategy")
def test_mappings_that_run_out_are_an_error_that_passes() -> None:
    """When vm.max_map_count is reached, arrays that need mappings of their own are a
    ``SegmentError`` with ENOMEM; the message loads when there is room again.
    """
    with OtherProcess("fork") as other:
        ours, theirs = multiprocessing.Pipe()
        context: Any = multiprocessing.get_context("fork")
        process = context.Process(target=send_copies, args=(theirs, 100))
        process.start()
        assert ours.poll(PATIENCE)
        with few_mappings(30), pytest.raises(shmreduce.SegmentError) as caught:
            ours.recv()
        assert caught.value.errno == errno.ENOMEM
        assert "vm.max_map_count" in str(caught.value)
        data = caught.value.message_bytes
        assert data is not None
        arrays = multiprocessing.reduction.ForkingPickler.loads(data)
        assert all((each == 5).all() for each in arrays)
        del arrays
        ours.send("read")
        process.join(PATIENCE)
        assert process.exitcode == 0
        ours.close()
        theirs.close()
        assert other.ask(np.sum, np.ones(5000)) == 5000


def send_copies(connection: Any, count: int) -> None:
    connection.send(make_copies_on_write(count))
    assert connection.poll(PATIENCE)
    connection.recv()


@pytest.mark.usefixtures("strategy")
def test_lease_slots_that_run_out_are_an_error_that_passes() -> None:
    """When every lease slot of a segment stands for an unread message, or belongs to another
    process, the next is an ``OutOfLeasesError``; once some are read there are slots again.
    """
    pickler = multiprocessing.reduction.ForkingPickler
    array = shmreduce.ones(1000, np.uint8)
    views = [array[number:] for number in range(500)]
    messages = [bytes(pickler.dumps(views))]
    (segment,) = runtime.current().heap(SHARED).segments
    # As if other processes had taken all chunks but this process's first and one more.
    others = locks.reopen(segment.fd)
    chunks = segment.layout.slots // CHUNK_SLOTS
    taken = [locks.try_lock(others, LOCK_CHUNK + chunk) for chunk in range(chunks)]
    assert taken.count(False) == 1
    locks.unlock(others, LOCK_CHUNK + chunks - 1)
    with pytest.raises(shmreduce.OutOfLeasesError) as caught:
        while len(messages) < 1000:
            messages.append(bytes(pickler.dumps(views)))
    os.close(others)
    assert caught.value.slots == segment.layout.slots
    assert len(messages) == 2 * CHUNK_SLOTS // len(views)
    loaded = pickler.loads(messages.pop())
    assert [len(each) for each in loaded] == [len(each) for each in views]
    messages.append(bytes(pickler.dumps(views)))
    with shmreduce.install(message_timeout=0.001):
        deadline = time.monotonic() + PATIENCE
        while process_state().unread and time.monotonic() < deadline:
            time.sleep(0.01)
    assert process_state().unread == 0


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def sum_all(queue: Any, answer: Any) -> None:
    total = 0
    while (array := queue.get()) is not None:
        total += int(array.sum())
    answer.send(total)


@pytest.mark.usefixtures("strategy")
@pytest.mark.timeout(120 + SMALL_MESSAGES / 2000)
@pytest.mark.parametrize("own", [True, False])
def test_many_small_messages_take_no_memory_in_the_end(own: bool) -> None:
    """However many small arrays go through a queue, memory and descriptors stay as they
    were after the first thousand.
    """
    import shmreduce as mp

    context: Any = mp.get_context("fork") if own else multiprocessing.get_context("fork")
    queue = context.Queue(200)
    answer, theirs = context.Pipe(duplex=False)
    reader = context.Process(target=sum_all, args=(queue, theirs))
    reader.start()
    array = np.ones(512)
    reserved = descriptors = 0
    for number in range(SMALL_MESSAGES):
        queue.put(array, timeout=PATIENCE)
        if number == 1000:
            reserved, descriptors = process_state().reserved, open_descriptors()
    assert process_state().reserved <= reserved + MEBIBYTE
    assert open_descriptors() <= descriptors + 2
    queue.put(None)
    assert answer.poll(PATIENCE)
    assert answer.recv() == 512 * SMALL_MESSAGES
    reader.join(PATIENCE)
    answer.close()
    theirs.close()
    queue.close()
    queue.join_thread()
    if not own:
        queue._reader.close()
        queue._writer.close()


@pytest.mark.usefixtures("strategy")
def test_a_queue_that_nobody_reads_is_bounded_by_the_budget() -> None:
    """Who puts arrays into a queue that nobody reads gets a ``BudgetExceededError``, the
    memory in use stays within the budget, and reading one makes room for one.
    """
    import shmreduce as mp

    budget = room(16 * MEBIBYTE)
    array = np.ones(MEBIBYTE, np.uint8)
    with shmreduce.install(budget=budget):
        queue = mp.get_context("fork").Queue()
        put = 0
        with pytest.raises(shmreduce.BudgetExceededError):
            while put < 100:
                queue.put(array)
                put += 1
        assert 4 < put <= 16
        assert process_state().reserved <= budget
        for _ in range(20):
            assert queue.get(timeout=PATIENCE).sum() == MEBIBYTE
            queue.put(array)
        for _ in range(put):
            assert queue.get(timeout=PATIENCE).sum() == MEBIBYTE
        with pytest.raises(standard_queue.Empty):
            queue.get(timeout=0)
        queue.close()
        queue.join_thread()
