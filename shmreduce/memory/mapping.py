"""Mappings: address ranges that show a file, by shared or private pages, switched in place.

May import :mod:`shmreduce.errors` and ``quick_blocks``.

Each range is reserved by an anonymous ``mmap`` object, which owns the addresses and unmaps
them when its last reference goes. Then ``MAP_FIXED`` covers the range with pages of the
file. Python's own file mappings would keep a duplicate of the descriptor each, and could not
be switched to private pages. A range is never closed explicitly; its references are dropped.

Large ranges are aligned for *huge pages*, with which the kernel maps 2 MiB at once. Mapping,
covering or unmapping a range of small pages takes as long as copying a good part of it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from typing import Any

from shmreduce.errors import SegmentError
from shmreduce.memory import quick_blocks

__all__ = [
    "HUGE_PAGE",
    "PAGE_SIZE",
    "Mapping",
    "huge_ceil",
    "make_root",
    "page_ceil",
    "punch_hole",
]

PAGE_SIZE = mmap.PAGESIZE
HUGE_PAGE = 2 << 20
"""Bytes of a huge page. On systems without them it is just a coarse alignment."""
_MAP_FIXED = 0x10
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
"""Numbers of Linux (mmap(2), madvise(2)) that Python's mmap module lacks."""
_AT_HAND = 2e-3
"""Seconds. A huge page at hand takes the kernel 0.3 ms, or 0.8 if it copies small pages."""
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
"""Flags of fallocate(2)."""
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
# Reserves addresses only: no memory is charged for pages that are never touched.
_RESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)

_libc = ctypes.CDLL(None, use_errno=True)
_mmap: Any = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_madvise: Any = _libc.madvise
_madvise.restype = ctypes.c_int
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_collapses = True
"""Whether it is worth asking the kernel for huge pages."""

_fallocate: Any = getattr(_libc, "fallocate", None)

_untrack: Any = ctypes.pythonapi.PyObject_GC_UnTrack
_untrack.restype = None
_untrack.argtypes = [ctypes.py_object]


def page_ceil(nbytes: int) -> int:
    """Round up to whole pages."""
    return (nbytes + PAGE_SIZE - 1) & -PAGE_SIZE


def huge_ceil(nbytes: int) -> int:
    """Round up to whole huge pages."""
    return (nbytes + HUGE_PAGE - 1) & -HUGE_PAGE


class Mapping:
    """``size`` bytes of ``fd`` from ``offset`` on, mapped at addresses of their own.

    Parameters
    ----------
    fd : int
        Open for reading and writing. It is used only in this call and in later calls of
        :meth:`cover`; the caller owns it.
    offset, size : int
        Bytes, multiples of the page size.
    private : bool
        Map copy-on-write pages instead of shared ones.

    Raises
    ------
    SegmentError
        If the kernel gives no addresses (``ENOMEM``: vm.max_map_count or RLIMIT_AS was
        reached).
    """

    __slots__ = ("address", "offset", "pages", "size")

    def __init__(self, fd: int, offset: int, size: int, *, private: bool = False) -> None:
        self._reserve(offset, size)
        self.cover(fd, offset, size, private=private)

    def _reserve(self, offset: int, size: int) -> None:
        # The kernel aligns a mapping for huge pages if its length is a multiple of theirs.
        reserved = huge_ceil(size) if size >= HUGE_PAGE else size
        try:
            self.pages = mmap.mmap(-1, reserved, flags=_RESERVE, prot=_READ_WRITE)
        except OSError as error:
            raise _refused("mmap", size, error.errno or 0) from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))
        self.offset = offset
        self.size = size

    @classmethod
    def of_memory(cls, offset: int, size: int) -> Mapping:
        """Return ``size`` bytes of ordinary memory that take the place of a file's at ``offset``.

        Raises
        ------
        SegmentError
            If the kernel gives no addresses.
        """
        made = cls.__new__(cls)
        made._reserve(offset, size)
        return made

    def cover(self, fd: int, offset: int, size: int, *, private: bool) -> None:
        """Map the file's pages of ``[offset, offset + size)`` at their place, atomically.

        If ``private``, later writes through this mapping stay in this process; pages that it
        has not written follow the file. Covering a private range again discards what was
        written there.

        Raises
        ------
        SegmentError
            If the range is not a part of this mapping: other memory would be replaced. The
            offsets come from tables that other processes can damage. Or if the kernel refuses
            private pages; the range shows the file by shared ones then.
        """
        if size <= 0 or not self.offset <= offset <= self.offset + self.size - size:
            raise SegmentError(
                f"{size} bytes at {offset} are not in the {self.size} bytes at {self.offset} "
                "that are mapped; the segment's tables are damaged",
                operation="mmap",
                errno=errno.ERANGE,
                segment=None,
            )
        where = self.address + offset - self.offset
        flags = _MAP_FIXED | (mmap.MAP_PRIVATE if private else mmap.MAP_SHARED)
        if _mmap(where, size, _READ_WRITE, flags, fd, offset) != where:
            number = ctypes.get_errno()
            if private:
                # Before Linux 6.12 the old pages are gone by now if the kernel refuses to charge
                # for private ones (vm.overcommit_memory=2). It does not charge for shared ones.
                _mmap(where, size, _READ_WRITE, _MAP_FIXED | mmap.MAP_SHARED, fd, offset)
            raise _refused("mmap", size, number)

    def is_private(self, offset: int) -> bool:
        """Return whether the pages at an offset are private; True if that cannot be found out.

        It reads the list of all mappings of this process (proc_pid_maps(5)), so it is only for
        callers that were interrupted while they covered the pages.
        """
        address = self.address + offset - self.offset
        try:
            with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
                for line in maps:
                    where, permissions, _ = line.split(maxsplit=2)
                    start, _, end = where.partition("-")
                    if int(start, 16) <= address < int(end, 16):
                        return permissions[3] == "p"
        except OSError:
            # There is no /proc, or no descriptor is free. Private pages that were taken for
            # shared ones would never be made to show the file again.
            return True
        return True

    def populate(self, offset: int, size: int) -> None:
        """Map writable pages by one call, not by a fault for each.

        This is only a hint: kernels before 5.14 refuse it, and then pages are mapped when they
        are touched.
        """
        _madvise(self.address + offset - self.offset, size, _MADV_POPULATE_WRITE)

    def make_huge(self, fd: int, offset: int, size: int, *, patience: int) -> tuple[int, int]:
        """Replace small pages, or missing ones, by huge pages.

        This asks for one huge page at a time (madvise(2), MADV_COLLAPSE, Linux 6.1), until it
        has waited for ``patience`` of them. There is no wait for a page that the kernel has at
        hand. For others the kernel must move memory or, in a virtual machine, ask the host,
        which takes twenty times as long.

        Returns
        -------
        (int, int)
            How many bytes have got huge pages, and the offset from which on huge pages are
            still possible. The caller must allocate the pages that are still missing.

        Raises
        ------
        OSError
            If there is no room for one small page in each huge page.
        """
        global _collapses
        made, end = 0, offset + size
        place = huge_ceil(offset)
        if (self.address - self.offset) % HUGE_PAGE:
            return made, end
        while _collapses and place + HUGE_PAGE <= end:
            if not patience:
                return made, place
            # The kernel makes a huge page only where there is at least one page.
            os.posix_fallocate(fd, place, PAGE_SIZE)
            began = time.monotonic()
            if _madvise(self.address + place - self.offset, HUGE_PAGE, _MADV_COLLAPSE):
                _collapses = ctypes.get_errno() != errno.EINVAL
                break
            if time.monotonic() - began > _AT_HAND:
                patience -= 1
            place += HUGE_PAGE
            made += HUGE_PAGE
        return made, end


def _refused(operation: str, size: int, number: int) -> SegmentError:
    return SegmentError(
        f"{operation} of {size} bytes refused: {os.strerror(number)}. If this is ENOMEM, raise "
        "vm.max_map_count or the address space limit (ulimit -v)",
        operation=operation,
        errno=number,
        segment=None,
    )


def punch_hole(fd: int, offset: int, size: int) -> None:
    """Free the pages of a range (fallocate(2)); if that is not possible, they stay."""
    if _fallocate is not None:
        flags = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
        _fallocate(fd, flags, ctypes.c_int64(offset), ctypes.c_int64(size))


_array_types: dict[int, Any] = {}


def make_root(pages: mmap.mmap | memoryview, offset: int, nbytes: int) -> Any:
    """Return the object to which every view of a run of ``pages`` will refer.

    It exports the run as a buffer, keeps the mapping, can be weakly referenced, and dies
    only after the last view derived from it. The garbage collector does not track it:
    otherwise, when a cycle dies, the collector would call the callbacks of weak references
    while finalizers may still use the views.
    """
    if quick_blocks.make_root is not None:
        return quick_blocks.make_root(pages, offset, nbytes)
    kind = _array_types.get(nbytes)
    if kind is None:
        if len(_array_types) > 1024:
            _array_types.clear()
        kind = _array_types[nbytes] = ctypes.c_char * nbytes
    root = kind.from_buffer(pages, offset)
    _untrack(root)
    return root
