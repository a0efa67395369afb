"""A fork while another thread imports what the first message needs."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.channels.channels import PATIENCE

if TYPE_CHECKING:
    from pathlib import Path

# The module lets the main thread fork while it is being imported. It goes on when the fork is
# over, or after a time that a fork does not need.
SLOW = """
import threading
begun, going, over = threading.Event(), threading.Event(), threading.Event()
"""
MODULE = """
import slow
slow.begun.set()
assert slow.going.wait(30)
slow.over.wait(0.5)
"""
PROGRAM = """
import importlib, os, signal, sys, threading
import slow
from shmreduce.importing import while_importing

def load():
    if sys.argv[1] == "guarded":
        while_importing(importlib.import_module, "imported")
    else:
        importlib.import_module("imported")

# Hooks before a fork run in the reverse order: this one before that of shmreduce.
os.register_at_fork(before=slow.going.set, after_in_parent=slow.over.set)
thread = threading.Thread(target=load)
thread.start()
assert slow.begun.wait(30)
pid = os.fork()
if pid == 0:
    signal.alarm(2 if sys.argv[1] == "without" else 30)
    load()
    os._exit(0)
thread.join()
sys.exit(os.waitpid(pid, 0)[1] != 0)
"""


def ends_well(folder: Path, program: str, *arguments: str) -> bool:
    (folder / "program.py").write_text(program)
    command = [sys.executable, "-W", "ignore", str(folder / "program.py"), *arguments]
    return subprocess.run(command, timeout=PATIENCE, check=False).returncode == 0


@pytest.mark.parametrize("guard", ["guarded", "without"])
def test_the_child_can_import_the_module(tmp_path: Path, guard: str) -> None:
    """The fork waits for the import; without that, the child waits for its lock for ever."""
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "imported.py").write_text(MODULE)
    assert ends_well(tmp_path, PROGRAM, guard) == (guard == "guarded")


BEGUN = """
import os, sys, threading, time

begun, importing_now, imported, forked = (threading.Event() for _ in range(4))

def let_import():
    begun.set()
    imported.wait(0.5)

# Hooks before a fork run in the reverse order: this one after that of shmreduce.
os.register_at_fork(before=let_import, after_in_parent=forked.set)
from shmreduce import importing
early = []

def note():
    early.append(not forked.is_set())

def wait_for_fork():
    importing_now.set()
    end = time.monotonic() + 30
    while not importing.forking and time.monotonic() < end:
        time.sleep(1e-3)

def load():
    if sys.argv[1] == "at the fork":
        assert begun.wait(30)
        importing.while_importing(note)
    else:
        importing.while_importing(wait_for_fork)
        note()
    imported.set()

if sys.argv[2] == "without":
    importing._wait_for_forks = lambda forks: None
thread = threading.Thread(target=load)
thread.start()
assert sys.argv[1] == "at the fork" or importing_now.wait(30)
if os.fork() == 0:
    # Nothing waits here for the thread's own fork, nor for one of the parent's.
    importing.while_importing(int)
    os._exit(0)
thread.join()
sys.exit(early != [False] or os.wait()[1] != 0)
"""


@pytest.mark.parametrize("guard", ["guarded", "without"])
@pytest.mark.parametrize("fork", ["at the fork", "waiting"])
def test_a_fork_that_has_begun_is_over_before_the_module_is_used(
    tmp_path: Path, fork: str, guard: str
) -> None:
    """It would happen without the hooks of forks that the module registers. If the fork waits
    for nothing more, it is over before the import: its child would never get the module's lock.
    """
    assert ends_well(tmp_path, BEGUN, fork, guard) == (guard == "guarded")


FIRST_USE = """
import os, threading
import numpy as np
import shmreduce

here, there = shmreduce.Pipe()
array = np.zeros(100_000)

def use():
    here.send(array)
    assert there.recv().size == array.size

importing = threading.Event()
import shmreduce.process_registry as process_registry
load = process_registry._load_plugins

def tell(settings):
    importing.set()
    return load(settings)

process_registry._load_plugins = tell
thread = threading.Thread(target=use)
thread.start()
assert importing.wait(30)
pid = os.fork()
if pid == 0:
    use()
    os._exit(0)
thread.join()
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_both_can_send_their_first_array(tmp_path: Path) -> None:
    """A thread sends the first array, which loads the plugins; the child sends one, too."""
    assert ends_well(tmp_path, FIRST_USE)


LATE = """
import os, signal, sys, threading
import shmreduce

begun, going, over = (threading.Event() for _ in range(3))
os.register_at_fork(before=going.set, after_in_parent=over.set)

class Slow:
    def find_spec(self, name, path, target=None):
        if name != slow:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self]
        [spec, *_] = filter(None, (finder.find_spec(name, path, target) for finder in finders))
        execute = spec.loader.exec_module

        def slowly(module):
            # Only now: while a module is looked for, Python does not fork.
            begun.set()
            assert going.wait(30)
            over.wait(0.5)
            execute(module)

        spec.loader.exec_module = slowly
        return spec

if sys.argv[1] == "without":
    from shmreduce import handle_calls, importing, process_registry, registry

    def unguarded(function, *arguments):
        return function(*arguments)

    for module in (importing, process_registry, registry, handle_calls):
        module.while_importing = unguarded
{prepare}
sys.meta_path.insert(0, Slow())
def use():
    {use}

thread = threading.Thread(target=use)
thread.start()
assert begun.wait(30)
pid = os.fork()
if pid == 0:
    signal.alarm(2 if sys.argv[1] == "without" else 30)
    use()
    os._exit(0)
thread.join()
sys.exit(os.waitpid(pid, 0)[1] != 0)
"""
LATE_IMPORTS = {
    "memory handlers": (
        """
import numpy as np
slow = "shmreduce_numpy.handler"
""",
        "with shmreduce.shared_allocations(): np.ones(100_000)",
    ),
    "reducer": (
        """
shmreduce.get_all_sharing_strategies()
import numpy as np
slow = "shmreduce_numpy.reduction"
""",
        "assert shmreduce.share(np.ones(100_000)).sum() == 100_000",
    ),
    "array factory": (
        """
shmreduce.get_all_sharing_strategies()
slow = "shmreduce_numpy.sharing"
""",
        "assert shmreduce.ones(100_000).sum() == 100_000",
    ),
    "what a message calls": (
        """
from shmreduce.handle_calls import around_handle, call_of
import colorsys
around = around_handle(colorsys.rgb_to_hsv, ())
slow = "colorsys"
del sys.modules[slow]
""",
        "assert call_of(*around)[0] is sys.modules[slow].rgb_to_hsv",
    ),
    "what starts a process": (
        """
# A script whose name a spawned process does not learn, so that it does not run it.
del __file__
context = shmreduce.get_context("spawn")
slow = "shmreduce.launching"
""",
        """
    process = context.Process(target=int)
    process.start()
    process.join()
    assert process.exitcode == 0
""",
    ),
    "what views need": (
        """
import ctypes
shmreduce.get_all_sharing_strategies()
from shmreduce import connection
slow = "numpy"
""",
        """
    here, there = connection.Pipe()
    here.send(memoryview((ctypes.c_short.__ctype_be__ * 3)(1, 2, 3)))
    assert there.recv().tobytes() == bytes([0, 1, 0, 2, 0, 3])
""",
    ),
}
"""What is done before the import, and what imports."""


@pytest.mark.parametrize("guard", ["guarded", "without"])
@pytest.mark.parametrize("imported", LATE_IMPORTS)
def test_both_can_use_for_the_first_time(tmp_path: Path, imported: str, guard: str) -> None:
    """What is imported late is imported while forks of other threads wait."""
    prepare, use = LATE_IMPORTS[imported]
    program = LATE.replace("{prepare}", prepare).replace("{use}", use)
    assert ends_well(tmp_path, program, guard) == (guard == "guarded")
