"""Cases that check facts about drivers which the plugin relies on.

May import the plugin, and ``lab``, ``outcomes`` and ``partner`` of this package.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import threading
from ctypes import byref, c_int, c_uint64
from typing import Any

import numpy as np

from shmreduce_cuda.devices import current_context, device_name, uuid_text, visible_uuids
from shmreduce_cuda.driver import LIBRARY, Bytes64, get_driver
from shmreduce_cuda.errors import CudaMemoryError
from shmreduce_cuda.kinds import facts_at, find_memory
from shmreduce_cuda.verify.lab import KINDS, Memory
from shmreduce_cuda.verify.outcomes import Case, Scale, expect
from shmreduce_cuda.verify.partner import partner

__all__ = ["CASES", "machine"]

_NOT_INITIALIZED, _INVALID_CONTEXT = 3, 201
_LAZY = 1
_SMALL = 4096
_open_here: list[int] = []


def machine() -> dict[str, Any]:
    """Return facts about the driver and the devices."""
    version = c_int()
    get_driver().call("cuDriverGetVersion", byref(version))
    uuids = visible_uuids()
    return {
        "driver_cuda": f"{version.value // 1000}.{version.value % 1000 // 10}",
        "devices": [
            {"ordinal": ordinal, "name": device_name(ordinal), "uuid": uuid_text(uuid)}
            for ordinal, uuid in enumerate(uuids)
        ],
    }


def _handle_of(pointer: int) -> Bytes64:
    handle = Bytes64()
    with current_context(0) as driver:
        driver.call("cuIpcGetMemHandle", byref(handle), pointer)
    return handle


def _open(handle: bytes) -> tuple[int, int]:
    """Open a handle in this process; return the driver's code, and the address."""
    pointer = c_uint64()
    with current_context(0) as driver:
        code = driver.attempt(
            "cuIpcOpenMemHandle_v2", byref(pointer), Bytes64.from_buffer_copy(handle), _LAZY
        )
    if not code:
        _open_here.append(pointer.value)
    return code, pointer.value


def _first_word(pointer: int) -> int:
    word = ctypes.c_uint32()
    with current_context(0) as driver:
        driver.call("cuMemcpyDtoH_v2", byref(word), pointer, 4)
    return word.value


def _code_of_first_word(pointer: int) -> int:
    word = ctypes.c_uint32()
    with current_context(0) as driver:
        return driver.attempt("cuMemcpyDtoH_v2", byref(word), pointer, 4)


def _close_all() -> None:
    with current_context(0) as driver:
        while _open_here:
            driver.call("cuIpcCloseMemHandle", _open_here.pop())


def _same_process(_: Scale) -> dict[str, Any]:
    memory = Memory(_SMALL)
    code, _pointer = _open(bytes(_handle_of(memory.pointer)))
    expect(code, "opening one's own handle succeeds")
    return {"code": code}


def _thread(_: Scale) -> dict[str, Any]:
    memory = Memory(_SMALL)
    codes: list[int] = []

    def ask() -> None:
        codes.append(get_driver().attempt("cuIpcGetMemHandle", byref(Bytes64()), memory.pointer))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return {"code": codes[0], "refused": codes[0] == _INVALID_CONTEXT}


def _fork(_: Scale) -> dict[str, Any]:
    get_driver()
    reader, writer = multiprocessing.get_context("fork").Pipe(duplex=False)
    pid = os.fork()
    if not pid:
        library: Any = ctypes.CDLL(LIBRARY)
        writer.send(library.cuInit(0))
        os._exit(0)
    os.waitpid(pid, 0)
    code = reader.recv()
    expect(code == _NOT_INITIALIZED, f"cuInit in a forked child says {code}")
    return {"code": code}


def _interior(_: Scale) -> dict[str, Any]:
    memory = Memory(_SMALL)
    memory.fill(7)
    inside = memory.pointer + 1024
    with current_context(0) as driver:
        driver.call("cuMemsetD32Async", inside, 9, 1, None)
        driver.call("cuStreamSynchronize", None)
    same = bytes(_handle_of(inside)) == bytes(_handle_of(memory.pointer))
    with partner() as other:
        code, pointer = other.ask(_open, bytes(_handle_of(inside)))
        expect(not code, f"opening it says {code}")
        word = other.ask(_first_word, pointer)
        other.ask(_close_all)
    expect(word == 7, f"the handle of an interior address leads to {word}, 7 is at the base")
    return {"same_handle": same}


def _kinds(_: Scale) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for kind in KINDS:
        memory = Memory(_SMALL, kind)
        driver = get_driver()
        with current_context(0):
            code = driver.attempt("cuIpcGetMemHandle", byref(Bytes64()), memory.pointer)
            try:
                facts = facts_at(driver, memory.pointer)
                found = find_memory(driver, memory.pointer, facts)
                told = found.kind
                expect(found.base == memory.pointer, f"{kind}: the base is elsewhere")
            except CudaMemoryError as error:
                told = f"refused: {error.kind}"
        figures[kind] = {"legacy_handle_code": code, "told_as": told}
        expected = {"legacy": "legacy", "pool": "pool", "virtual": "virtual"}.get(kind, "refused")
        expect(told.startswith(expected), f"{kind} memory is taken for {told}")
        expect(kind == "legacy" or code, f"{kind} memory has a legacy handle")
    return figures


def _twice(_: Scale) -> dict[str, Any]:
    memory = Memory(_SMALL)
    handle = bytes(_handle_of(memory.pointer))
    with partner() as other:
        first, pointer = other.ask(_open, handle)
        second, again = other.ask(_open, handle)
        expect(not first, f"opening it once says {first}")
        figures = {"code": second, "same_address": pointer == again}
        other.kill()
    return figures


def _neighbours(_: Scale) -> dict[str, Any]:
    first, second = Memory(_SMALL), Memory(_SMALL)
    first.fill(1)
    second.fill(2)
    with partner() as other:
        found = []
        for memory in (first, second):
            code, pointer = other.ask(_open, bytes(_handle_of(memory.pointer)))
            expect(not code, f"opening a small allocation beside another says {code}")
            found.append(other.ask(_first_word, pointer))
        other.ask(_close_all)
    expect(found == [1, 2], f"two small allocations lead to {found}")
    return {"distance": abs(second.pointer - first.pointer)}


def _freed(_: Scale) -> dict[str, Any]:
    memory = Memory(_SMALL)
    before = bytes(_handle_of(memory.pointer))
    address = memory.pointer
    memory.free()
    again = Memory(_SMALL)
    same_address = again.pointer == address
    with partner() as other:
        code, _pointer = other.ask(_open, before)
        other.kill()
    after = bytes(_handle_of(again.pointer))
    return {
        "same_address": same_address,
        "same_handle": before == after,
        "code_of_the_old_handle": code,
    }


def _make_and_export() -> bytes:
    memory = Memory(_SMALL)
    memory.fill(7)
    _kept.append(memory)
    return bytes(_handle_of(memory.pointer))


_kept: list[Memory] = []


def _owner_dies(_: Scale) -> dict[str, Any]:
    with partner() as owner:
        handle = owner.ask(_make_and_export)
        code, pointer = _open(handle)
        expect(not code, f"opening it says {code}")
        before = _first_word(pointer)
        owner.kill()
    code_after = _code_of_first_word(pointer)
    word_after = None if code_after else _first_word(pointer)
    with current_context(0) as driver:
        closing = driver.attempt("cuIpcCloseMemHandle", pointer)
    late, _pointer = _open(handle)
    expect(before == 7, f"the memory has {before}")
    expect(late, "the handle of a dead process can be opened")
    return {
        "code_of_reading_afterwards": code_after,
        "word_afterwards": word_after,
        "code_of_opening_afterwards": late,
        "code_of_closing_afterwards": closing,
    }


def _devices(_: Scale) -> dict[str, Any]:
    found = machine()
    expect(len(set(np.array([each["uuid"] for each in found["devices"]]))), "no device")
    return found


CASES = [
    Case("devices", "there is a driver, and devices have UUIDs", _devices),
    Case("same process", "a process cannot open its own handle", _same_process),
    Case("thread", "a thread without a context is refused", _thread),
    Case("fork", "a forked child of a user of CUDA cannot use it (code 3)", _fork),
    Case("interior", "the handle of an interior address leads to the base", _interior),
    Case("kinds", "kinds of memory are told apart", _kinds),
    Case("twice", "what a second opening of one handle in a process says", _twice),
    Case("neighbours", "two allocations of one 2 MiB block can be open at once", _neighbours),
    Case("freed", "what the handle of freed memory leads to", _freed),
    Case("owner dies", "the memory of a dead process cannot be opened", _owner_dies),
]
