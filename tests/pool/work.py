"""What the workers of the tests' pools do."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shmreduce.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Callable

LARGE = 1 << 20
"""Bytes of arrays that certainly travel by shared memory."""
FOREVER = 600.0
"""Seconds; whoever sleeps so long is killed before."""


def square(x: Any) -> Any:
    return x * x


def perform(call: tuple[Callable[[Any], Any], Any]) -> Any:
    """Call a function with its argument: tasks of one call that do different things."""
    function, argument = call
    return function(argument)


def add(x: Any, y: Any) -> Any:
    return x + y


def invert(x: float) -> float:
    return 1 / x


def fail(x: Any) -> None:
    raise KeyError(x)


def own_pid(_: Any = None) -> int:
    return os.getpid()


def leave_a_child(seconds: float) -> int:
    """Fork a process that sleeps so long, whatever becomes of the worker; return its pid."""
    pid = os.fork()
    if not pid:
        time.sleep(seconds)
        os._exit(0)
    return pid


def end_at(x: int, at: int, how: str) -> int:
    """Return ``x``, or end the process in this way if it is ``at``."""
    if x == at:
        end(how)
    return x


def end(how: str) -> None:
    if how == "exit":
        sys.exit(3)
    if how == "_exit":
        os._exit(4)
    # pytest's would print the stack.
    faulthandler.disable()
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(FOREVER)


def end_at_2_by_sigkill(x: int) -> int:
    return end_at(x, 2, "SIGKILL")


def noted(call: tuple[str, int, str | None]) -> int:
    """Append a call's number and the worker to a file; return the square, or end as it says."""
    path, number, how = call
    with Path(path).open("a") as file:
        file.write(f"{number} {os.getpid()}\n")
    if how is not None:
        end(how)
    return number * number


def end_once(path: str, value: Any) -> float:
    """Spoil the array and kill the process in the first call; return its sum in the second."""
    try:
        Path(path).touch(exist_ok=False)
    except FileExistsError:
        return float(value.sum())
    value[:] = -1
    end("SIGKILL")
    raise AssertionError("not reached")


def touch_and_sleep(path: str) -> None:
    Path(path).touch()
    time.sleep(FOREVER)


def filled(value: float) -> Any:
    return np.full(LARGE // 8, value)


def total(array: Any) -> float:
    return float(array.sum())


def first_of(array: Any) -> float:
    """Return the first element, having overwritten it."""
    value = float(array[0])
    array[:] = -1
    return value


def doubled_in_place(array: Any) -> Any:
    array *= 2
    return array


def set_first(array: Any) -> None:
    array[0] = 7


class Unpicklable:
    """Cannot be unpickled by whoever receives it."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return fail, ("on arrival",)


def unpicklable_there(_: Any) -> Any:
    return Unpicklable()


class ExitsWhenPickled:
    """Raises SystemExit in whoever pickles it."""

    def __reduce__(self) -> Any:
        sys.exit(5)


def exits_when_pickled(_: Any) -> Any:
    return ExitsWhenPickled()


def not_picklable(_: Any) -> Any:
    return lambda: 42


def sum_of_squares_by_a_pool(method: str, start: int) -> int:
    """Use a pool inside a worker."""
    context: Any = multiprocessing.get_context(method)
    with Pool(2, context=context) as pool:
        return sum(pool.map(square, range(start, start + 4)))


def broken_initializer() -> None:
    raise ValueError("no")


_given: list[Any] = []


def keep(value: Any) -> None:
    _given.append(value)


def kept(_: Any) -> Any:
    return _given[-1]


def tell_and_sleep(_: Any) -> None:
    """Set the first event that this worker was given, or the other if that is set; sleep."""
    first, second = _given[-1]
    (second if first.is_set() else first).set()
    time.sleep(FOREVER)


def exit_with_7_at_sigterm() -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    _given[-1].set()
    time.sleep(FOREVER)


def ignore_sigterm_and_sleep() -> None:
    """Set the first event that this worker was given, and the other at SIGTERM."""
    begun, asked_to_end = _given[-1]
    signal.signal(signal.SIGTERM, lambda *_: asked_to_end.set())
    begun.set()
    # It goes on after a handler.
    time.sleep(FOREVER)


def release_kept_and_sleep() -> None:
    _given[-1].release()
    time.sleep(FOREVER)


def nested_busy_pool() -> None:
    """Have a pool of two that are busy, and be busy with waiting for them."""
    context: Any = multiprocessing.get_context("fork")
    with Pool(2, context=context) as pool:
        results = [pool.apply_async(release_kept_and_sleep) for _ in range(2)]
        results[0].get()


def wait_for_kept(_: Any = None) -> Any:
    """Wait for the event that this worker was given."""
    return _given[-1].wait(FOREVER)


def wait_for_kept_at_0(number: int) -> int:
    if not number:
        wait_for_kept()
    return number


def wait_for_kept_lock() -> None:
    with _given[-1]:
        pass


def wait_for_one_before(number: int, distance: int) -> int:
    """Wait for the task that came so many before this one; then set this one's flag."""
    done = _given[-1]
    if number >= distance:
        wait_for_kept_flag(number - distance)
    if number % 40 == 7:
        # Then tasks count as long for a while.
        time.sleep(3e-3)
    done[number] = 1
    return number


def wait_for_the_next(number: int) -> int:
    """Wait for the task after this one if the number is even, set the flag if it is odd."""
    if number % 2:
        return set_kept_flag(number)
    return wait_for_kept_flag(number + 1) - 1


def wait_for_one_behind(number: int, distance: int) -> int:
    """Wait for the task that comes so many after this one, if this is one of those that do."""
    if number % distance == 0:
        wait_for_kept_flag(number + distance - 1)
    return set_kept_flag(number)


def wait_for_kept_flag(number: int) -> int:
    """Wait until another task has set a flag in what is kept."""
    deadline = time.monotonic() + FOREVER
    while not _given[-1][number] and time.monotonic() < deadline:
        time.sleep(1e-5)
    return number


def set_kept_flag(number: int) -> int:
    _given[-1][number] = 1
    return number


def square_in_two(x: int) -> int:
    """Return the square, here and in a child, which this process waits for."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return x * x


def ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def touch(path: str) -> None:
    Path(path).touch()


def wait_for_files(folder: str, count: int) -> int:
    """Wait until so many files are in a folder, which other calls make; return how many."""
    deadline = time.monotonic() + FOREVER
    while (
        found := sum(1 for _ in Path(folder).iterdir())
    ) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return found
