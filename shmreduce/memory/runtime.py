"""The state of this process: begun at its first use, renewed in a forked child, left at the end.

May import ``fork_hooks``, ``ledger`` and ``process_memory``, and strategies.

A forked child starts with a new state. It keeps the inherited one only to look things up,
because only the parent may free its memory.
"""

from __future__ import annotations

import functools
import os
import threading
from contextlib import suppress
from multiprocessing import util

from shmreduce.fork_hooks import fork_begins, forking, prepare_late, renew_in_children, to_the_end
from shmreduce.memory.ledger import Fork, count_fork, mark_fork
from shmreduce.memory.process_memory import Runtime
from shmreduce.strategies import current_strategy

__all__ = ["Runtime", "current", "prepare_for_children"]

_current: list[Runtime] = []
"""The state of this process, if there is one. In a list, so that a C function can empty it."""
_latest: Runtime | None = None
"""The same state; in a forked child that has none yet, its parent's."""


def current() -> Runtime:
    """Return the state of this process."""
    return _current[0] if _current else _begin()


def _begin() -> Runtime:
    global _latest
    if _latest is not None and not _current:
        # This is a forked child whose hook did not run.
        _renew(_latest)
        return _current[0]
    made = Runtime()
    # Another thread may have made a state first, and arrays may be in it already. From this
    # check until the state is in the list there is no call, so no other thread runs.
    if _latest is None:
        _latest = made
        _current.append(made)
        # A thread that is about to fork may have looked for a state before there was this one.
        # Then the mark of its fork stays, and what is made until then is not reused.
        if not forking:
            made.live.ledger.forget_unnoted()
        _finish_at_exit(made)
        _retire_in_children(made)
        # multiprocessing clears the finalizers in children that it forks, after the hooks of
        # os.register_at_fork have run. Then it calls what is registered here.
        util.register_after_fork(_leave, _finish_at_exit)
    return _current[0]


def _retire_in_children(runtime: Runtime) -> None:
    """Make sure that a child releases nothing of its parent's, even if its hooks do not run."""
    os.register_at_fork(after_in_child=functools.partial(setattr, runtime.live, "current", False))


def _finish_at_exit(_: object) -> None:
    # Lowest priority, so that the queues' feeder threads, which have -5, flush first.
    util.Finalize(None, _leave, exitpriority=-100)


def prepare_for_children() -> None:
    """Make this process a member of a family, which its children will join.

    Call it after the settings were changed, and before a child is started. It does not
    keep the settings; they are read when they are needed.
    """
    runtime = current()
    runtime.strategies.add(current_strategy())
    _ = runtime.family
    # The new settings may allow less idle memory than there is now.
    runtime.on_growth()


def _leave() -> None:
    if not _current:
        return
    runtime = _current[0]
    if _threads_that_go_on():
        # Before Python 3.13 a child process runs its finalizers first, and then waits for its
        # threads. So it will wait for this thread, too.
        with suppress(RuntimeError):
            threading.Thread(
                target=_leave_last, args=(runtime,), name="shmreduce-leave", daemon=False
            ).start()
            return
    runtime.leave()


def _leave_last(runtime: Runtime) -> None:
    while threads := _threads_that_go_on():
        threads[0].join()
    runtime.leave()


def _threads_that_go_on() -> list[threading.Thread]:
    """Return the other threads for which the interpreter is still going to wait."""
    here, main = threading.current_thread(), threading.main_thread()
    if not main.is_alive():
        # The interpreter has waited for them.
        return []
    return [each for each in threading.enumerate() if not each.daemon and each not in {here, main}]


def _hear_signals() -> None:
    """Do nothing, so that the handler of a signal that came during the fork runs here."""


# A signal handler may raise when Python enters a hook, and then that hook is skipped. So each
# hook is registered twice, and the second call does what the first did not do. An exception
# later in a hook, or at the beginning of a function that it calls, is caught, and the step is
# tried again. Near the recursion limit both calls may be skipped: then the ledger and current()
# rely on hooks that are C functions.

_prepared: dict[int, None] = {}
"""Threads that have run the first of the hooks before a fork, but not the second."""
_finished: dict[int, None] = {}
"""The same for the hooks after a fork."""


def _before_fork() -> None:
    here = threading.get_ident()
    # Left by an earlier fork, if its second hook was skipped. First, since a signal handler may
    # raise in the next call.
    _prepared.pop(here, None)
    # Before it looks for a state, see _begin().
    fork_begins()
    forks: list[Fork] = []
    try:
        if _current:
            to_the_end(lambda: _prepare(_current[0], forks))
    finally:
        try:
            if _current and not (forks and forks[0].ready):
                to_the_end(lambda: _prepare(_current[0], forks, last=True))
        finally:
            # There is no call in this line, so no signal handler runs.
            _prepared[here] = None


def _before_fork_again() -> None:
    if _is_missing(_prepared):
        _before_fork()


def _prepare(runtime: Runtime, forks: list[Fork], *, last: bool = False) -> None:
    if not forks:
        forks.append(Fork())
    try:
        prepare_late(runtime.live.ledger.depth)
        runtime.before_fork(forks[0])
    except Exception:
        if last:
            runtime.live.ledger.leave_unguarded(forks[0])
        raise


def _is_missing(threads: dict[int, None]) -> bool:
    """Return whether the first hook was skipped, so that the second must do its work."""
    return threads.pop(threading.get_ident(), ...) is ...


def _after_fork_in_parent() -> None:
    here = threading.get_ident()
    _finished.pop(here, None)
    over: list[Fork] = []
    try:
        if _current:
            to_the_end(lambda: _current[0].after_fork_in_parent(over))
    finally:
        try:
            if _current and not over:
                to_the_end(lambda: _current[0].after_fork_in_parent(over))
        finally:
            _finished[here] = None
    if _current:
        # Warned last, since a warning may be an error.
        _current[0].live.warn_of_exposed()


def _after_fork_in_parent_again() -> None:
    if _is_missing(_finished):
        _after_fork_in_parent()


def _after_fork_in_child() -> None:
    parent = _latest
    # When it is called the second time, there is a state already.
    if parent is not None and not _current:
        to_the_end(lambda: _renew(parent))


def _renew(parent: Runtime) -> None:
    global _latest
    # Done first: whatever fails below, this process must not use its parent's state.
    parent.live.current = False
    made = Runtime(parent)
    _latest = made
    _current[:] = [made]
    _retire_in_children(made)
    # For os.fork(); inherited finalizers do nothing in another process than their own.
    _finish_at_exit(None)


# Hooks run before a fork in the reverse order of registration, and after it in that order.
os.register_at_fork(after_in_parent=_hear_signals)
for _parents in (_prepared, _finished, _current):
    os.register_at_fork(after_in_child=_parents.clear)
os.register_at_fork(
    before=_before_fork_again,
    after_in_parent=_after_fork_in_parent,
)
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent_again)
renew_in_children(_after_fork_in_child)
os.register_at_fork(before=mark_fork)
os.register_at_fork(before=count_fork)
os.register_at_fork(before=_hear_signals)
