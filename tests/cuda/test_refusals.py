"""What cannot be sent is refused with a name and a remedy; what fails leaves nothing."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
import shmreduce_cuda
from shmreduce_cuda import (
    CudaDriverError,
    CudaForkError,
    CudaMemoryError,
    CudaMessageError,
    CudaSharingError,
    CudaUnavailableError,
    rebuild,
    runtime,
)
from shmreduce_cuda.messages import Description, Legacy, read_description
from tests.cuda import actors as act
from tests.cuda.actors import actors, connect, nothing_is_out
from tests.memory.waiting import eventually

if TYPE_CHECKING:
    from tests.cuda.conftest import Pair, Standin

BASE = np.arange(1000.0)


@pytest.mark.parametrize(
    ("kind", "named", "remedy"),
    [
        ("managed", "managed memory", "copy it"),
        ("host", "pinned memory of the host", "NumPy"),
        ("default pool", "pool that is not exportable", "handle type"),
        ("private virtual", "virtual memory that is not exportable", "expandable_segments"),
    ],
)
def test_kinds_that_cannot_be_sent(pair: Pair, kind: str, named: str, remedy: str) -> None:
    """The error names the kind of memory and the remedy, and survives its journey."""
    pair.sender.ask(act.make, "x", BASE, kind)
    with pytest.raises(CudaMemoryError) as caught:
        pair.sender.ask(act.send, "x")
    assert named in caught.value.kind
    assert remedy in caught.value.remedy
    assert remedy in str(caught.value)
    assert isinstance(caught.value, CudaSharingError)


class Masked:
    """An array that has a mask."""

    def __init__(self, array: Any) -> None:
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "mask": array}


class TooLong:
    """An array that says that it is longer than its memory."""

    def __init__(self, array: Any) -> None:
        self.memory = array
        interface = array.__cuda_array_interface__
        self.__cuda_array_interface__ = {**interface, "shape": (BASE.size + 1,)}


class Freed:
    """An array at an address where there is nothing."""

    __cuda_array_interface__ = {  # noqa: RUF012 - as libraries have it
        "version": 3,
        "shape": (3,),
        "typestr": "<f8",
        "data": (0x10000, False),
    }


def share_broken(kind: str) -> None:
    make: dict[str, Any] = {"masked": Masked, "long": TooLong, "freed": lambda _: Freed()}
    shmreduce_cuda.share(make.get(kind, lambda _: object())(act.arrays["x"]))


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("masked", "mask"),
        ("long", "reaches beyond"),
        ("freed", "CUDA does not know"),
        ("nothing", "without __cuda_array_interface__"),
    ],
)
def test_objects_that_are_no_plain_arrays(pair: Pair, kind: str, match: str) -> None:
    """A mask, an extent beyond the memory, an address of nothing, and no array at all."""
    pair.sender.ask(act.make, "x", BASE)
    with pytest.raises(CudaMemoryError, match=match):
        pair.sender.ask(share_broken, kind)


def test_an_array_over_memory_of_several_received_ones_is_refused(pair: Pair) -> None:
    """Which of the leases it would need cannot be known: the error says to copy."""
    pair.sender.ask(act.make, "x", BASE)
    pair.sender.ask(act.cut, "low", "x", slice(0, 500))
    pair.sender.ask(act.cut, "high", "x", slice(500, None))
    pair.sender.ask(act.send, "low", "high")
    pair.receiver.ask(act.receive, "low", "high")
    with pytest.raises(CudaMemoryError, match="copy it first"):
        pair.receiver.ask(share_joined)


def share_joined() -> None:
    class Joined:
        __cuda_array_interface__ = {  # noqa: RUF012 - as libraries have it
            **act.arrays["low"].__cuda_array_interface__,
            "shape": (1000,),
        }

    shmreduce_cuda.share(Joined())


def test_a_shared_array_is_not_pickled_by_anybody_else(pair: Pair) -> None:
    """Plain pickle cannot take a lease: it says so."""
    pair.sender.ask(act.make, "x", BASE)
    pair.sender.ask(act.share, "s", "x")
    with pytest.raises(CudaSharingError, match="install"):
        pair.sender.ask(pickle_plainly)


def pickle_plainly() -> None:
    pickle.dumps(act.arrays["s"])


def test_the_core_does_not_copy_a_cuda_array(pair: Pair) -> None:
    """``shmreduce.share`` would have to copy into memory of the host: it refuses."""
    pair.sender.ask(act.make, "x", BASE)
    with pytest.raises(shmreduce.NotShareableError, match=r"shmreduce_cuda\.share"):
        pair.sender.ask(share_by_core)


def share_by_core() -> None:
    shmreduce.share(act.arrays["x"])


SENDER_FAULTS = {
    "legacy": ("cuMemGetAddressRange_v2", "cuIpcGetMemHandle", "cuCtxSynchronize"),
    "pool": ("cuMemPoolExportPointer", "cuMemPoolExportToShareableHandle"),
    "virtual": ("cuMemExportToShareableHandle",),
}
RECEIVER_FAULTS = {
    "legacy": ("cuIpcOpenMemHandle_v2",),
    "pool": ("cuMemPoolImportFromShareableHandle", "cuMemPoolImportPointer"),
    "virtual": (
        "cuMemImportFromShareableHandle",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
    ),
}


@pytest.mark.parametrize("kind", SENDER_FAULTS)
def test_a_call_that_fails_at_the_sender_leaves_nothing(pair: Pair, kind: str) -> None:
    """The error has function and code; nothing is held, and the next try works."""
    pair.sender.ask(act.make, "x", BASE, kind)
    for name in SENDER_FAULTS[kind]:
        pair.sender.ask(act.fail, name, 2)
        with pytest.raises(CudaDriverError) as caught:
            pair.sender.ask(act.send, "x")
        assert (caught.value.function, caught.value.code) == (name, 2)
        assert caught.value.name == "CUDA_ERROR_OUT_OF_MEMORY"
        found = pair.sender.ask(act.stats)
        assert (found.exports, found.offers) == (0, 0)
    pair.sender.ask(act.send, "x")
    pair.receiver.ask(act.receive, "x")
    assert np.array_equal(pair.receiver.ask(act.values, "x"), BASE)


@pytest.mark.parametrize("code", [1, 400, 801])
@pytest.mark.parametrize(
    ("kind", "name"), [("legacy", "cuIpcGetMemHandle"), ("pool", "cuMemPoolExportPointer")]
)
def test_memory_that_the_driver_makes_no_handle_of(
    pair: Pair, kind: str, name: str, code: int
) -> None:
    """Such as what another library has opened here: the error names the kind, and says to copy."""
    pair.sender.ask(act.make, "x", BASE, kind)
    pair.sender.ask(act.fail, name, code)
    with pytest.raises(CudaMemoryError) as caught:
        pair.sender.ask(act.send, "x")
    assert kind in caught.value.kind
    assert "copy it" in caught.value.remedy
    found = pair.sender.ask(act.stats)
    assert (found.exports, found.offers) == (0, 0)


@pytest.mark.parametrize("kind", RECEIVER_FAULTS)
def test_a_call_that_fails_at_the_receiver_leaves_nothing(pair: Pair, kind: str) -> None:
    """The lease is given back, so that the sender frees the memory; the next try works."""
    pair.sender.ask(act.make, "x", BASE, kind, 0, 2)
    for name in RECEIVER_FAULTS[kind]:
        pair.receiver.ask(act.fail, name, 2)
        pair.sender.ask(act.send, "x")
        with pytest.raises(CudaDriverError) as caught:
            pair.receiver.ask(act.receive, "x")
        assert caught.value.function == name
        assert pair.receiver.ask(act.stats).mappings == 0
        del caught
        nothing_is_out(pair.sender)
        assert pair.receiver.ask(act.device_state)["imports"] == 0
    pair.sender.ask(act.send, "x")
    pair.receiver.ask(act.receive, "x")
    assert np.array_equal(pair.receiver.ask(act.values, "x"), BASE)


@pytest.mark.parametrize("here", [True, False])
def test_the_note_says_what_is_known_of_the_sender(pair: Pair, here: bool) -> None:
    """In another PID namespace it may be dead, for all that is known: that is the remedy."""
    pair.sender.ask(act.make, "x", BASE)
    pair.receiver.ask(act.fail, "cuIpcOpenMemHandle_v2", 1)
    pair.sender.ask(act.send, "x")
    pair.receiver.ask(shift_namespace, 0 if here else 1)
    try:
        with pytest.raises(CudaDriverError) as caught:
            pair.receiver.ask(act.receive, "x")
    finally:
        pair.receiver.ask(shift_namespace, 0 if here else -1)
    [note] = caught.value.__notes__
    assert ("is alive" in note) is here
    assert ("--pid" in note) is not here


def shift_namespace(by: int) -> None:
    runtime.current().namespace += by


def test_a_sender_is_alive_until_it_is_known_to_be_dead() -> None:
    """A receiver without descriptors left cannot look, which says nothing of the sender."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    state: Any = SimpleNamespace(namespace=0)
    sender = DESCRIPTION._replace(pid=process.pid)
    myself = DESCRIPTION._replace(pid=os.getpid())
    eventually(lambda: not rebuild._is_alive(state, sender), "a zombie is dead")
    process.wait(30)
    assert not rebuild._is_alive(state, sender)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
    try:
        alive = rebuild._is_alive(state, myself)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert alive


def test_a_device_that_fails_keeps_the_lease(standin: Standin) -> None:
    """A mapping that cannot be closed is not reported as closed: the sender keeps the
    memory until the receiver has ended.
    """
    with actors(1) as (sender,):
        with actors(1) as (receiver,):
            connect(sender, receiver)
            sender.ask(act.make, "x", BASE)
            sender.ask(act.send, "x")
            sender.ask(act.drop)
            receiver.ask(act.receive, "x")
            receiver.ask(act.fail, "cuCtxSynchronize", 700, 1_000_000)
            receiver.ask(act.drop)
            assert receiver.ask(act.stats).stuck == 1
            assert sender.ask(act.collect) == 0
            assert sender.ask(act.stats).exports == 1
        nothing_is_out(sender)
    assert standin.folder.exists()


@pytest.mark.parametrize("by", ["collect", "another"])
def test_what_could_not_be_closed_is_tried_again(pair: Pair, by: str) -> None:
    """A device that cannot be waited for now, since a graph is being recorded, can be later."""
    for name in ("x", "y"):
        pair.sender.ask(act.make, name, BASE)
    pair.sender.ask(act.send, "x", "y")
    pair.receiver.ask(act.receive, "x", "y")
    pair.receiver.ask(act.fail, "cuCtxSynchronize", 900)
    pair.receiver.ask(act.drop_only, "x")
    assert pair.receiver.ask(act.stats).stuck == 1
    if by == "collect":
        pair.receiver.ask(act.collect)
    else:
        pair.receiver.ask(act.drop, "y")
    assert pair.receiver.ask(act.stats).stuck == 0
    pair.receiver.ask(act.drop)
    nothing_is_out(pair.sender)


@pytest.mark.parametrize(
    ("kind", "name"), [("pool", "cuMemPoolDestroy"), ("virtual", "cuMemAddressFree")]
)
def test_memory_that_was_closed_by_half_is_opened_anew(
    standin: Standin, kind: str, name: str
) -> None:
    """An array that comes after a close that failed midway is not put where nothing is."""
    with actors(2) as (sender, receiver):
        connect(sender, receiver)
        sender.ask(act.make, "x", BASE, kind)
        sender.ask(act.send, "x")
        receiver.ask(act.receive, "x")
        receiver.ask(act.fail, name, 700)
        receiver.ask(act.drop)
        assert receiver.ask(act.stats).stuck == 1
        sender.ask(act.send, "x")
        receiver.ask(act.receive, "x")
        assert np.array_equal(receiver.ask(act.values, "x"), BASE)
        receiver.ask(act.drop)
        assert receiver.ask(act.stats).mappings == 0
    assert standin.folder.exists()


DESCRIPTION = Description(
    bytes(16), 1, 0, 1, bytes(16), Legacy(bytes(64)), 80, 0,
    shmreduce_cuda.layout.Layout((10,), None, "<f8"), False, "", {}, None,
)  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ((), "version None"),
        ((99, 1, 2), "version 99"),
        (DESCRIPTION.fields()[:-1], "do not fit"),
        (DESCRIPTION._replace(offset=8).fields(), "does not fit into 80"),
        (DESCRIPTION._replace(offset=-8).fields(), "does not fit into 80"),
    ],
)
def test_damaged_messages(fields: tuple[Any, ...], match: str) -> None:
    """A message of another version, one that lacks fields, and one that reaches beyond
    its memory are told from good ones.
    """
    assert read_description(DESCRIPTION.fields()) == DESCRIPTION
    with pytest.raises(CudaMessageError, match=match) as caught:
        read_description(fields)
    assert isinstance(caught.value, shmreduce.InvalidHandleError)


def use_in_forked_child(name: str) -> list[str]:
    """Return what a forked child is told that sends, and that receives."""
    reader, writer = multiprocessing.get_context("fork").Pipe(duplex=False)
    message = act.pickled(name)
    pid = os.fork()
    if not pid:
        said = []
        for attempt in (lambda: act.pickled(name), lambda: act.load("there", message)):
            try:
                attempt()
            except CudaForkError as error:
                said.append(str(error))
        writer.send(said)
        os._exit(0)
    os.waitpid(pid, 0)
    assert reader.poll(10)
    found: list[str] = reader.recv()
    return found


def test_a_forked_child_is_told_to_be_spawned(pair: Pair) -> None:
    """CUDA does not work in a child that was forked from a user of it. The parent goes
    on: what it has sent is freed.
    """
    pair.sender.ask(act.make, "x", BASE)
    said = pair.sender.ask(use_in_forked_child, "x")
    assert len(said) == 2
    assert all("spawn" in text and str(pair.sender.pid) in text for text in said)
    pair.sender.ask(act.drop, "x")
    nothing_is_out(pair.sender)


@pytest.mark.parametrize("own", [True, False])
def test_a_forked_child_cannot_send_what_was_shared_before(pair: Pair, own: bool) -> None:
    """Also on a stream, for which sending calls no driver."""
    pair.sender.ask(act.make, "x", BASE)
    pair.sender.ask(act.send, "x")
    pair.receiver.ask(act.receive, "x")
    actor = pair.sender if own else pair.receiver
    actor.ask(act.share, "s", "x", 0)
    said = actor.ask(use_in_forked_child, "s")
    assert len(said) == 2
    assert all("spawn" in text for text in said)


def test_without_a_driver_everything_else_works() -> None:
    """The plugin is loaded, says that there is no driver, and arrays of NumPy travel."""
    environment = {name: text for name, text in os.environ.items() if name != "LD_LIBRARY_PATH"}
    listed = subprocess.run(
        [sys.executable, "-m", "shmreduce", "plugins"],
        capture_output=True, text=True, timeout=60, check=True, env=environment,
    ).stdout  # fmt: skip
    examined = subprocess.run(
        [sys.executable, "-m", "shmreduce", "doctor"],
        capture_output=True, text=True, timeout=60, check=False, env=environment,
    ).stdout  # fmt: skip
    if "does not work here" not in listed:
        pytest.skip("this machine has a CUDA driver")
    assert "cuda: does not work here: CudaReducer: " in listed
    assert "CUDA" in next(line for line in examined.splitlines() if "plugin cuda" in line)
    program = (
        "import multiprocessing, numpy, shmreduce, shmreduce_cuda, sys\n"
        "shmreduce.install()\n"
        "here, there = multiprocessing.Pipe()\n"
        "here.send(numpy.ones(100_000))\n"
        "assert there.recv().sum() == 100_000\n"
        "assert 'ctypes' not in sys.modules or 'shmreduce_cuda.driver' not in sys.modules\n"
        "try:\n"
        "    shmreduce_cuda.share(type('A', (), {'__cuda_array_interface__': {'version': 3,\n"
        "        'shape': (3,), 'typestr': '<f8', 'data': (4096, False)}})())\n"
        "except shmreduce_cuda.CudaUnavailableError as error:\n"
        "    print(error)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=60, check=True, env=environment,
    ).stdout  # fmt: skip
    assert "driver" in said


def test_a_driver_without_devices_is_told(
    standin: Standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that finds no device is no driver to us; the reason is told."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with actors(1) as (sender,), pytest.raises(CudaUnavailableError, match="NO_DEVICE"):
        sender.ask(act.make, "x", BASE)
    assert standin.folder.exists()


def test_a_process_that_ends_with_arrays_out_says_so(standin: Standin) -> None:
    """What it had sent ends with it: that is a warning."""
    program = (
        "import numpy, shmreduce, shmreduce_cuda, warnings\n"
        "from multiprocessing.reduction import ForkingPickler\n"
        "from shmreduce_cuda.verify.lab import DeviceArray\n"
        "shmreduce.install()\n"
        "array = DeviceArray.of(numpy.ones(3))\n"
        "shared = shmreduce_cuda.share(array)\n"
        "message = ForkingPickler.dumps(shared)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", program],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "1 CUDA arrays" in done.stderr
    assert "ShmreduceWarning" in done.stderr
    eventually(lambda: not standin.violations(), "the end is in order")
