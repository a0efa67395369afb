"""The same library at the receiver, where it is installed; a view where it is not.

The libraries are imitations: what the plugin calls of the real ones is what
these have.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
import shmreduce_cuda
from shmreduce_cuda import CudaMemoryError, CudaSharingError, sources
from shmreduce_cuda.devices import current_context, uuid_of
from shmreduce_cuda.events import stream_handle
from shmreduce_cuda.rebuild import rebuild_empty_cuda_array
from shmreduce_cuda.verify.lab import DeviceArray, Memory
from tests.cuda import actors as act
from tests.cuda.actors import Actor, actors, connect, nothing_is_out
from tests.cuda.conftest import standing_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cuda.conftest import Pair

BASE = np.arange(24, dtype="f4").reshape(4, 6)
VIEW = "shmreduce_cuda.view.CudaArrayView"


@pytest.fixture(scope="module")
def _actors(
    standin_library: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Actor]]:
    with (
        standing_in(standin_library, tmp_path_factory.mktemp("libraries") / "device") as standin,
        actors(3) as (sender, receiver, poor),
    ):
        sender.ask(find_libraries)
        receiver.ask(find_libraries)
        poor.ask(miss_libraries)
        connect(sender, receiver)
        connect(sender, poor, "poor")
        yield [sender, receiver, poor]
        assert not standin.violations()


@pytest.fixture
def libraries(_actors: list[Actor]) -> Iterator[list[Actor]]:
    """A sender and a receiver that have the libraries, and a receiver that has not."""
    yield _actors
    for actor in reversed(_actors):
        actor.ask(act.drop)
    nothing_is_out(_actors[0])


# What the actors do


def find_libraries() -> None:
    sys.path.insert(0, str(Path(__file__).parent / "mimics"))


def miss_libraries() -> None:
    """Have none of them, also where they are installed."""
    for name in ("cupy", "numba", "torch"):
        sys.modules[name] = None  # type: ignore[assignment]


def make_of(library: str, values: Any, name: str = "x") -> None:
    """Make an array of a library, upside down where that is possible."""
    source = DeviceArray.of(values)
    interface = source.__cuda_array_interface__
    shape, dtype, pointer = interface["shape"], values.dtype, interface["data"][0]
    module: Any = importlib.import_module(library)
    if library == "cupy":
        memory = module.cuda.UnownedMemory(pointer, values.nbytes, source, 0)
        last = module.cuda.MemoryPointer(memory, values.nbytes - values[0].nbytes)
        strides = (-values.strides[0], values.strides[1])
        act.arrays[name] = module.ndarray(shape, dtype, last, strides)
    elif library == "numba":
        arrays: Any = importlib.import_module("numba.cuda.cudadrv.devicearray")
        act.arrays[name] = arrays.DeviceNDArray(shape, None, dtype, pointer, source)
    else:
        kind = {2: module.bfloat16, 4: module.float32}[dtype.itemsize]
        act.arrays[name] = module.Tensor(shape, (values.shape[1], 1), kind, pointer, source)


def make_empty_of(library: str) -> None:
    module: Any = importlib.import_module(library)
    if library == "torch":
        act.arrays["x"] = module.empty((0, 3), module.bfloat16, "cuda")
    elif library == "cupy":
        act.arrays["x"] = module.empty((0, 3), "i2")
    else:
        act.arrays["x"] = importlib.import_module("numba.cuda").device_array((0, 3), "i2")


def share_x() -> None:
    act.arrays["x"] = shmreduce_cuda.share(act.arrays["x"])


def look() -> tuple[str, tuple[int, ...]]:
    cls = type(act.arrays["x"])
    return f"{cls.__module__}.{cls.__qualname__}", tuple(act.arrays["x"].shape)


def look_at_tensor(of: str = "x") -> tuple[str, bool, str, Any]:
    tensor = act.arrays[of]
    host = np.empty(tensor.shape, {2: "u2", 4: "f4"}[tensor.element_size()])
    with current_context(0) as driver:
        driver.call("cuMemcpyDtoH_v2", host.ctypes.data, tensor.data_ptr(), host.nbytes)
    return repr(tensor.dtype), tensor.requires_grad, type(tensor).__name__, host


def make_parameter() -> None:
    torch: Any = importlib.import_module("torch")
    act.arrays["x"] = torch.nn.Parameter(act.arrays["x"])


def make_tensor_of_host() -> None:
    torch: Any = importlib.import_module("torch")
    act.arrays["x"] = torch.Tensor((3,), (1,), torch.float32, 0, None, "cpu")


def owner_of_x() -> str:
    return str(act.arrays["x"].owner)


def make_managed() -> None:
    arrays: Any = importlib.import_module("numba.cuda.cudadrv.devicearray")
    memory = Memory(96, "managed")
    array = arrays.ManagedNDArray((3, 4), memory.pointer, memory)
    act.arrays["x"] = array


def send_tensors(enable: bool) -> None:
    shmreduce_cuda.send_torch_tensors(enable=enable)


def exchange(actors: list[Actor]) -> None:
    sender, receiver, poor = actors
    sender.ask(act.send, "x")
    sender.ask(act.send_to, "poor", "x")
    receiver.ask(act.receive, "x")
    poor.ask(act.receive_from, "poor", "x")


@pytest.mark.parametrize(
    ("library", "name"),
    [("cupy", "cupy.ndarray"), ("numba", "numba.cuda.cudadrv.devicearray.DeviceNDArray")],
)
def test_the_same_library_at_the_receiver(libraries: list[Actor], library: str, name: str) -> None:
    """Class, values and strides are those of the sender, where the library is
    installed; elsewhere it is a view of the same memory. So for arrays without elements.
    """
    sender, receiver, poor = libraries
    sender.ask(make_of, library, BASE)
    exchange(libraries)
    assert receiver.ask(look) == (name, (4, 6))
    assert poor.ask(look) == (VIEW, (4, 6))
    expected = BASE[::-1] if library == "cupy" else BASE
    for actor in libraries:
        assert np.array_equal(actor.ask(act.values, "x"), expected)
    for actor in libraries:
        actor.ask(act.drop)
    sender.ask(make_empty_of, library)
    exchange(libraries)
    assert receiver.ask(look) == (name, (0, 3))
    assert poor.ask(look) == (VIEW, (0, 3))


def dtype_of_x() -> Any:
    return act.arrays["x"].dtype


GAPS = np.dtype([("a", "i1"), ("b", "<f8", (2,))], align=True)


@pytest.mark.parametrize(
    ("library", "dtype"),
    [("cupy", GAPS), ("numba", GAPS), ("cupy", np.dtype("V5")), ("cupy", "bfloat16")],
)
def test_types_that_a_typestr_cannot_tell(
    libraries: list[Actor], library: str, dtype: Any
) -> None:
    """Fields arrive with their names and the gaps between them, bytes stay bytes, and
    types of ml_dtypes are what they are, though the typestr of all says bytes.
    """
    if dtype == "bfloat16":
        dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    sender, receiver, _ = libraries
    values = np.zeros((4, 6), dtype)
    values.view("u1")[...] = 7
    sender.ask(make_of, library, values)
    exchange(libraries)
    assert receiver.ask(dtype_of_x) == dtype
    poor = libraries[2].ask(act.values, "x")
    assert poor.dtype == (dtype if dtype.names else np.dtype(f"V{dtype.itemsize}"))


def test_fields_that_overlap_are_refused(libraries: list[Actor]) -> None:
    """No list of fields tells how they lie."""
    overlapping = np.dtype({"names": ["a", "b"], "formats": ["<i4", "<i2"], "offsets": [0, 2]})
    libraries[0].ask(make_of, "numba", np.zeros((2, 2), "<i4"))
    libraries[0].ask(set_dtype, overlapping)
    with pytest.raises(CudaMemoryError, match="fields that overlap"):
        libraries[0].ask(act.send, "x")


def set_dtype(dtype: Any) -> None:
    act.arrays["x"].dtype = dtype


def test_tensors_when_asked_for(libraries: list[Actor]) -> None:
    """Tensors keep dtype, gradient flag and class, in share() or after
    send_torch_tensors(); those of the host stay torch's; it can be taken back.
    """
    sender, receiver, poor = libraries
    halves = np.arange(24, dtype="u2").reshape(4, 6)
    sender.ask(make_of, "torch", halves)
    sender.ask(share_x)
    exchange(libraries)
    dtype, gradient, name, found = receiver.ask(look_at_tensor)
    assert (dtype, gradient, name) == ("torch.bfloat16", False, "Tensor")
    assert np.array_equal(found, halves)
    assert "bfloat16" in poor.ask(tell)

    sender.ask(send_tensors, True)
    sender.ask(send_tensors, True)
    sender.ask(make_of, "torch", BASE)
    sender.ask(make_parameter)
    exchange(libraries)
    dtype, gradient, name, found = receiver.ask(look_at_tensor)
    assert (dtype, gradient, name) == ("torch.float32", True, "Parameter")
    assert np.array_equal(found, BASE)

    sender.ask(make_tensor_of_host)
    sender.ask(act.send, "x")
    receiver.ask(act.receive, "x")
    assert receiver.ask(owner_of_x) == "rebuilt by torch"
    sender.ask(send_tensors, False)
    sender.ask(make_of, "torch", BASE)
    sender.ask(act.send, "x")
    receiver.ask(act.receive, "x")
    assert receiver.ask(owner_of_x) == "rebuilt by torch"


def tell() -> str:
    return repr(act.arrays["x"])


def set_on_tensor(name: str, value: Any) -> None:
    setattr(act.arrays["x"], name, value)


@pytest.mark.parametrize(("name", "value"), [("layout", "torch.sparse_coo"), ("is_nested", True)])
def test_tensors_that_are_no_single_array_stay_torchs(
    libraries: list[Actor], name: str, value: Any
) -> None:
    """Torch can send them, and they are left to it; ``share`` refuses them by name."""
    sender, receiver, _ = libraries
    sender.ask(make_of, "torch", BASE)
    sender.ask(set_on_tensor, name, value)
    with pytest.raises(CudaMemoryError, match="sparse and nested ones by their parts"):
        sender.ask(share_x)
    sender.ask(send_tensors, True)
    sender.ask(act.send, "x")
    receiver.ask(act.receive, "x")
    assert receiver.ask(owner_of_x) == "rebuilt by torch"
    sender.ask(send_tensors, False)


def swap_data() -> None:
    """Give a tensor other memory, as ``model.cpu()`` does."""
    torch: Any = importlib.import_module("torch")
    act.arrays["x"].data = torch.Tensor((3,), (1,), torch.float32, 0, None, "cpu")


@pytest.mark.parametrize("here", [False, True])
def test_a_tensor_that_gets_other_memory_after_it_was_sent(
    libraries: list[Actor], here: bool
) -> None:
    """The memory that was sent stays until the receiver has dropped it."""
    sender, receiver, _ = libraries
    sender.ask(make_of, "torch", BASE)
    sender.ask(make_parameter)
    sender.ask(send_tensors, True)
    if here:
        message = sender.ask(act.pickled, "x")
        sender.ask(swap_data)
        sender.ask(act.load, "y", message)
        *_, found = sender.ask(look_at_tensor, "y")
    else:
        sender.ask(act.send, "x")
        receiver.ask(act.receive, "x")
        sender.ask(swap_data)
        *_, found = receiver.ask(look_at_tensor)
    assert np.array_equal(found, BASE)
    sender.ask(send_tensors, False)


def make_empty_on_second_device(library: str) -> None:
    module: Any = importlib.import_module(library)
    if library == "torch":
        act.arrays["x"] = module.empty((0, 3), module.float32, "cuda:1")
    else:
        with module.cuda.Device(1):
            act.arrays["x"] = module.empty((0, 3), "f4")


def device_of_x() -> int:
    device = act.arrays["x"].device
    found: int = getattr(device, "index", getattr(device, "id", device))
    return found


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_an_empty_array_stays_on_its_device(libraries: list[Actor], library: str) -> None:
    """Though it has no memory by which the device could be found; the view, too."""
    sender, receiver, poor = libraries
    sender.ask(make_empty_on_second_device, library)
    sender.ask(share_x)
    exchange(libraries)
    assert poor.ask(look) == (VIEW, (0, 3))
    assert [actor.ask(device_of_x) for actor in (receiver, poor)] == [1, 1]
    receiver.ask(act.load, "x", poor.ask(act.pickled, "x"))
    assert (receiver.ask(look)[0], receiver.ask(device_of_x)) == (VIEW, 1)


def test_an_empty_tensor_of_a_type_that_torch_lacks_here(libraries: list[Actor]) -> None:
    """Such as a type of 8 bits that is newer than the receiver's torch: it is a view."""
    layout = ((0, 3), None, "|V1", None, "float8_e4m3fn")
    libraries[1].ask(load_empty, layout)
    assert libraries[1].ask(look) == (VIEW, (0, 3))


def load_empty_of_numba() -> list[int]:
    """Return which devices were made current for it."""
    rebuild_empty_cuda_array("numba", ((0, 3), None, "<f4"), {}, uuid_of(1))
    cuda: Any = importlib.import_module("numba.cuda")
    entered: list[int] = cuda.entered
    return entered


def test_an_empty_array_of_numba_on_a_device(libraries: list[Actor]) -> None:
    """Of a numba whose arrays say where they are."""
    assert libraries[1].ask(load_empty_of_numba)[-1] == 1


def load_empty(layout: tuple[Any, ...]) -> None:
    act.arrays["x"] = rebuild_empty_cuda_array("torch", layout, {}, None)


class Recast:
    """A received array with another interface."""

    def __init__(self, array: Any, **changes: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, **changes}


def recast(changes: dict[str, Any]) -> None:
    changes = {**changes, "data": (act.address("x") + changes.pop("start", 0), False)}
    act.arrays["s"] = shmreduce_cuda.share(Recast(act.arrays["x"], **changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "torch.Tensor"),
        ({"typestr": "<i2", "shape": (3,)}, "torch.Tensor"),
        ({"typestr": "<f8", "shape": (3,)}, VIEW),
        ({"typestr": ">f4", "shape": (3,)}, VIEW),
        ({"typestr": "|V5", "shape": (3,)}, VIEW),
        ({"typestr": "|V4", "shape": (3,)}, VIEW),
        ({"typestr": "<M8[ns]", "shape": (3,)}, VIEW),
        ({"shape": (3,), "start": 8, "strides": (-4,)}, VIEW),
        ({"shape": (3,), "strides": (6,)}, VIEW),
    ],
)
def test_a_tensor_that_passes_through_a_process_without_torch(
    libraries: list[Actor], changes: dict[str, Any], expected: str
) -> None:
    """It is a tensor again where there is torch; what torch lacks is a view there, too.

    The imitation of torch has no float64.
    """
    sender, receiver, poor = libraries
    sender.ask(make_of, "torch", BASE)
    sender.ask(share_x)
    sender.ask(act.send_to, "poor", "x")
    poor.ask(act.receive_from, "poor", "x")
    if changes:
        poor.ask(recast, {"strides": None, **changes})
    receiver.ask(act.load, "x", poor.ask(act.pickled, "s" if changes else "x"))
    assert receiver.ask(look) == (expected, changes.get("shape", BASE.shape))
    if not changes:
        dtype, *_, found = receiver.ask(look_at_tensor)
        assert dtype == "torch.float32"
        assert np.array_equal(found, BASE)


def test_managed_arrays_of_numba_are_not_copied_by_numpy(libraries: list[Actor]) -> None:
    """They are arrays of NumPy, too: they are refused all the same."""
    sender = libraries[0]
    sender.ask(make_managed)
    with pytest.raises(CudaMemoryError, match="managed memory"):
        sender.ask(act.send, "x")


def test_torch_must_have_been_imported() -> None:
    """Nothing imports torch for you."""
    if "torch" in sys.modules:
        pytest.skip("torch is imported already")
    with pytest.raises(CudaSharingError, match="import it before"):
        shmreduce_cuda.send_torch_tensors()


def test_the_plugin_imports_no_library() -> None:
    """With the plugin loaded and arrays sent, none of the libraries is imported."""
    before = {"cupy", "numba", "torch"} & set(sys.modules)
    with shmreduce.install():
        shmreduce_cuda.CudaReducer()
        assert {"cupy", "numba", "torch"} & set(sys.modules) == before


# DLPack


class OnlyDlpack:
    """An array whose DLPack capsule is made by hand."""

    def __init__(self, array: Any, kind: tuple[int, int], device: int, strided: bool) -> None:
        self.array = array
        self._device = device
        shape, strides = array.template.shape, array.template.strides
        itemsize = kind[1] // 8
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = (ctypes.c_int64 * len(shape))(*(each // itemsize for each in strides))
        self._tensor = sources._Tensor(
            array.pointer - 4, (device, 0), len(shape), (*kind, 1), self._shape,
            self._strides if strided else None, 4,
        )  # fmt: skip

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        # JAX takes -1 for a stream.
        assert stream is None
        make: Any = ctypes.pythonapi.PyCapsule_New
        make.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        make.restype = ctypes.py_object
        return make(ctypes.addressof(self._tensor), b"dltensor", None)


def share_dlpack(kind: tuple[int, int], device: int, strided: bool) -> None:
    act.arrays["s"] = shmreduce_cuda.share(OnlyDlpack(act.arrays["x"], kind, device, strided))


@pytest.mark.parametrize("strided", [False, True])
def test_arrays_that_speak_dlpack_alone(pair: Pair, strided: bool) -> None:
    """Shape, strides, type and byte offset are read from the capsule."""
    pair.sender.ask(act.make, "whole", BASE)
    pair.sender.ask(act.cut, "x", "whole", slice(1, None, 2 if strided else 1))
    pair.sender.ask(share_dlpack, (2, 32), 2, strided)
    pair.sender.ask(act.send, "s")
    pair.receiver.ask(act.receive, "x")
    expected = BASE[1 :: 2 if strided else 1]
    assert np.array_equal(pair.receiver.ask(act.values, "x"), expected)


class Deletable:
    """An array that can give its memory back while it lives, as one of JAX can.

    What holds the memory is a capsule, for which another array stands here.
    """

    def __init__(self, array: Any) -> None:
        self.array = array

    @property
    def __cuda_array_interface__(self) -> Any:
        return self.array.__cuda_array_interface__

    def __dlpack__(self) -> Any:
        if self.array.template.dtype.names:
            raise BufferError("no fields in DLPack")
        return self.array[:]


def share_deletable() -> None:
    act.arrays["x"] = Deletable(act.arrays["x"])
    act.arrays["s"] = shmreduce_cuda.share(act.arrays["x"])


def delete() -> None:
    act.arrays["x"].array = None


def test_an_array_that_is_deleted_after_it_was_sent(pair: Pair) -> None:
    """Its memory is held by DLPack: its interface alone would not keep it."""
    pair.sender.ask(act.make, "x", BASE)
    pair.sender.ask(share_deletable)
    pair.sender.ask(act.send, "s")
    pair.sender.ask(delete)
    pair.receiver.ask(act.receive, "x")
    assert np.array_equal(pair.receiver.ask(act.values, "x"), BASE)


def test_a_type_that_dlpack_does_not_have_is_read_by_the_interface(pair: Pair) -> None:
    """That there is no capsule of an array does not keep it from being sent."""
    pair.sender.ask(act.make, "x", np.ones(3, GAPS))
    pair.sender.ask(share_deletable)
    pair.sender.ask(act.send, "s")
    pair.receiver.ask(act.receive, "x")
    assert pair.receiver.ask(act.values, "x").dtype == GAPS


@pytest.mark.parametrize(
    ("kind", "device", "match"),
    [
        ((2, 32), 13, "managed memory"),
        ((2, 32), 1, "host memory"),
        ((2, 32), 10, "DLPack device 10"),
        ((3, 64), 2, "DLPack type 3"),
    ],
)
def test_dlpack_that_cannot_be_sent(
    pair: Pair, kind: tuple[int, int], device: int, match: str
) -> None:
    """Other devices, and types without a size in bytes, are refused by name."""
    pair.sender.ask(act.make, "x", BASE)
    with pytest.raises(CudaMemoryError, match=match):
        pair.sender.ask(share_dlpack, kind, device, False)


def test_bfloat16_of_dlpack(pair: Pair) -> None:
    """A type that no typestr can say travels as bytes and a name."""
    halves = np.arange(24, dtype="u2").reshape(4, 6)
    pair.sender.ask(act.make, "x", halves)
    pair.sender.ask(share_dlpack, (4, 16), 2, False)
    pair.sender.ask(act.send, "s")
    pair.receiver.ask(act.receive, "x")
    found = pair.receiver.ask(act.values, "x")
    assert found.dtype == np.dtype("V2")
    assert np.array_equal(found.view("u2"), halves)
    assert "bfloat16" in pair.receiver.ask(tell)


class Stream:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class NumbaStream(Stream):
    """The handle's value is None for the default stream; of a binding's it has none."""

    def __int__(self) -> int:
        handle = self.__dict__["handle"]
        return int(handle) if isinstance(handle, Bound) else handle.value or 0


class Bound:
    """A handle of cuda-bindings."""

    def __int__(self) -> int:
        return 7


def test_streams_of_all_libraries() -> None:
    """A handle is found in streams of CuPy, torch and numba, and by the protocol."""
    assert stream_handle(Stream(ptr=7)) == 7
    assert stream_handle(Stream(cuda_stream=7)) == 7
    assert stream_handle(NumbaStream(handle=ctypes.c_void_p(7))) == 7
    assert stream_handle(NumbaStream(handle=Bound())) == 7
    assert stream_handle(NumbaStream(handle=ctypes.c_void_p(0))) == 0
    assert stream_handle(Stream(__cuda_stream__=lambda: (0, 7))) == 7
    with pytest.raises(CudaMemoryError, match="not a stream"):
        stream_handle("stream")


def test_a_read_only_array_says_so_at_the_receiver(pair: Pair) -> None:
    """What its interface says is what the receiver's says."""
    pair.sender.ask(act.make, "x", BASE)
    pair.sender.ask(share_read_only)
    pair.sender.ask(act.send, "s")
    pair.receiver.ask(act.receive, "x")
    _, interface = pair.receiver.ask(act.describe, "x")
    assert interface["data"] is True


class ReadOnly:
    def __init__(self, array: Any) -> None:
        self.array = array
        interface = array.__cuda_array_interface__
        self.__cuda_array_interface__ = {**interface, "data": (array.pointer, True)}


def share_read_only() -> None:
    act.arrays["s"] = shmreduce_cuda.share(ReadOnly(act.arrays["x"]))
