"""Nothing is left of a pool: no process, thread, descriptor or memory."""

from __future__ import annotations

import contextlib
import errno
import gc
import multiprocessing
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import shmreduce
from shmreduce import InheritedPoolError, pool_supervisor
from shmreduce.executor import ProcessPoolExecutor
from shmreduce.pool import Pool
from tests.conftest import PATIENCE, START_METHODS
from tests.memory.waiting import in_forked_child, wait_for_exit
from tests.pool.work import filled, leave_a_child, square, sum_of_squares_by_a_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import Children

FORK: Any = multiprocessing.get_context("fork")
MEBIBYTE = 1 << 20


def use_a_pool() -> None:
    with Pool(1, context=FORK) as pool:
        assert pool.map(square, range(3)) == [0, 1, 4]
        assert pool.apply(filled, (1.0,))[0] == 1
    pool.join()


def use_an_executor() -> None:
    with ProcessPoolExecutor(1, FORK) as executor:
        assert executor.submit(square, 3).result(PATIENCE) == 9


def threads() -> list[threading.Thread]:
    """Return all threads but the one that gives idle memory back, which comes and goes."""
    return [each for each in threading.enumerate() if each.name != "shmreduce-idle"]


@pytest.mark.parametrize(("use", "count"), [(use_a_pool, 200), (use_an_executor, 30)])
def test_many_pools_leave_nothing(use: Callable[[], None], count: int) -> None:
    """Pools made and ended one after another: no more descriptors and threads than before."""
    this = psutil.Process()
    with shmreduce.install():
        for _ in range(5):
            use()
        gc.collect()
        before = (this.num_fds(), len(threads()), this.memory_info().rss)
        for _ in range(count):
            use()
        gc.collect()
        after = (this.num_fds(), len(threads()), this.memory_info().rss)
    # What tests before this one have left may have gone meanwhile.
    assert after[0] <= before[0]
    assert after[1] <= before[1]
    assert after[2] - before[2] < 16 * MEBIBYTE
    assert not multiprocessing.active_children()


class TooManyWatched(selectors.DefaultSelector):
    """Cannot look at a descriptor (epoll_ctl(2))."""

    def register(self, *_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def lack_descriptors() -> Any:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def sockets() -> set[str]:
    """Return the sockets that this process has open."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        # That of the listing itself is closed by now.
        with contextlib.suppress(FileNotFoundError):
            found.add(str(entry.readlink()))
    return {each for each in found if each.startswith("socket:")}


@pytest.mark.parametrize("make", [lack_descriptors, TooManyWatched])
def test_a_pool_that_cannot_be_made_leaves_no_socket(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]
) -> None:
    """Both ends of the pipe that wakes its thread are closed at once, not by the collector."""
    with monkeypatch.context() as patch:
        patch.setattr(selectors, "DefaultSelector", make)
        before = sockets()
        with pytest.raises(OSError, match=r"Too many|No space") as caught:
            Pool(1, context=FORK)
        # While its traceback has the pool.
        after = sockets()
        assert caught.tb is not None
    assert after <= before


@pytest.mark.parametrize("method", START_METHODS)
def test_pools_in_workers(method: str) -> None:
    """A worker may have a pool of its own."""
    with Pool(2, context=multiprocessing.get_context(method)) as pool:
        results = pool.starmap(sum_of_squares_by_a_pool, [(method, 0), (method, 4)])
    pool.join()
    assert results == [0 + 1 + 4 + 9, 16 + 25 + 36 + 49]


def test_terminating_does_not_wait_for_what_workers_have_forked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that a task has left in the background goes on, and nobody waits for its end."""
    monkeypatch.setattr(pool_supervisor, "_GRACE", PATIENCE)
    with Pool(1, context=FORK) as pool:
        left = pool.apply(leave_a_child, (2 * PATIENCE,))
        began = time.monotonic()
        pool.terminate()
        took = time.monotonic() - began
    assert psutil.pid_exists(left)
    os.kill(left, signal.SIGKILL)
    assert took < PATIENCE / 2


def test_a_forked_child_that_terminates_an_inherited_pool_leaves_it_alone() -> None:
    """Its workers are the parent's, as with multiprocessing: a destructor may do so in a child."""
    with Pool(2, context=FORK) as pool:
        workers = [each.pid for each in pool._pool]
        child = FORK.Process(target=pool.terminate)
        child.start()
        child.join(PATIENCE)
        assert child.exitcode == 0
        assert pool.map(square, range(3)) == [0, 1, 4]
        assert [each.pid for each in pool._pool] == workers


def test_a_forked_child_shuts_an_inherited_executor_down_for_itself_alone() -> None:
    """Also if another thread of its parent had the locks at the fork."""
    with ProcessPoolExecutor(1, FORK) as executor:
        assert executor.submit(square, 3).result(PATIENCE) == 9
        child = FORK.Process(target=executor.shutdown)
        with executor._lock, executor._supervisor._self_pipe._lock:
            child.start()
        child.join(PATIENCE)
        exitcode = child.exitcode
        child.kill()
        assert exitcode == 0
        assert executor.submit(square, 4).result(PATIENCE) == 16


def test_a_forked_child_is_told_that_an_inherited_pool_does_not_answer_it() -> None:
    """Instead of waiting for ever; the pool's own process goes on."""

    def is_told(call: Callable[[], object]) -> bool:
        with pytest.raises(InheritedPoolError, match="make a pool in this process") as caught:
            call()
        return (caught.value.parent, caught.value.pid) == (os.getppid(), os.getpid())

    reader, writer = os.pipe()
    with Pool(1, context=FORK) as pool, ProcessPoolExecutor(1, FORK) as executor:
        arrived = pool.apply_async(square, (2,))
        arrived.wait(PATIENCE)
        waited_for = pool.apply_async(os.read, (reader, 1))
        of_a_map, in_turn = pool.map_async(square, range(3)), pool.imap(square, range(3))
        calls: list[Callable[[], object]] = [
            lambda: pool.apply(square, (3,)),
            lambda: pool.map(square, range(3)),
            lambda: pool.imap(square, range(3)),
            waited_for.get,
            lambda: of_a_map.wait(PATIENCE),
            lambda: in_turn.next(PATIENCE),
            lambda: executor.submit(square, 3),
            lambda: executor.map(square, range(3)),
        ]
        for call in calls:
            assert wait_for_exit(in_forked_child(partial(is_told, call))) == 0
        assert wait_for_exit(in_forked_child(lambda: arrived.get() == 4)) == 0
        os.write(writer, b"!")
        assert waited_for.get(PATIENCE) == b"!"
        assert of_a_map.get(PATIENCE) == list(in_turn) == [0, 1, 4]
        assert pool.apply(square, (3,)) == 9
        assert executor.submit(square, 4).result(PATIENCE) == 16
    os.close(reader)
    os.close(writer)


def test_several_pools_at_once(children: Children) -> None:
    """A pool ends while another, made before or after it, goes on."""
    first = Pool(1, context=children.context)
    second = Pool(1, context=children.context)
    for pool, other in ((first, second), (second, None)):
        assert pool.apply(filled, (2.0,))[0] == 2
        pool.close()
        pool.join()
        assert other is None or other.apply(square, (3,)) == 9


# Programs


class Program:
    """A program in a process group of its own; nothing of it survives the test."""

    def __init__(self, text: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", text],
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent.parent,
        )

    def wait_until_busy(self) -> None:
        """Wait until the program's workers say that they are at work."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "busy\n"

    def members(self) -> list[int]:
        """Return the processes of the group that have not ended."""
        found = []
        for process in psutil.process_iter():
            try:
                if (
                    os.getpgid(process.pid) == self.process.pid
                    and process.status() != psutil.STATUS_ZOMBIE
                    and "resource_tracker" not in " ".join(process.cmdline())
                ):
                    found.append(process.pid)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        return found

    def wait_for_the_end(self) -> None:
        """Fail if a process is left after a while."""
        deadline = time.monotonic() + PATIENCE
        while self.members():
            assert time.monotonic() < deadline, f"still there: {self.members()}"
            time.sleep(0.01)

    def close(self) -> None:
        if self.members():
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


BUSY = """
import multiprocessing, sys, time
from shmreduce.pool import Pool
from tests.pool.work import keep, release_kept_and_sleep, nested_busy_pool

if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    begun = context.Semaphore(0)
    with Pool(2, keep, (begun,), context=context) as pool:
        results = [pool.apply_async({function}) for _ in range(2)]
        for _ in range(2 * {workers}):
            begun.acquire()
        print("busy", flush=True)
        {wait}
"""


def busy(method: str, *, nested: bool = False, wait: str = "results[0].get()") -> str:
    function = "nested_busy_pool" if nested else "release_kept_and_sleep"
    workers = 2 if nested else 1
    return BUSY.format(method=method, function=function, workers=workers, wait=wait)


@pytest.fixture
def run() -> Iterator[Callable[[str], Program]]:
    programs = []

    def start(text: str) -> Program:
        programs.append(Program(text))
        return programs[-1]

    yield start
    for program in programs:
        program.close()


@pytest.mark.parametrize("method", START_METHODS)
def test_ctrl_c_leaves_no_worker(method: str, run: Callable[[str], Program]) -> None:
    """An interrupt of the terminal ends the program by KeyboardInterrupt, workers included."""
    program = run(busy(method))
    program.wait_until_busy()
    os.killpg(program.process.pid, signal.SIGINT)
    _, errors = program.process.communicate(timeout=PATIENCE)
    assert program.process.returncode in {1, -signal.SIGINT}
    assert errors.rstrip().endswith("KeyboardInterrupt")
    program.wait_for_the_end()


def test_ctrl_c_in_nested_pools(run: Callable[[str], Program]) -> None:
    """Workers of workers end with an interrupt too."""
    program = run(busy("fork", nested=True))
    program.wait_until_busy()
    os.killpg(program.process.pid, signal.SIGINT)
    program.process.communicate(timeout=PATIENCE)
    program.wait_for_the_end()


@pytest.mark.parametrize("method", START_METHODS)
def test_workers_die_with_a_parent_that_was_killed(
    method: str, run: Callable[[str], Program]
) -> None:
    """After SIGKILL of the program alone its busy workers end, and those of its workers."""
    program = run(busy(method, nested=method == "fork"))
    program.wait_until_busy()
    program.process.kill()
    program.wait_for_the_end()


def test_terminating_ends_the_workers_of_workers(run: Callable[[str], Program]) -> None:
    """Leaving the `with` block kills busy workers and the pools that they have."""
    program = run(busy("fork", nested=True, wait="pass"))
    program.wait_until_busy()
    _, errors = program.process.communicate(timeout=PATIENCE)
    assert program.process.returncode == 0, errors
    program.wait_for_the_end()


def test_a_pool_that_is_open_at_the_end_of_the_program(run: Callable[[str], Program]) -> None:
    """The program ends, and its workers with it."""
    program = run(
        "from shmreduce.pool import Pool\n"
        "import multiprocessing\n"
        "pool = Pool(2, context=multiprocessing.get_context('fork'))\n"
        "assert pool.map(abs, [-1]) == [1]\n"
    )
    _, errors = program.process.communicate(timeout=PATIENCE)
    assert program.process.returncode == 0, errors
    program.wait_for_the_end()


def test_what_an_executor_was_given_is_done_before_the_program_ends(
    run: Callable[[str], Program],
) -> None:
    """An executor that was not shut down finishes its calls, as the standard one does."""
    program = run(
        "from shmreduce.executor import ProcessPoolExecutor\n"
        "import multiprocessing\n"
        "executor = ProcessPoolExecutor(1, multiprocessing.get_context('fork'))\n"
        "futures = [executor.submit(print, n, flush=True) for n in range(5)]\n"
    )
    output, errors = program.process.communicate(timeout=PATIENCE)
    assert output.split() == ["0", "1", "2", "3", "4"], errors
    program.wait_for_the_end()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_start_after_the_end_of_the_file_have_its_functions(
    method: str, run: Callable[[str], Program], tmp_path: Path
) -> None:
    """What goes on when the main thread has come to its end finds the functions it needs."""
    file = tmp_path / "program.py"
    file.write_text(
        "import threading\n"
        "import shmreduce\n"
        "def double(number):\n"
        "    return 2 * number\n"
        "def use(pool):\n"
        "    threading.main_thread().join()\n"
        "    print(pool.map(double, range(3), chunksize=1), flush=True)\n"
        "    pool.terminate()\n"
        "if __name__ == '__main__':\n"
        f"    context = shmreduce.get_context('{method}')\n"
        "    pool = context.Pool(1, maxtasksperchild=1)\n"
        "    threading.Thread(target=use, args=(pool,)).start()\n"
        "    executor = shmreduce.ProcessPoolExecutor(3, context)\n"
        "    for number in range(6):\n"
        "        future = executor.submit(double, number)\n"
        "        future.add_done_callback(lambda future: print(future.result(), flush=True))\n"
    )
    program = run(f"import os, sys; os.execv(sys.executable, [sys.executable, {str(file)!r}])")
    output, errors = program.process.communicate(timeout=PATIENCE)
    assert sorted(output.splitlines()) == ["0", "10", "2", "4", "6", "8", "[0, 2, 4]"], errors
    program.wait_for_the_end()


def test_an_executor_is_done_before_functions_of_atexit(run: Callable[[str], Program]) -> None:
    """What they take away may be needed by calls; and they can submit no more."""
    program = run(
        "import atexit\n"
        "def at_the_end():\n"
        "    print([future.done() for future in futures], flush=True)\n"
        "    try:\n"
        "        executor.submit(abs, -1)\n"
        "    except RuntimeError as error:\n"
        "        print(error, flush=True)\n"
        "atexit.register(at_the_end)\n"
        "from shmreduce.executor import ProcessPoolExecutor\n"
        "import multiprocessing, time\n"
        "executor = ProcessPoolExecutor(1, multiprocessing.get_context('fork'))\n"
        "futures = [executor.submit(time.sleep, 0.05) for _ in range(3)]\n"
        "atexit.register(at_the_end)\n"
    )
    output, errors = program.process.communicate(timeout=PATIENCE)
    done = "[True, True, True]\ncannot schedule new futures after interpreter shutdown\n"
    assert output == 2 * done, errors
    program.wait_for_the_end()


def test_exit_codes_that_the_kernel_does_not_keep(run: Callable[[str], Program]) -> None:
    """In a program that ignores SIGCHLD nobody waits for the exit codes of workers."""
    program = run(
        "import multiprocessing, signal\n"
        "from shmreduce import pool_worker_handle\n"
        "from shmreduce.pool import Pool\n"
        f"pool_worker_handle._REAP = {2 * PATIENCE}\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "pool = Pool(2, maxtasksperchild=2, context=multiprocessing.get_context('fork'))\n"
        "print(*pool.map(abs, range(-6, 0), chunksize=1))\n"
        "pool.close()\n"
        "pool.join()\n"
    )
    output, errors = program.process.communicate(timeout=PATIENCE)
    assert output.split() == ["6", "5", "4", "3", "2", "1"], errors
    program.wait_for_the_end()


def test_exit_codes_that_somebody_else_reads(run: Callable[[str], Program]) -> None:
    """A program that reads the exit codes of all children is waited for once, not per worker."""
    program = run(
        "import contextlib, multiprocessing, os\n"
        "from multiprocessing import popen_fork\n"
        "from shmreduce.pool import Pool\n"
        "class Popen(popen_fork.Popen):\n"
        "    def poll(self, flag=os.WNOHANG):\n"
        "        # A handler of SIGCHLD was here before.\n"
        "        with contextlib.suppress(ChildProcessError):\n"
        "            os.waitpid(self.pid, os.WNOHANG)\n"
        "        return super().poll(flag)\n"
        "class Process(multiprocessing.context.ForkProcess):\n"
        "    waits = 0\n"
        "    _Popen = staticmethod(Popen)\n"
        "    def join(self, timeout=None):\n"
        "        self.waits += 1\n"
        "        super().join(timeout)\n"
        "class Context(multiprocessing.context.ForkContext):\n"
        "    pass\n"
        "Context.Process = Process\n"
        "for _ in range(2):\n"
        "    with Pool(2, context=Context()) as pool:\n"
        "        print(*pool.map(abs, range(-3, 0)))\n"
        "        workers = pool._pool\n"
        "print([worker.exitcode for worker in workers], all(each.waits < 5 for each in workers))\n"
    )
    output, errors = program.process.communicate(timeout=PATIENCE)
    assert output.splitlines() == ["3 2 1", "3 2 1", "[None, None] True"], errors
    program.wait_for_the_end()
