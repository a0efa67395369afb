"""Every parser of bytes that another process wrote: any bytes are understood or refused.

Never a crash, a hang or a look beyond the bytes. Pickles are not among them:
who may send a pickle may run code, see docs/explanation/threat-model.md.

``SHMREDUCE_FUZZ_EXAMPLES`` says how many inputs each test gets; the seed is
fixed unless it is given.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import os
import secrets
import socket
import struct
import time
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shmreduce
from shmreduce.contracts import SegmentFile
from shmreduce.errors import ConfigurationError, ShmreduceError
from shmreduce.memory import locks, runtime
from shmreduce.memory.family import Family
from shmreduce.memory.handle import MARK, Handle
from shmreduce.memory.layout import Layout, SegmentHeader
from shmreduce.memory.loading import discard_message
from shmreduce.memory.mailbox import Letter
from shmreduce.memory.mapping import PAGE_SIZE, Mapping
from shmreduce.memory.segment import Segment
from shmreduce.memory.sweep import abandoned
from shmreduce.packets import open_packet
from shmreduce.receive_buffer import ReceiveBuffer
from shmreduce.settings import settings_from_environment
from shmreduce.strategies import find_strategy
from tests.open_files import open_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_EXAMPLES = os.environ.get("SHMREDUCE_FUZZ_EXAMPLES")
FUZZ = settings(
    max_examples=int(_EXAMPLES or 60),
    deadline=None,
    derandomize=_EXAMPLES is None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
pytestmark = pytest.mark.timeout(120 if _EXAMPLES is None else 3600)

NUMBERS = st.one_of(
    st.integers(0, 600), st.sampled_from([2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1])
)
HEADER = struct.Struct("<8sII16s16s16sQQQII32sH")


@pytest.fixture(autouse=True)
def _nothing_is_left(shmreduce_no_leaks: None) -> Iterator[None]:
    """No parser keeps a descriptor, a lease or a file."""
    before = open_files()
    yield
    assert len(open_files() - before) <= _OPENED_ONCE


_OPENED_ONCE = 6
"""What stays open of the first use of shared memory in a process: the family, a segment."""


def damaged(data: st.DataObject, whole: bytes) -> bytes:
    """Draw bytes that are ``whole`` with something changed, cut off or put in."""
    result = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(result)))
        piece = data.draw(st.binary(max_size=9))
        how = data.draw(st.sampled_from(["overwrite", "cut", "insert"]))
        if how == "overwrite":
            result[place : place + len(piece)] = piece
        elif how == "cut":
            del result[place:]
        else:
            result[place:place] = piece
    return bytes(result)


# Handles


@FUZZ
@given(data=st.data(), garbage=st.binary(max_size=200))
def test_handles_in_any_bytes_are_found_or_passed_over(
    data: st.DataObject, garbage: bytes
) -> None:
    """To look for handles in bytes of any kind ends, and changes nothing of what is not named."""
    handle = Handle(
        b"t" * 16, b"b" * 16, 1, 2, 3, 4, 5, 6, True, "rw", "file_descriptor", "1:2"
    ).pack()
    discard_message(garbage + damaged(data, handle) + MARK + garbage + handle[:-1])


# Segment headers and tables


@FUZZ
@given(data=st.data())
def test_a_header_is_understood_or_refused(data: st.DataObject) -> None:
    """Whatever a header says, what is believed of it fits into the file that it names."""
    fields = [data.draw(NUMBERS) for _ in range(8)]
    located = data.draw(st.binary(max_size=20))
    raw = HEADER.pack(
        b"shmreduc",
        2,
        data.draw(st.integers(0, 3)),
        b"t" * 16,
        b"b" * 16,
        b"f" * 16,
        *fields[:3],
        *(each & 0xFFFFFFFF for each in fields[3:5]),
        data.draw(st.binary(max_size=32)),
        data.draw(st.one_of(st.just(len(located)), st.integers(0, 30), st.just(0xFFFF))),
    )
    raw += located
    if data.draw(st.booleans()):
        raw = damaged(data, raw)
    try:
        header = SegmentHeader.unpack(raw)
    except shmreduce.InvalidHandleError:
        return
    layout = Layout.of(header)
    assert layout.blocks
    assert layout.slots
    assert PAGE_SIZE < layout.data_offset <= header.size
    assert located.startswith(header.locator.encode(errors="surrogateescape"))
    assert "\0" not in header.locator


@FUZZ
@given(data=st.data(), length=st.one_of(st.integers(0, 10_000), st.just(4 * PAGE_SIZE)))
def test_a_file_is_a_segment_or_refused(data: st.DataObject, length: int) -> None:
    """A file with any header and any length is opened as the segment it is, or not at all."""
    plan = Layout.plan(8, 512)
    header = SegmentHeader(
        1, b"t" * 16, b"b" * 16, b"f" * 16, 1, 2, plan.data_offset + PAGE_SIZE, 8, 512, "any"
    )
    packed = header.pack() if data.draw(st.booleans()) else damaged(data, header.pack())
    size = data.draw(st.sampled_from([length, header.size]))
    token = data.draw(st.sampled_from([b"t" * 16, b"u" * 16, None]))
    fd = os.memfd_create("damaged", os.MFD_CLOEXEC)
    os.pwrite(fd, packed, 0)
    os.ftruncate(fd, size)
    try:
        segment = Segment.adopt(SegmentFile(fd, None), token, find_strategy("file_descriptor"))
    except (ShmreduceError, FileNotFoundError):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        return
    assert os.fstat(fd).st_size >= segment.header.size
    segment.close()


@FUZZ
@given(data=st.data())
def test_damaged_tables_are_errors(data: st.DataObject) -> None:
    """With any numbers in a segment's tables every transition ends, and nothing is mapped or
    read beyond the segment.
    """
    # Also where Hypothesis gives an example up, in the middle of it.
    with contextlib.closing(empty_segment()) as segment:
        damage_and_use(data, segment)


def damage_and_use(data: st.DataObject, segment: Any) -> None:
    for table in ("offsets", "capacities", "heads", "words", "_next", "_previous"):
        words = getattr(segment, table)
        most = 2 ** (8 * words.itemsize) - 1
        for _ in range(data.draw(st.integers(0, 3))):
            words[data.draw(st.integers(0, 7))] = data.draw(NUMBERS) & most
    slot = data.draw(st.integers(0, 7))
    segment.words[slot] = data.draw(st.sampled_from([segment.importer, 1 << 62 | 7]))
    actions: list[Callable[[], object]] = [
        lambda: segment.leases(0),
        lambda: segment.seems_held_by_dead(0, {}),
        lambda: segment.drop_dead_holders(0),
        lambda: segment.try_release(0, slot),
        lambda: segment.consume(0, 0, slot, 7),
        lambda: segment.claim(0, 0, slot, 7, shared=data.draw(st.booleans())),
        lambda: segment.add_message(0, 0, 9),
    ]
    for action in data.draw(st.permutations(actions)):
        # A link that leads nowhere is an IndexError: looked at, never followed.
        with contextlib.suppress(ShmreduceError, IndexError):
            action()
    whole = Mapping(segment.fd, segment.layout.data_offset, PAGE_SIZE)
    for private in (True, False):
        with contextlib.suppress(ShmreduceError):
            whole.cover(segment.fd, segment.offsets[0], segment.capacities[0], private=private)


def empty_segment() -> Any:
    """Return a segment of two pages of data that this process has open, as an importer."""
    plan = Layout.plan(8, 512)
    header = SegmentHeader(
        1, b"t" * 16, b"b" * 16, b"f" * 16, 1, 2, plan.data_offset + PAGE_SIZE, 8, 512, "any"
    )
    strategy = find_strategy("file_descriptor")
    file = strategy.create(header.size, "0" * 32)
    os.pwrite(file.fd, header.pack(), 0)
    return Segment.adopt(file, header.token, strategy)


@pytest.mark.parametrize(
    ("offset", "size"),
    [
        (-PAGE_SIZE, PAGE_SIZE),
        (0, PAGE_SIZE),
        (2 * PAGE_SIZE, 2 * PAGE_SIZE),
        (3 * PAGE_SIZE, PAGE_SIZE),
        (PAGE_SIZE, 2**63),
        (2**63, PAGE_SIZE),
        (PAGE_SIZE, -PAGE_SIZE),
    ],
)
def test_a_mapping_covers_its_own_addresses_only(offset: int, size: int) -> None:
    """Pages outside of a mapping are never replaced, whatever a damaged table says."""
    fd = os.memfd_create("pages", os.MFD_CLOEXEC)
    os.ftruncate(fd, 4 * PAGE_SIZE)
    mapping = Mapping(fd, PAGE_SIZE, 2 * PAGE_SIZE)
    with pytest.raises(shmreduce.SegmentError):
        mapping.cover(fd, offset, size, private=True)
    os.close(fd)


# Packets and what comes beside them


def pipe_ends() -> Iterator[int]:
    while True:
        reader, writer = os.pipe()
        yield reader
        yield writer


@FUZZ
@given(
    data=st.data(),
    kind=st.sampled_from([1, 2, 3]) | st.integers(0, 255),
    tokens=st.integers(0, 5),
    claimed=st.integers(0, 255),
    count=st.integers(0, 6),
)
def test_packets_are_understood_or_refused(
    data: st.DataObject, kind: int, tokens: int, claimed: int, count: int
) -> None:
    """A packet with any head, cut off anywhere, with too few or too many descriptors, gives its
    message or an error, and every descriptor stays its buffer's.
    """
    body = data.draw(st.sampled_from([b"", b"N.", b"not a pickle", MARK + b"damaged"]))
    if kind == 3:
        body = data.draw(st.binary(max_size=6)) + body
    packet = bytes([kind, claimed]) + b"".join(bytes([n] * 16) for n in range(tokens)) + body
    packet = packet[: data.draw(st.integers(1, len(packet)))]
    whole = data.draw(st.booleans())
    # After the last draw, at which Hypothesis may give the example up.
    ends = pipe_ends()
    descriptors = [next(ends) for _ in range(2 * ((count + 1) // 2))]
    buffer = buffer_with(packet)
    buffer.descriptors.extend(descriptors)
    with contextlib.suppress(Exception):
        arrival = open_packet(buffer, len(packet))
        if whole:
            arrival.load()
        else:
            arrival.contents()
    # As it does when nobody has it any more: none of them was closed by anybody else.
    buffer.close_descriptors()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def buffer_with(packet: bytes) -> ReceiveBuffer:
    buffer = ReceiveBuffer(len(packet))
    buffer[:] = packet
    return buffer


@pytest.mark.parametrize("packet", [b"\1", b"\1\2" + 20 * b"t", b"\7\0N.", b"\0\0"])
def test_a_packet_that_makes_no_sense_is_refused_by_name(packet: bytes) -> None:
    """It is an InvalidHandleError, not taken for the end of the connection."""
    with pytest.raises(shmreduce.InvalidHandleError):
        open_packet(buffer_with(packet), len(packet))


@FUZZ
@given(
    packet=st.one_of(
        st.just(b"\1\0N."),
        st.builds(bytes.__add__, st.just(b"\1"), st.binary(min_size=1, max_size=40)),
    ),
    count=st.integers(0, 8),
)
def test_a_connection_stays_good_whatever_came(packet: bytes, count: int) -> None:
    """After packets of any bytes, with any descriptors, the next message arrives."""
    if packet[1:2] == b"\0":
        packet = b"\1\0N."
    here, there = shmreduce.Pipe()
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=os.dup(there.fileno()))
    rights = array.array("i", [raw.fileno()] * count)
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if count else []
    raw.sendmsg([packet], control)
    there.send("next")
    with contextlib.suppress(Exception):
        here.recv()
    assert here.recv() == "next"
    for each in (here, there, raw):
        each.close()


# What a family shares


@FUZZ
@given(data=st.data(), slots=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3))
def test_letters_are_understood_or_ignored(
    data: st.DataObject, slots: list[tuple[int, int]]
) -> None:
    """Any bytes are a letter; what is not one is about no segment."""
    whole = Letter(b"t" * 16, slots, complete=True).pack(b"f" * 16)
    found = Letter.unpack(whole)
    assert (found.token, found.unread, found.complete) == (b"t" * 16, slots, True)
    for each in (damaged(data, whole), data.draw(st.binary(max_size=80))):
        assert len(Letter.unpack(each).token) == 16


def test_a_damaged_letter_hides_no_other() -> None:
    """A segment is found in the mailbox behind letters that make no sense, and nothing is
    left open.
    """
    family = Family.found(1 << 30)
    fd = os.memfd_create("posted", os.MFD_CLOEXEC)
    rights = array.array("i", [fd, fd])
    for bad in (b"x", b"y" * 37):
        family.mailbox.sender.sendmsg([bad], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    family.post(Letter(b"t" * 16, [], complete=True), fd)
    before = open_files()
    found = family.look_for(b"t" * 16)
    assert found is not None
    assert os.fstat(found).st_ino == os.fstat(fd).st_ino
    os.close(found)
    family.tidy(lambda letter, _: letter.token != b"t" * 16)
    assert not open_files() - before
    again = family.look_for(b"t" * 16)
    assert again is not None
    for number in (again, fd, family.fd, family._lock_fd):
        os.close(number)
    family.mailbox.close()


@FUZZ
@given(
    entries=st.lists(
        st.tuples(st.integers(1, 2047), NUMBERS, NUMBERS, st.booleans()), min_size=1, max_size=6
    )
)
def test_any_family_file_gives_an_answer(entries: list[tuple[int, int, int, bool]]) -> None:
    """With any numbers in the family's file its members are listed and memory can be reserved."""
    family = Family.found(1 << 30)
    for place, pid, reserved, lives in entries:
        family._pids[place] = pid
        family._reserved[place] = reserved
        if lives:
            # As if a member lived there.
            locks.try_lock(family.fd, (1 << 40) + place)
    assert (os.getpid(), 0) in family.members()
    with contextlib.suppress(shmreduce.BudgetExceededError):
        family.reserve(4096, 1 << 30)
    for number in (family.fd, family._lock_fd):
        os.close(number)
    family.mailbox.close()


def test_the_family_file_cannot_be_cut_off() -> None:
    """Nobody can shorten it under those who look at it, which would kill them (SIGBUS)."""
    fd = os.open(f"/proc/self/fd/{runtime.current().family.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


# Names and settings


@FUZZ
@given(
    locator=st.one_of(
        st.text(max_size=40),
        st.from_regex(
            r"([0-9]{1,12}:[0-9]{1,12}:)?(/dev/shm/shmreduce-[0-9]{1,9}-[0-9]-[a-z0-9]+)?"
        ),
        st.from_regex(r"[0-9]{1,25}:[0-9]{1,25}:?"),
    ),
    strategy=st.sampled_from(["file_system", "file_descriptor"]),
)
def test_locators_are_opened_or_refused(locator: str, strategy: str) -> None:
    """Any text is a locator of an open file or one of three errors, and removes nothing."""
    chosen = find_strategy(strategy)
    try:
        file = chosen.open(locator)
    except (ShmreduceError, OSError):
        return
    os.close(file.fd)


@FUZZ
@given(name=st.text(alphabet=st.characters(exclude_characters="/\0"), min_size=1, max_size=60))
def test_only_segments_can_be_unlinked(name: str) -> None:
    """A name that is not a segment's of this user is refused, whatever it is."""
    with pytest.raises(shmreduce.InvalidHandleError):
        find_strategy("file_system").unlink(f"/dev/shm/{name}")


@FUZZ
@given(
    content=st.one_of(
        st.binary(max_size=300),
        st.binary(max_size=100).map(b"shmreduc".__add__),
        st.binary(max_size=100).map(lambda start: (b"shmreduc" + start).ljust(PAGE_SIZE, b"\0")),
        st.integers(0, 300).map(bytes),
        st.integers(0, 3).map(lambda pages: bytes(pages * PAGE_SIZE)),
    ),
    mode=st.sampled_from([0o600, 0o644, 0o700]),
)
def test_sweeping_understands_any_file(tmp_path: Path, content: bytes, mode: int) -> None:
    """A file with any content is no segment. It goes once it is too old to be half made, if it
    can be that: a strategy may list a file of its user's, which stays.
    """
    path = tmp_path / f"shmreduce-{os.geteuid()}-1-{secrets.token_hex(16)}"
    path.write_bytes(content)
    path.chmod(mode)
    assert not abandoned(str(path))
    old = time.time() - 60
    os.utime(path, (old, old))
    like_a_segment = mode == 0o600 and len(content) % PAGE_SIZE == 0
    half_made = like_a_segment and (content.startswith(b"shmreduc") or not any(content))
    assert abandoned(str(path)) == half_made


VARIABLES = [
    f"SHMREDUCE_{name}"
    for name in (
        "STRATEGY",
        "INLINE_LIMIT",
        "BUDGET",
        "IDLE_SECONDS",
        "IDLE_KEEP",
        "MESSAGE_TIMEOUT",
        "ON_EXHAUSTED",
        "DISABLE_AUTOLOAD",
        "PLUGINS",
        "BLOCK",
    )
]


@FUZZ
@given(
    environment=st.dictionaries(
        st.sampled_from(VARIABLES),
        st.one_of(
            st.text(max_size=30),
            st.from_regex(r"[-+]?[0-9_]{1,5}([.][0-9]{0,3})?(e[0-9]{1,4})?[kKmMgGtT]?"),
            st.sampled_from(["inf", "-inf", "nan", "infT", "nanK", "1e999G", "K", "9" * 5000]),
        ),
    )
)
def test_settings_are_understood_or_refused(environment: dict[str, str]) -> None:
    """Any environment gives possible settings or an error that names the variable."""
    try:
        found = settings_from_environment(environment)
    except ConfigurationError as error:
        named = error.variable
    else:
        # What is understood can be given by hand, too.
        assert found.changed(**dataclasses.asdict(found)) == found
        return
    assert named in environment


# Whole messages


@FUZZ
@given(data=st.data())
def test_a_message_whose_handle_is_damaged_is_an_error(data: st.DataObject) -> None:
    """The array arrives from the whole message afterwards: nothing was given up."""
    with shmreduce.install(inline_limit=4096):
        whole = bytes(ForkingPickler.dumps(np.full(2000, 7)))
        start = whole.find(MARK) + len(MARK)
        place = data.draw(st.integers(start, start + 60))
        bad = whole[:place] + bytes([whole[place] ^ 1 << data.draw(st.integers(0, 7))])
        with pytest.raises(shmreduce.InvalidHandleError):
            ForkingPickler.loads(bad + whole[place + 1 :])
        assert ForkingPickler.loads(whole).sum() == 14_000


def test_the_tests_know_the_header() -> None:
    """The format that is fuzzed here is the one in use."""
    header = SegmentHeader(1, b"t" * 16, b"b" * 16, b"f" * 16, 1, 2, 3, 4, 5, "x", "7:8")
    fixed = HEADER.pack(b"shmreduc", 2, 1, b"t" * 16, b"b" * 16, b"f" * 16, 1, 2, 3, 4, 5, b"x", 3)
    assert header.pack() == fixed + b"7:8"


def test_a_locator_too_long_for_the_header_is_left_out() -> None:
    """Rather than cut off: then arrays that are sent on are to be had from their sender only."""
    header = SegmentHeader(1, b"t" * 16, b"b" * 16, b"f" * 16, 1, 2, 1 << 40, 4, 5, "x")
    for length in (2048, 2049):
        found = SegmentHeader.unpack(header._replace(locator="p" * length).pack())
        assert found.locator == "p" * length * (length == 2048)
