"""Arrays born shared, and what happens without the plugins that make them."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce import (
    ConfigurationError,
    NotShareableError,
    PluginError,
    ReducerError,
    install,
    is_shared,
    share,
)
from shmreduce_numpy.reducer import NumpyReducer

if TYPE_CHECKING:
    from tests.conftest import Children

MAKERS: dict[str, Any] = {
    "empty": lambda **options: shmreduce.empty((2, 3), "i4", **options),
    "zeros": lambda **options: shmreduce.zeros((2, 3), "i4", **options),
    "ones": lambda **options: shmreduce.ones((2, 3), "i4", **options),
    "full": lambda **options: shmreduce.full((2, 3), 7, "i4", **options),
    "array": lambda **options: shmreduce.array([[1, 2, 3], [4, 5, 6]], "i4", **options),
    "share": lambda **options: share(np.arange(6, dtype="i4").reshape(2, 3), **options),
}


def write_seven(array: Any) -> None:
    """Write into an array that came from the parent."""
    array[0, 0] = 77


@pytest.mark.parametrize("maker", MAKERS)
def test_writes_of_children_show(children: Children, maker: str) -> None:
    """A child writes into a shared array and the parent sees it."""
    array = MAKERS[maker]()
    children.call(write_seven, array)
    assert array[0, 0] == 77


@pytest.mark.parametrize("maker", MAKERS)
def test_made_arrays_are_shared(maker: str) -> None:
    """Every maker gives a shared array of the right shape and type, and views are shared."""
    array = MAKERS[maker]()
    assert (array.shape, array.dtype) == ((2, 3), np.dtype("i4"))
    assert is_shared(array)
    assert is_shared(array.T[1:])
    assert not is_shared(array.copy())


def test_share_leaves_its_source_alone() -> None:
    """The source stays unshared and does not see writes into the copy."""
    source = np.arange(3)
    shared = share(source)
    shared[:] = 9
    assert source.tolist() == [0, 1, 2]
    assert not is_shared(source)


@pytest.mark.parametrize("maker", MAKERS)
def test_mode_is_checked(maker: str) -> None:
    """A mode that does not exist is an error that lists those there are."""
    with pytest.raises(ConfigurationError, match="'rw', 'ro', 'cow'"):
        MAKERS[maker](mode="w")


@pytest.mark.parametrize("thing", [3, [1, 2], "text", None])
def test_things_without_a_reducer_cannot_be_shared(thing: Any) -> None:
    """``share`` says that no reducer handles the type; ``is_shared`` says no."""
    with pytest.raises(NotShareableError, match="no reducer handles the type"):
        share(thing)
    assert not is_shared(thing)


@pytest.mark.parametrize("answer", [5, "block"])
def test_a_reducer_that_finds_no_block_is_told_so(
    answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``is_shared`` names the reducer, and what it found."""
    monkeypatch.setattr(NumpyReducer, "find_block", lambda *_: answer)
    with pytest.raises(ReducerError, match=f"NumpyReducer returned {answer!r}: it must") as caught:
        is_shared(np.zeros(3))
    assert caught.value.type_name == "numpy.ndarray"


def test_a_reducer_that_shares_nothing_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """``share`` names the reducer, and does not return None."""
    monkeypatch.setattr(NumpyReducer, "share", lambda *_: None)
    with pytest.raises(ReducerError, match="NumpyReducer returned None") as caught:
        share(np.zeros(3))
    assert caught.value.type_name == "numpy.ndarray"


def test_without_a_plugin_makers_say_why() -> None:
    """With the plugin blocked the error says that it is, and how."""
    with install(blocked=("numpy",)):
        with pytest.raises(PluginError, match=r"no plugin makes arrays.*numpy is blocked"):
            shmreduce.zeros(3)
        with pytest.raises(NotShareableError, match="numpy is blocked"):
            share(np.zeros(3))
    assert is_shared(shmreduce.zeros(3))


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
import shmreduce
try:
    shmreduce.zeros(3)
except shmreduce.PluginError as error:
    print(error)
here, there = shmreduce.Pipe()
here.send(memoryview(bytes(300_000)))
print(there.recv().nbytes)
"""


def test_where_numpy_is_not_installed() -> None:
    """The error says what to install, and the rest works."""
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_NUMPY],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "install numpy" in finished.stdout, finished.stderr
    assert finished.stdout.endswith("\n300000\n"), finished.stderr
