"""Descriptors that somebody else has closed, as daemons do with all that they find open."""

from __future__ import annotations

import itertools
import os
import socket
import sys
from multiprocessing import Pipe, resource_tracker
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce
from shmreduce.memory import runtime
from shmreduce.memory.inspection import process_state
from shmreduce.memory.layout import CHUNK_SLOTS
from tests.memory.waiting import PATIENCE, in_forked_child, receive, wait_for_exit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LENGTH = 300_000
HIGHEST = 4096


def close_all_but(*kept: int) -> None:
    """Close every descriptor that a daemon closes."""
    before = 3
    for number in sorted(kept):
        os.closerange(before, number)
        before = number + 1
    os.closerange(before, HIGHEST)


def take_all_numbers(path: Path) -> list[int]:
    """Open a file so often that it has every number that was closed."""
    return [os.open(path, os.O_RDWR) for _ in range(64)]


def round_trip(array: Any) -> Any:
    """Send an array to this process."""
    here, there = Pipe()
    here.send(array)
    return there.recv()


@pytest.mark.parametrize("size", [0, 100_000])
@pytest.mark.usefixtures("strategy", "shmreduce_no_leaks")
def test_a_daemon_that_closes_all_descriptors_begins_a_family(size: int, tmp_path: Path) -> None:
    """A forked child that has closed what it inherited sends and receives, and does not
    take the files that have the numbers now for the family's.
    """
    path = tmp_path / "file"
    path.write_bytes(b"x" * size)
    inherited = shmreduce.ones(LENGTH)
    round_trip(np.ones(LENGTH))

    def child() -> bool:
        close_all_but()
        files = take_all_numbers(path)
        received = round_trip(np.full(LENGTH, 3.0))
        with pytest.raises(shmreduce.AttachError, match="closed here"):
            round_trip(inherited)
        return bool(
            (received == 3).all()
            and path.read_bytes() == b"x" * size
            and all(os.fstat(each).st_size == size for each in files)
        )

    assert wait_for_exit(in_forked_child(child)) == 0


@pytest.mark.usefixtures("strategy", "shmreduce_no_leaks")
def test_memory_of_a_child_without_descriptors_is_not_reused() -> None:
    """What a forked child sees stays as it is, also if the child has closed everything."""
    (ready, is_ready), (look, may_look) = os.pipe(), os.pipe()
    arrays = [shmreduce.ones(LENGTH)]

    def child() -> bool:
        close_all_but(look, is_ready)
        os.write(is_ready, b"!")
        os.read(look, 1)
        return bool((arrays[0] == 1).all())

    pid = in_forked_child(child)
    os.read(ready, 1)
    arrays.clear()
    others = [shmreduce.full(LENGTH, 9.0) for _ in range(3)]
    os.write(may_look, b"!")
    assert wait_for_exit(pid) == 0
    for each in (ready, is_ready, look, may_look):
        os.close(each)
    del others
    assert process_state().waiting == 0


def lose_all_descriptors(path: Path) -> list[str]:
    """Close everything in a process that has arrays; return what is wrong afterwards."""
    shmreduce.install(idle_keep=0)
    received = [round_trip(np.full(LENGTH, 5.0)) for _ in range(3)]
    shared = [shmreduce.full(LENGTH, 2.0) for _ in range(3)]
    before = path.read_bytes()
    close_all_but()
    files = take_all_numbers(path)
    wrong = []
    tasks: list[Callable[[], Any]] = [
        lambda: shmreduce.ones(100 * LENGTH),
        lambda: round_trip(received[0]),
    ]
    for task in tasks:
        try:
            task()
        except shmreduce.SegmentError as error:
            wrong += [] if "os.closerange" in str(error) else [str(error)]
        else:
            wrong.append("no error")
    if wait_for_exit(in_forked_child((received[1] == 5).all)):
        wrong.append("array in a child")
    if not all((each == 5).all() for each in received):
        wrong.append("array")
    received.clear()
    shared.clear()
    process_state()
    runtime.current().leave()
    if path.read_bytes() != before:
        wrong.append("file")
    for each in files:
        os.fstat(each)
    return wrong


@pytest.mark.filterwarnings("ignore::shmreduce.ShmreduceWarning")
@pytest.mark.usefixtures("strategy")
def test_files_that_have_the_numbers_of_closed_descriptors_are_left_alone(tmp_path: Path) -> None:
    """Who closes all descriptors under arrays gets a named error where one is needed; the
    arrays keep their bytes, and files that are opened then theirs.
    """
    path, answer = tmp_path / "file", tmp_path / "answer"
    path.write_bytes(os.urandom(8 << 20))

    def child() -> bool:
        answer.write_text("; ".join(lose_all_descriptors(path)))
        return True

    status = wait_for_exit(in_forked_child(child))
    assert (status, answer.read_text()) == (0, "")


def holds_after_the_loss_of_a_number(replaced: bool) -> bool:
    """Lose one descriptor while a receiver has an array; return whether it still counts."""
    here, there = Pipe()

    def hold() -> bool:
        array = receive(there)
        there.send("here")
        receive(there)
        return bool((array == 7).all())

    with shmreduce.install():
        receiver = in_forked_child(hold)
        here.send(np.full(LENGTH, 7.0))
        receive(here)
        (segment,) = [each for heap in runtime.current().heaps for each in heap.segments]
        before = [block for block in segment.out if segment.heads[block]]
        os.close(segment.fd)
        if replaced:
            os.dup2(os.memfd_create("other"), segment.fd)
        for heap in runtime.current().heaps:
            heap.reap()
        after = [block for block in segment.out if segment.heads[block]]
        here.send("end")
    return before == after != [] and wait_for_exit(receiver) == 0


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.filterwarnings("ignore::shmreduce.ShmreduceWarning")
@pytest.mark.usefixtures("strategy")
def test_holders_live_where_it_cannot_be_asked(replaced: bool) -> None:
    """A maker whose segment's number was closed, or is another file's, keeps what others have."""
    assert wait_for_exit(in_forked_child(lambda: holds_after_the_loss_of_a_number(replaced))) == 0


def use_a_block_with_small_pages_again() -> None:
    """Send an array for whose block the kernel had no huge pages at hand."""
    array = np.ones(12 * LENGTH)
    round_trip(array)
    for segment in [each for heap in runtime.current().heaps for each in heap.segments]:
        segment.small[0] = segment.offsets[0], 0
    yield_to_others()
    round_trip(array)


def send_more_than_there_are_slots_for() -> None:
    """Send a shared array so often that its segment's lease slots must become more."""
    array, (_there, here) = shmreduce.ones(LENGTH), Pipe(duplex=False)
    here.send(array)
    yield_to_others()
    for _ in range(2 * CHUNK_SLOTS):
        ForkingPickler.dumps(array)


FILES: list[int] = []


def yield_to_others() -> None:
    """Close everything; another file gets the numbers."""
    close_all_but()
    other = os.memfd_create("other")
    FILES[:] = [os.dup(other) for _ in range(64)]


@pytest.mark.parametrize(
    "use", [use_a_block_with_small_pages_again, send_more_than_there_are_slots_for]
)
@pytest.mark.filterwarnings("ignore::shmreduce.ShmreduceWarning")
@pytest.mark.usefixtures("strategy")
def test_no_pages_are_allocated_for_another_file(use: Callable[[], None]) -> None:
    """Where a file has the number of a closed descriptor, its size stays what it is."""

    def child() -> bool:
        with shmreduce.install(), pytest.raises(shmreduce.SegmentError, match="closerange"):
            use()
        return bool(FILES) and os.fstat(FILES[0]).st_size == 0

    assert wait_for_exit(in_forked_child(child)) == 0


@pytest.mark.filterwarnings("ignore::shmreduce.ShmreduceWarning")
@pytest.mark.usefixtures("strategy")
def test_descriptors_that_are_closed_are_a_named_error_to_who_sends() -> None:
    """Sending raises a SegmentError, not the system's bare one; dropping arrays says nothing."""

    def child() -> bool:
        shmreduce.install()
        shared, received = shmreduce.ones(LENGTH), round_trip(np.ones(LENGTH))
        unraisable: list[Any] = []
        sys.unraisablehook = unraisable.append
        close_all_but()
        here, _there = Pipe()
        for _ in range(2):
            with pytest.raises(shmreduce.SegmentError, match="closerange"):
                here.send(shared)
        del shared, received
        return not unraisable

    assert wait_for_exit(in_forked_child(child)) == 0


@pytest.mark.filterwarnings("ignore::shmreduce.ShmreduceWarning")
@pytest.mark.usefixtures("strategy")
def test_messages_are_ended_or_left_without_an_error(tmp_path: Path) -> None:
    """To give messages up, or to load one about an array that is here, needs no lock then."""
    path, answer = tmp_path / "file", tmp_path / "answer"
    path.write_bytes(bytes(100))

    def child() -> bool:
        shared = shmreduce.full(LENGTH, 2.0)
        messages = [bytes(ForkingPickler.dumps(shared)) for _ in range(2)]
        close_all_but()
        take_all_numbers(path)
        again = ForkingPickler.loads(messages[0])
        with shmreduce.install(message_timeout=1e-9):
            runtime.current().give_up()
        answer.write_text(str(bool((again == 2).all())))
        return True

    status = wait_for_exit(in_forked_child(child))
    assert (status, answer.read_text()) == (0, "True")


def take_all_numbers_by_sockets() -> tuple[Any, list[int]]:
    """Open a pair of sockets, one of them so often that it has every number that was closed."""
    there, here = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    there.setblocking(False)
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    return there, [os.dup(here.fileno()) for _ in range(64)]


def leave_with_unread_messages() -> None:
    """Do what a process does at its end."""
    data = ForkingPickler.dumps(shmreduce.ones(LENGTH))
    runtime.current().leave()
    assert data


def look_for_messages_that_were_read() -> None:
    """Do what a process does that needs memory."""
    runtime.current().attachments.tidy_mailbox(at_once=True)


def start_a_child() -> None:
    """Start a child, which gets an array and sends one."""
    with shmreduce.get_context("spawn").Pool(1) as pool:
        assert pool.apply(np.add, (np.ones(LENGTH), 1.0)).sum() == 2 * LENGTH
    pool.join()


@pytest.mark.parametrize(
    "use", [leave_with_unread_messages, look_for_messages_that_were_read, start_a_child]
)
@pytest.mark.usefixtures("strategy")
def test_sockets_that_have_the_numbers_of_closed_descriptors_are_left_alone(
    use: Callable[[], None],
) -> None:
    """A process that closes its descriptors without a fork founds another family, which its
    children join; nothing is written to the sockets that it opens then, and their sizes stay.
    """

    def child() -> bool:
        shmreduce.install()
        before = runtime.current().family.identity
        # The standard library writes to its tracker, whose number it has from other tests.
        tracker = vars(resource_tracker._resource_tracker)["_fd"]
        close_all_but(*([] if tracker is None else [tracker]))
        there, sockets = take_all_numbers_by_sockets()
        use()
        with pytest.raises(BlockingIOError):
            there.recv(1)
        with socket.socket(fileno=os.dup(sockets[0])) as one:
            size = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        return runtime.current().family.identity != before and size == 1 << 15

    assert wait_for_exit(in_forked_child(child)) == 0


@pytest.mark.usefixtures("strategy")
def test_what_a_process_has_reserved_counts_in_its_next_family() -> None:
    """Its memory did not become less when it closed its descriptors."""

    def child() -> bool:
        with shmreduce.install():
            kept = shmreduce.ones(LENGTH)
            reserved = runtime.current().family.reserved
            close_all_but()
            members = runtime.current().family.members()
        return kept.all() and reserved > 0 and members == [(os.getpid(), reserved)]

    assert wait_for_exit(in_forked_child(child)) == 0


@pytest.mark.filterwarnings("ignore::shmreduce.ShmreduceWarning")
@pytest.mark.usefixtures("strategy")
def test_a_warm_block_is_not_sent_with_another_file() -> None:
    """Its segment's descriptor for messages may be another file's; the error says so."""

    def child() -> bool:
        shmreduce.install()
        here, there = shmreduce.Pipe()
        here.send(np.ones(LENGTH, np.uint8))
        there.recv()
        for heap in runtime.current().heaps:
            heap.collect()
        close_all_but(here.fileno(), there.fileno())
        take_all_numbers_by_sockets()
        with pytest.raises(shmreduce.SegmentError, match="closerange"):
            here.send(np.ones(LENGTH, np.uint8))
        return not there.poll(0)

    assert wait_for_exit(in_forked_child(child)) == 0


@pytest.mark.filterwarnings("ignore::shmreduce.ShmreduceWarning")
@pytest.mark.usefixtures("strategy")
def test_a_queue_has_its_room_back_after_a_put_that_failed() -> None:
    """However often an array could not be sent for lack of its segment's descriptors."""

    def child() -> bool:
        shmreduce.install()
        context = shmreduce.get_context("fork")
        queue, warm = context.Queue(1), shmreduce.Pipe()
        for _ in range(2):
            warm[0].send(np.ones(LENGTH, np.uint8))
            warm[1].recv()
        for heap in runtime.current().heaps:
            heap.collect()
        close_all_but(queue._reader.fileno(), queue._writer.fileno())
        take_all_numbers_by_sockets()
        for _ in range(3):
            with pytest.raises(shmreduce.SegmentError, match="closerange"):
                queue.put(np.ones(LENGTH, np.uint8), timeout=PATIENCE)
        queue.put(1, timeout=PATIENCE)
        return bool(queue.get(timeout=PATIENCE) == 1)

    assert wait_for_exit(in_forked_child(child)) == 0


@pytest.mark.usefixtures("strategy")
def test_an_interrupt_leaves_no_half_of_a_family() -> None:
    """Whenever it comes while another family is founded, the next use finds a whole one."""

    def child() -> bool:
        with shmreduce.install():
            kept = shmreduce.ones(LENGTH)
            family = runtime.current().family
            reserved, lines = family.reserved, itertools.count()

            def interrupt(frame: Any, event: str, _: Any) -> Any:
                here = frame.f_code.co_name in {"_renew", "_give_up_descriptors", "<genexpr>"}
                if here and event == "line" and next(lines) == due:
                    raise KeyboardInterrupt
                return interrupt

            for due in range(200):
                os.closerange(family.fd, family.fd + 1)
                os.closerange(family._lock_fd, family._lock_fd + 1)
                lines = itertools.count()
                sys.settrace(interrupt)
                try:
                    family.book(0)
                    family.reserve(0, 1 << 40)
                except KeyboardInterrupt:
                    pass
                else:
                    break
                finally:
                    sys.settrace(None)
                family.reserve(0, 1 << 40)
                assert family.members() == [(os.getpid(), reserved)], due
                assert family._lock_fd != -1
        return due > 10 and bool(kept.all())

    assert wait_for_exit(in_forked_child(child)) == 0
