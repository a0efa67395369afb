"""The reducer contract fails reducers that break it: one for each of its tests."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from shmreduce.testing import ReducerContract

if TYPE_CHECKING:
    import pytest

pytest_plugins = "pytester"

MODULE = '''
import shmreduce
from shmreduce import Message, Reducer, allocate, find_block, import_block
from shmreduce.testing import ReducerContract

kept = {}


class Buffer:
    """Bytes, in memory of its own or in a block."""

    def __init__(self, memory):
        self.memory = memoryview(memory)

    def __eq__(self, other):
        return self.memory == other.memory

    def __reduce__(self):
        return type(self), (bytearray(self.memory),)


def rebuild_named(handle, name):
    return globals()[name](import_block(handle).buffer)


class Good(Reducer):
    """Keeps the contract."""

    def reduce(self, obj, message):
        nbytes = obj.memory.nbytes
        block = self.find_block(obj)
        if block is not None and (block.shared or nbytes >= message.inline_limit):
            handle = message.refer(block, nbytes)
            if handle is not None:
                return self.rebuild, (type(obj), handle)
        if nbytes < message.inline_limit:
            return NotImplemented
        taken = message.allocate(nbytes)
        if taken is None:
            return NotImplemented
        memory, handle = taken
        memory[:] = obj.memory
        return self.rebuild, (type(obj), handle)

    @staticmethod
    def rebuild(cls, handle):
        return cls(import_block(handle).buffer)

    def buffer_of(self, obj, at_least):
        if obj.memory.nbytes < at_least:
            return None
        return obj.memory, rebuild_named, (type(obj).__name__,)

    def share(self, obj, mode):
        block = allocate(obj.memory.nbytes, mode)
        block.buffer[:] = obj.memory
        return type(obj)(block.buffer)

    def find_block(self, obj):
        return find_block(obj.memory)


class Contract(ReducerContract):
    kind = Buffer

    def make(self, nbytes):
        return self.kind(bytearray(index % 251 for index in range(nbytes)))

    def write(self, obj):
        obj.memory[0] ^= 255
        obj.memory[-1] ^= 255


class GoodBuffer(Buffer):
    pass


class GoodReducer(Good):
    types = (GoodBuffer,)


shmreduce.register_reducer(GoodReducer())


class TestGood(Contract):
    kind = GoodBuffer
'''

BROKEN = """

class Buffer_{rule}(Buffer):
    pass


class Reducer_{rule}(Good):
    types = (Buffer_{rule},)

{bad}


shmreduce.register_reducer(Reducer_{rule}())


class Test_{rule}(Contract):
    kind = Buffer_{rule}
"""

ALWAYS_BY_VALUE = """
    def find_block(self, obj):
        return None
"""
IGNORES_THE_MODE = """
    def share(self, obj, mode):
        return super().share(obj, "rw")
"""
FORGETS_THE_CONTENTS = """
    @staticmethod
    def rebuild(cls, handle):
        return cls(bytearray(import_block(handle).nbytes))
"""
KNOWS_THE_OBJECT = """
    def reduce(self, obj, message):
        kept[id(obj)] = obj
        return self.rebuild, (type(obj), id(obj))

    @staticmethod
    def rebuild(cls, number):
        return kept.pop(number)
"""
TAKES_A_MESSAGE_OF_ITS_OWN = """
    def reduce(self, obj, message):
        own = Message()
        reduced = super().reduce(obj, own)
        own.commit()
        return reduced
"""

BAD = {
    "test_round_trip": """
    def reduce(self, obj, message):
        return Buffer, (bytearray(obj.memory),)
    """,
    "test_round_trip_through_another_process": KNOWS_THE_OBJECT,
    "test_alone_in_a_channel": """
    def buffer_of(self, obj, at_least):
        return obj.memory, rebuild_named, ("Buffer",)
    """,
    "test_alone_in_a_channel_it_is_independent": """
    def buffer_of(self, obj, at_least):
        if self.find_block(obj) is None:
            obj = self.share(obj, "rw")
        return obj.memory, rebuild_named, (type(obj).__name__,)
    """,
    "test_large_objects_leave_the_message": """
    def reduce(self, obj, message):
        return NotImplemented
    """,
    "test_the_message_holds_the_moment_of_pickling": KNOWS_THE_OBJECT,
    "test_what_is_received_is_independent": KNOWS_THE_OBJECT,
    "test_what_is_passed_on_is_independent": """
    def reduce(self, obj, message):
        if self.find_block(obj) is None:
            obj = self.share(obj, "rw")
        return super().reduce(obj, message)
    """,
    "test_inside_containers": FORGETS_THE_CONTENTS,
    "test_what_cannot_be_pickled_leaves_nothing": TAKES_A_MESSAGE_OF_ITS_OWN,
    "test_what_cannot_be_unpickled_leaves_nothing": """
    @staticmethod
    def rebuild(cls, handle):
        kept[handle] = cls(import_block(handle).buffer)
        return kept[handle]
    """,
    "test_loaded_twice": """
    @staticmethod
    def rebuild(cls, handle):
        if handle not in kept:
            kept[handle] = import_block(handle)
        return cls(kept[handle].buffer)
    """,
    "test_pickled_twice": """
    def reduce(self, obj, message):
        if not hasattr(obj, "answer"):
            obj.answer = super().reduce(obj, message)
        return obj.answer
    """,
    "test_over_tcp": TAKES_A_MESSAGE_OF_ITS_OWN,
    "test_share_copies": """
    def share(self, obj, mode):
        return obj
    """,
    "test_shared_objects_stay_shared": """
    def reduce(self, obj, message):
        if obj.memory.nbytes < message.inline_limit:
            return NotImplemented
        return super().reduce(obj, message)
    """,
    "test_writes_to_shared_objects_show_everywhere": ALWAYS_BY_VALUE,
    "test_read_only_sharing": IGNORES_THE_MODE,
    "test_copy_on_write_sharing": IGNORES_THE_MODE,
    "test_shared_objects_over_tcp": TAKES_A_MESSAGE_OF_ITS_OWN,
}


def run(pytester: pytest.Pytester, bad: dict[str, str], *selection: str) -> pytest.RunResult:
    """Run tests of a module with the good reducer and, for each rule, a bad one."""
    module = MODULE
    for rule, body in bad.items():
        module += BROKEN.replace("{rule}", rule).replace("{bad}", body.strip("\n"))
    path = pytester.makepyfile(test_contract=module)
    chosen = [f"{path}::{each}" for each in selection]
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rAE", *chosen, timeout=100)


def test_a_good_reducer_passes(pytester: pytest.Pytester) -> None:
    """A reducer that keeps the contract passes every test of the suite."""
    outcomes = run(pytester, {}, "TestGood").parseoutcomes()
    assert set(outcomes) == {"passed"}
    assert outcomes["passed"] >= len(BAD)


def test_bad_reducers_fail(pytester: pytest.Pytester) -> None:
    """A reducer that breaks one rule fails the test of that rule."""
    result = run(pytester, BAD, *[f"Test_{rule}::{rule}" for rule in BAD])
    failed = {
        line.partition("::")[2].partition("::")[0].removeprefix("Test_")
        for line in result.outlines
        if line.startswith(("FAILED ", "ERROR "))
    }
    assert failed == set(BAD)


def test_what_notices_nothing_fails(pytester: pytest.Pytester) -> None:
    """A test class whose write() or equal() sees to nothing fails, with the reason."""
    blind = """
class TestIdle(TestGood):
    shareable = False

    def write(self, obj):
        pass


class TestBlind(TestGood):
    shareable = False

    def equal(self, first, second):
        return True
"""
    path = pytester.makepyfile(test_contract=MODULE + blind)
    rule = "test_what_is_received_is_independent"
    chosen = [f"{path}::{each}::{rule}" for each in ("TestIdle", "TestBlind", "TestGood")]
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *chosen, timeout=100)
    result.assert_outcomes(failed=2, passed=1)
    result.stdout.fnmatch_lines(["*write() changed nothing that equal() sees*"])


def test_every_rule_is_broken_once() -> None:
    """No test of the suite is without a reducer that fails it."""
    tests = {
        name
        for name, _ in inspect.getmembers(ReducerContract, inspect.isfunction)
        if name.startswith("test_")
    }
    assert tests == set(BAD)
