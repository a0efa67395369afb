"""A fork whose hooks are struck: what its child sees stays as it was, all the same.

The handler of a signal may raise as any function of a hook is entered; near the recursion
limit none can be.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce.memory import runtime
from shmreduce.memory.ledger import Fork, count_fork, mark_fork
from tests.memory.resending import resent
from tests.memory.waiting import PATIENCE, eventually, in_forked_child, wait_for_exit

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

pytestmark = pytest.mark.usefixtures("installed")

LENGTH = 300_000
FILES = (
    "/shmreduce/fork_hooks.py",
    *(
        f"/memory/{name}.py"
        for name in ("runtime", "process_memory", "handover", "ledger", "blocks", "idle")
    ),
)


class Strike:
    """Raises as the n-th Python function of the hooks is entered, once; for ``sys.settrace``."""

    def __init__(self, when: int, only: str = "") -> None:
        self.left = when
        self.only = only
        self.name = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Count, and raise."""
        code = frame.f_code
        # A function that only calls itself, to see how far that goes, is struck often enough once.
        ours = code.co_filename.endswith(FILES) and code.co_name != "_go_down"
        if event == "call" and ours:
            self.left -= self.only in code.co_name
            if self.left == 0:
                self.name = code.co_name
                # From here on it is not called any more.
                raise KeyboardInterrupt


def fork_of(strike: Strike) -> Callable[[], int]:
    def fork() -> int:
        sys.settrace(strike)
        try:
            return os.fork()
        finally:
            sys.settrace(None)

    return fork


def is_kept_apart(fork: Callable[[], int], by_value: Callable[[], bool] = lambda: True) -> bool:
    """Fork, use what was alive then again, and compare what each of the two has.

    Unless ``by_value`` says so, writes of the parent to an array of its own may show in the child.
    """
    state = runtime.current()
    shared, received = shmreduce.full(LENGTH, 1, np.uint8), resent(np.full(LENGTH, 1, np.uint8))
    reader, writer = os.pipe()
    pid = fork()
    if not pid:
        own = [shmreduce.full(LENGTH, 3, np.uint8) for _ in range(3)]
        os.read(reader, 1)
        seen = (shared == 1).all() and (received <= (1 if by_value() else 2)).all()
        os._exit(not (seen and runtime.current() is not state and len(own) == 3))
    received[:] = 2
    del shared, received
    others = [shmreduce.full(LENGTH, 2, np.uint8) for _ in range(3)]
    sent = resent(np.full(LENGTH, 2, np.uint8))
    os.write(writer, b"!")
    os.close(reader)
    os.close(writer)
    return wait_for_exit(pid) == 0 and all((each == 2).all() for each in [*others, sent])


def nothing_waits() -> bool:
    live = runtime.current().live
    live.settle()
    return not live.ledger.pending and not live.unsettled


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python prints what hooks raise."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)


def test_any_function_of_a_hook_may_be_struck_as_it_is_entered() -> None:
    """Nothing is lost on the fork, and the memory is used again when the child has gone."""

    def all_of_them() -> bool:
        struck = []
        for when in range(1, 1000):
            strike = Strike(when)
            assert is_kept_apart(fork_of(strike)), strike.name
            assert nothing_waits(), strike.name
            if not strike.name:
                break
            struck.append(strike.name)
        return {"_before_fork", "_before_fork_again", "_after_fork_in_parent"} <= set(struck)

    # In a process of its own: should anything stay for good, it does so there.
    assert wait_for_exit(in_forked_child(all_of_them)) == 0


@pytest.mark.parametrize("when", [1, 2])
def test_a_child_has_a_state_of_its_own_though_its_hook_was_struck(when: int) -> None:
    """As Ctrl-C does that comes to all processes of a terminal."""
    assert is_kept_apart(fork_of(Strike(when, "_after_fork_in_child")))
    eventually(nothing_waits, "the child has gone")


def test_a_fork_near_the_recursion_limit_is_as_any_other() -> None:
    """It happens in any case, whether or not there are frames left for its hooks."""
    has_room = False

    def go_down(frames: int) -> None:
        if frames:
            go_down(frames - 1)

    def deep(frames: int) -> int:
        nonlocal has_room
        if frames:
            return deep(frames - 1)
        # Not where nothing can be called any more, in C neither: that is one depth only.
        go_down(1)
        try:
            go_down(6)
        except RecursionError:
            has_room = False
        else:
            has_room = True
        return os.fork()

    def all_depths() -> bool:
        here = -1
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            here, frame = here + 1, frame.f_back
        limit = here + 100
        forks = {False: 0, True: 0}
        for left in range(1, 50):

            def fork(left: int = left) -> int:
                sys.setrecursionlimit(limit)
                try:
                    return deep(limit - here - left)
                finally:
                    sys.setrecursionlimit(10 * limit)

            try:
                # With so few frames not even pages can be made private.
                assert is_kept_apart(fork, lambda: has_room), left
            except RecursionError:
                continue
            forks[has_room] += 1
        return all(forks.values())

    assert wait_for_exit(in_forked_child(all_depths)) == 0


def test_a_fork_that_nobody_has_noted_does_not_keep_later_memory() -> None:
    """What lived then is never used again; what came after it is, though no fork follows."""

    def lose_all_hooks() -> bool:
        state = runtime.current()
        kept = shmreduce.full(LENGTH, 1, np.uint8)
        ledger = state.live.ledger
        mark_fork()
        count_fork()
        del kept

        def is_given_up() -> bool:
            state.live.settle()
            return not ledger.pending

        eventually(is_given_up, "nobody waits for its hooks")
        for _ in range(10):
            array = shmreduce.full(LENGTH, 2, np.uint8)
            del array
        state.live.settle()
        return state.live.unsettled == 1

    assert wait_for_exit(in_forked_child(lose_all_hooks)) == 0


_FORKS_FIRST = """
import os
import numpy, shmreduce
from shmreduce.memory import runtime
pid = os.fork()
if not pid:
    os._exit(0)
os.waitpid(pid, 0)
array = shmreduce.full(300_000, 1, numpy.uint8)
ledger, live = runtime.current().live.ledger, runtime.current().live
del array
assert (ledger.forks, ledger.pending, live.unsettled) == (0, {}, 0)
"""


def test_a_fork_before_there_was_shared_memory_is_nobodys_to_note() -> None:
    """It does not look like one whose hooks were lost."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _FORKS_FIRST]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_forks_of_two_threads_are_both_noted() -> None:
    """One thread is so far that its fork is counted, another forks in between."""

    def fork_twice() -> bool:
        ledger = runtime.current().live.ledger
        forks = ledger.forks
        seen = shmreduce.full(LENGTH, 1, np.uint8)
        # As the hooks of one thread that has not come to its announcement.
        mark_fork()
        count_fork()
        elsewhere = in_forked_child(lambda: True)
        assert wait_for_exit(elsewhere) == 0
        # A block that its child is going to see, whose fork has yet to come.
        assert ledger.visible(forks, ledger.forks)
        late = Fork()
        ledger.announce(late)
        ledger.before_fork(late, guarded=False)
        ledger.after_fork_in_parent([])
        del seen
        return ledger.forks == forks + 2 and nothing_waits()

    assert wait_for_exit(in_forked_child(fork_twice)) == 0
