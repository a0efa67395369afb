"""Memory stays while somebody uses it, and not longer."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmreduce_cuda
from shmreduce_cuda import CudaExpiredError, CudaProducerDied, CudaSharingError, imports, runtime
from shmreduce_cuda.devices import current_context, synchronise
from shmreduce_cuda.verify.lab import DeviceArray, Stream, read
from tests.conftest import PATIENCE
from tests.cuda import actors as act
from tests.cuda.actors import Actor, actors, connect, nothing_is_out
from tests.memory.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.cuda.conftest import Pair, Standin

KINDS = ("legacy", "pool", "virtual")
BASE = np.arange(1000.0)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_sender_drops_stays_for_the_receiver(pair: Pair, kind: str) -> None:
    """The memory is freed when the receiver drops its array, and not before."""
    pair.sender.ask(act.make, "x", BASE, kind)
    pair.sender.ask(act.send, "x")
    pair.sender.ask(act.drop, "x")
    pair.receiver.ask(act.receive, "x")
    assert pair.sender.ask(act.collect) == 0
    assert np.array_equal(pair.receiver.ask(act.values, "x"), BASE)
    assert pair.sender.ask(act.device_state)["bytes"] > 0
    pair.receiver.ask(act.drop, "x")
    eventually(
        lambda: pair.sender.ask(act.device_state)["bytes"] == 0, "the sender frees the memory"
    )


def test_a_message_that_is_not_read_keeps_the_memory(pair: Pair) -> None:
    """The sender may drop the array as soon as it has put it into a message."""
    pair.sender.ask(act.make, "x", BASE)
    pair.sender.ask(act.send, "x")
    pair.sender.ask(act.drop, "x")
    assert pair.sender.ask(act.collect) == 0
    pair.receiver.ask(act.receive, "x")
    assert np.array_equal(pair.receiver.ask(act.values, "x"), BASE)


def test_a_message_that_cannot_be_pickled_keeps_nothing(pair: Pair) -> None:
    """An array beside something that cannot be pickled is let go of."""
    pair.sender.ask(act.make, "x", BASE)
    pair.sender.ask(act.pickle_in_vain, "x")
    nothing_is_out(pair.sender)


def test_one_message_for_several(pair: Pair) -> None:
    """A message that is loaded again while somebody has the array gives it again; when
    nobody has it any more, the loader is told.
    """
    pair.sender.ask(act.make, "x", BASE)
    message = pair.sender.ask(act.pickled, "x")
    for name in ("a", "b"):
        pair.receiver.ask(act.load, name, message)
    pair.sender.ask(act.load, "own", message)
    pair.receiver.ask(act.drop, "a")
    assert pair.sender.ask(act.collect) == 0
    assert np.array_equal(pair.receiver.ask(act.values, "b"), BASE)
    pair.receiver.ask(act.drop, "b")
    nothing_is_out(pair.sender)
    for actor in (pair.receiver, pair.sender):
        with pytest.raises(CudaExpiredError, match="share"):
            actor.ask(act.load, "late", message)


def test_what_share_returns_keeps_messages_valid(pair: Pair) -> None:
    """While it is kept, its messages can be loaded whenever; afterwards no more."""
    pair.sender.ask(act.make, "x", BASE)
    pair.sender.ask(act.share, "s", "x")
    message = pair.sender.ask(act.pickled, "s")
    for _ in range(3):
        pair.receiver.ask(act.load, "a", message)
        assert np.array_equal(pair.receiver.ask(act.values, "a"), BASE)
        pair.receiver.ask(act.drop, "a")
        assert pair.sender.ask(act.collect) == 0
    pair.sender.ask(act.drop, "s")
    nothing_is_out(pair.sender)
    with pytest.raises(CudaExpiredError):
        pair.receiver.ask(act.load, "a", message)


@pytest.mark.parametrize("kind", KINDS)
def test_the_mapping_is_closed_before_the_lease_ends(pair: Pair, kind: str) -> None:
    """However long the receiver takes to close its mapping, the sender does not free
    the memory before; what was asked of the device is waited for first.
    """
    pair.sender.ask(act.make, "x", BASE, kind)
    pair.sender.ask(act.send, "x")
    pair.sender.ask(act.drop, "x")
    pair.receiver.ask(act.receive, "x")
    start = len(pair.standin.log())
    pair.receiver.ask(act.set_delays, 200, 600)
    pair.receiver.ask(act.fill_and_drop, "x", 5)
    pair.receiver.ask(act.set_delays)
    nothing_is_out(pair.sender)
    calls = pair.standin.calls(pair.receiver.pid, start)
    close = {"legacy": "cuIpcCloseMemHandle", "pool": "cuMemFree_v2"}.get(kind, "cuMemUnmap")
    assert calls.index("cuCtxSynchronize") < calls.index(close)


def send_all_kinds(sender: Actor) -> list[str]:
    """Send one array of each kind, and drop them; return their names."""
    for kind in KINDS:
        sender.ask(act.make, kind, BASE, kind)
    sender.ask(act.send, *KINDS)
    sender.ask(act.drop)
    return list(KINDS)


def test_what_a_killed_receiver_held_is_freed(standin: Standin) -> None:
    """The memory of arrays that a killed process had comes back by itself."""
    with actors(1) as (sender,):
        with actors(1) as (receiver,):
            connect(sender, receiver)
            names = send_all_kinds(sender)
            receiver.ask(act.receive, *names)
            assert sender.ask(act.collect) == 0
            receiver.kill()
            nothing_is_out(sender)
        assert sender.ask(act.device_state)["bytes"] == 0
    assert standin.folder.exists()


def test_a_sender_that_was_killed_is_named(standin: Standin) -> None:
    """Before an array was received that is an error with its pid; afterwards the
    receiver can drop the array, and go on.
    """
    with actors(1) as (receiver,):
        with actors(1) as (sender,):
            connect(sender, receiver)
            for kind in KINDS:
                sender.ask(act.make, kind, BASE, kind)
            messages = [sender.ask(act.pickled, kind) for kind in KINDS]
            sender.ask(act.send, *KINDS)
            receiver.ask(act.receive, *KINDS)
            sender.kill()
            # Also when nothing of the sender is open here any more.
            for message in messages:
                with pytest.raises(CudaProducerDied) as caught:
                    receiver.ask(act.load, "y", message)
                assert caught.value.pid == sender.pid
            receiver.ask(act.drop)
            for message in messages:
                with pytest.raises(CudaProducerDied):
                    receiver.ask(act.load, "y", message)
        assert receiver.ask(act.stats).mappings == 0
        with actors(1) as (sender,):
            connect(sender, receiver)
            names = send_all_kinds(sender)
            receiver.ask(act.receive, *names)
            assert np.array_equal(receiver.ask(act.values, "virtual"), BASE)
            receiver.ask(act.drop)
    assert standin.folder.exists()


def test_a_received_array_outlives_the_process_that_forwarded_it(standin: Standin) -> None:
    """An array that is sent on is opened at its origin: who forwarded it may end."""
    with actors(2) as (origin, third):
        with actors(1) as (middle,):
            connect(origin, middle)
            connect(middle, third, "third")
            origin.ask(act.make, "x", BASE)
            origin.ask(act.send, "x")
            origin.ask(act.drop, "x")
            middle.ask(act.receive, "x")
            middle.ask(act.send_to, "third", "x")
            middle.ask(act.drop, "x")
            assert origin.ask(act.collect) == 0
            third.ask(act.receive_from, "third", "x")
            middle.kill()
        assert origin.ask(act.collect) == 0
        assert np.array_equal(third.ask(act.values, "x"), BASE)
        third.ask(act.drop)
        nothing_is_out(origin)
        assert origin.ask(act.device_state)["bytes"] == 0
    assert standin.folder.exists()


def fill_and_share(name: str, source: str, value: int) -> None:
    """Share a received array on a stream that is still to write it."""
    stream = Stream(0)
    with current_context(0) as driver:
        driver.call("cuMemsetD32Async", act.address(source), value, 2 * BASE.size, stream.handle)
    act.arrays[name] = shmreduce_cuda.share(act.arrays[source], stream.handle.value)


def bring_to_the_middle(origin: Actor, middle: Actor, third: Actor) -> None:
    """Send an array from the first to the second of three, which can send it on."""
    connect(origin, middle)
    connect(middle, third, "third")
    origin.ask(act.make, "x", BASE)
    origin.ask(act.send, "x")
    middle.ask(act.receive, "x")


def test_an_array_that_was_forwarded_on_a_stream_needs_no_event(standin: Standin) -> None:
    """An event would be the forwarder's, and go with it: the stream is waited for."""
    with actors(2) as (origin, third):
        with actors(1) as (middle,):
            bring_to_the_middle(origin, middle, third)
            middle.ask(act.set_delays, 100)
            middle.ask(fill_and_share, "s", "x", 5)
            middle.ask(act.send_to, "third", "s")
        third.ask(act.receive_from, "third", "x")
        assert set(third.ask(act.values, "x").view("i4")) == {5}
        third.ask(act.drop)
        origin.ask(act.drop)
        nothing_is_out(origin)
    assert standin.folder.exists()


def test_a_forwarder_may_be_killed_before_its_message_is_read(standin: Standin) -> None:
    """The memory is the origin's, which lives: so the receiver has the array."""
    with actors(2) as (origin, third):
        with actors(1) as (middle,):
            bring_to_the_middle(origin, middle, third)
            middle.ask(act.send_to, "third", "x")
            middle.kill()
        third.ask(act.receive_from, "third", "x")
        assert (third.ask(act.values, "x") == BASE).all()
        third.ask(act.drop)
        origin.ask(act.drop)
        nothing_is_out(origin)
    assert standin.folder.exists()


def load_in_threads(messages: list[bytes]) -> list[str]:
    """Load messages, each in a thread of its own, all at once; return the errors."""
    ready = threading.Barrier(len(messages))
    errors: list[str] = []

    def load(number: int, message: bytes) -> None:
        ready.wait(30)
        try:
            act.load(f"thread{number}", message)
        except CudaSharingError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=load, args=each) for each in enumerate(messages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return errors


def test_threads_that_receive_at_once_open_one_mapping(pair: Pair) -> None:
    """However many threads load messages of one allocation at once, it is opened once."""
    pair.sender.ask(act.make, "x", BASE)
    for _ in range(5):
        before = pair.receiver.ask(act.stats).opened
        messages = [pair.sender.ask(act.pickled, "x") for _ in range(8)]
        assert pair.receiver.ask(load_in_threads, messages) == []
        assert pair.receiver.ask(act.stats).opened == before + 1
        pair.receiver.ask(act.drop)


def drop_while_opening(name: str) -> tuple[int, int]:
    """Drop an array at a moment at which this thread is opening another one."""
    imports = runtime.current().imports
    imports._enter()
    act.drop_only(name)
    during = imports.arrays
    imports._leave()
    return during, imports.arrays


def test_an_array_that_dies_while_another_is_opened(pair: Pair) -> None:
    """The garbage collector may end an array in the middle of opening another one: its
    end is seen to when that is done, and nobody waits for himself.
    """
    pair.sender.ask(act.make, "x", BASE)
    pair.sender.ask(act.send, "x")
    pair.receiver.ask(act.receive, "x")
    assert pair.receiver.ask(drop_while_opening, "x") == (1, 0)


def keep_idle_for(seconds: float) -> None:
    """Let idle mappings be kept for another time in this process."""
    imports.Imports.close_idle.__defaults__ = (seconds,)


@pytest.fixture
def patient(pair: Pair) -> Iterator[Pair]:
    """A pair whose receiver keeps idle mappings until it is asked to collect."""
    pair.receiver.ask(keep_idle_for, 600.0)
    yield pair
    pair.receiver.ask(keep_idle_for, imports._IDLE_SECONDS)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_is_sent_again_is_not_opened_again(patient: Pair, kind: str) -> None:
    """It stays open for a while after its last array was dropped. The arrays that come
    meanwhile use it, with leases of their own.
    """
    sender, receiver = patient.sender, patient.receiver
    sender.ask(act.make, "x", BASE, kind)
    before = receiver.ask(act.stats).opened
    for number in range(3):
        sender.ask(act.set_values, "x", BASE + number)
        sender.ask(act.send, "x")
        receiver.ask(act.receive, "x")
        assert np.array_equal(receiver.ask(act.values, "x"), BASE + number)
        receiver.ask(act.drop_only)
    found = receiver.ask(act.stats)
    assert (found.opened, found.mappings, found.arrays) == (before + 1, 1, 0)
    # Only the last one's lease is left.
    eventually(lambda: sender.ask(act.stats).exports == 1, "the leases before it ended")


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_is_open_but_not_used_is_not_freed(patient: Pair, kind: str) -> None:
    """The sender frees it when the receiver has closed it, and not before."""
    sender, receiver = patient.sender, patient.receiver
    sender.ask(act.make, "x", BASE, kind)
    sender.ask(act.send, "x")
    sender.ask(act.drop)
    receiver.ask(act.receive, "x")
    receiver.ask(act.drop_only)
    assert sender.ask(act.collect) == 0
    assert sender.ask(act.device_state)["bytes"] > 0
    receiver.ask(act.collect)
    eventually(lambda: sender.ask(act.device_state)["bytes"] == 0, "the sender frees the memory")


def test_a_receiver_that_waits_closes_what_it_does_not_use(pair: Pair) -> None:
    """A moment later, without a call of the program."""
    pair.sender.ask(act.make, "x", BASE)
    pair.sender.ask(act.send, "x")
    pair.sender.ask(act.drop)
    pair.receiver.ask(act.receive, "x")
    pair.receiver.ask(act.drop_only)
    nothing_is_out(pair.sender)
    assert pair.receiver.ask(act.stats).mappings == 0


def test_only_so_many_mappings_are_kept(patient: Pair) -> None:
    """The one that has been idle for longest is closed then."""
    names = [f"x{number}" for number in range(imports._MOST_IDLE + 6)]
    for name in names:
        patient.sender.ask(act.make, name, BASE)
        patient.sender.ask(act.send, name)
    patient.receiver.ask(act.receive, *names)
    patient.receiver.ask(act.drop_only)
    assert patient.receiver.ask(act.stats).mappings == imports._MOST_IDLE
    # The last ones are open still.
    before = patient.receiver.ask(act.stats).opened
    for name, opened in ((names[-1], 0), (names[0], 1)):
        patient.sender.ask(act.send, name)
        patient.receiver.ask(act.receive, name)
        assert patient.receiver.ask(act.stats).opened == before + opened


def keep_idle_bytes(most: int) -> None:
    """Let idle mappings have another number of bytes in this process."""
    imports._MOST_IDLE_BYTES = most


def test_only_so_many_bytes_are_kept(patient: Pair) -> None:
    """All but the last are closed if they have too many; the last one is always kept."""
    names = ["x", "y", "z"]
    for name in names:
        patient.sender.ask(act.make, name, BASE)
    for most, mappings in ((2 * BASE.nbytes + 1, 2), (BASE.nbytes - 1, 1)):
        patient.receiver.ask(keep_idle_bytes, most)
        patient.sender.ask(act.send, *names)
        patient.receiver.ask(act.receive, *names)
        patient.receiver.ask(act.drop_only)
        assert patient.receiver.ask(act.stats).mappings == mappings
    patient.receiver.ask(keep_idle_bytes, imports._MOST_IDLE_BYTES)


def stop_thread() -> None:
    assert runtime.current().keeper.stop()


def test_without_a_thread_mappings_are_closed_at_once(patient: Pair) -> None:
    """As during a fork, for which the thread is ended, or where no thread can be started."""
    patient.sender.ask(act.make, "x", BASE)
    patient.sender.ask(act.send, "x")
    patient.receiver.ask(act.receive, "x")
    patient.receiver.ask(stop_thread)
    patient.receiver.ask(act.drop_only)
    assert patient.receiver.ask(act.stats).mappings == 0


def without_threads(call: Callable[[], Any]) -> None:
    """Call something while no thread can be started, and none of ours runs."""

    def refuse(_: Any) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    runtime.current().keeper.stop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        call()


def send_x_without_threads() -> None:
    without_threads(lambda: act.send("x"))


def receive_x_without_threads() -> None:
    without_threads(lambda: act.receive("x"))


def test_where_no_thread_can_be_started_arrays_travel(pair: Pair) -> None:
    """As in the feeder of a queue at the end of the program, since CPython 3.12."""
    pair.sender.ask(act.make, "x", BASE)
    pair.sender.ask(send_x_without_threads)
    pair.sender.ask(act.drop, "x")
    pair.receiver.ask(receive_x_without_threads)
    assert np.array_equal(pair.receiver.ask(act.values, "x"), BASE)
    pair.receiver.ask(act.drop)
    assert pair.sender.ask(act.collect) == 1


def collect_while_another_has_the_lock() -> int:
    """Return how many mappings are open afterwards."""
    state = runtime.current().imports
    collecting = threading.Thread(target=act.collect)
    with state._lock:
        collecting.start()
        # Time to go by without closing anything.
        collecting.join(0.2)
    collecting.join(PATIENCE)
    return state.mappings


def test_who_collects_waits_for_who_opens_or_closes(patient: Pair) -> None:
    """What nobody uses is closed when ``collect()`` returns, whatever other threads do."""
    patient.sender.ask(act.make, "x", BASE)
    patient.sender.ask(act.send, "x")
    patient.receiver.ask(act.receive, "x")
    patient.receiver.ask(act.drop_only)
    assert patient.receiver.ask(act.stats).mappings == 1
    assert patient.receiver.ask(collect_while_another_has_the_lock) == 0


def drop_while_the_thread_closes(idle: str, dropped: str) -> list[str]:
    """Return the names of the threads that wait for the devices for what is dropped."""
    waiting: list[str] = []

    def note(ordinal: int) -> None:
        waiting.append(threading.current_thread().name)
        synchronise(ordinal)

    state = runtime.current().imports
    closing = threading.Event()
    close = state._opener.close

    def close_slowly(mapping: Any) -> None:
        closing.set()
        close(mapping)

    with pytest.MonkeyPatch.context() as patch:
        # Before the thread can close anything.
        patch.setattr(state._opener, "close", close_slowly)
        act.drop_only(idle)
        patch.setattr(imports, "synchronise", note)
        # However busy the machine is.
        patch.setattr(imports, "_QUICK", PATIENCE)
        assert closing.wait(30)
        act.drop_only(dropped)
    return waiting


def test_who_drops_an_array_waits_for_the_devices_himself(pair: Pair) -> None:
    """Also at a moment when the thread is closing another one's memory: a graph that this
    thread captures next must not be disturbed by the other's waiting.
    """
    for name in ("x", "y"):
        pair.sender.ask(act.make, name, BASE)
        pair.sender.ask(act.send, name)
    pair.receiver.ask(act.receive, "x", "y")
    pair.receiver.ask(act.set_delays, 0, 20)
    waiting = pair.receiver.ask(drop_while_the_thread_closes, "x", "y")
    pair.receiver.ask(act.set_delays)
    assert waiting == ["MainThread"]


def send_many(count: int) -> None:
    for number in range(count):
        act.connections["other"].send(DeviceArray.of(np.full(8, number)))


def receive_many(count: int) -> bool:
    """Receive arrays, some of which are kept for a while; return whether all were right."""
    right = True
    recent = []
    for number in range(count):
        array = act.connections["other"].recv()
        right = right and read(array)[3] == number
        recent.append(array)
        if len(recent) > number % 7:
            recent.clear()
    return right


def blocks_of(actor: Actor) -> int:
    """Return how many blocks an actor has views of."""
    arrays: int = actor.ask(act.census)[1][0]
    return arrays


def test_many_sends_leave_nothing(pair: Pair) -> None:
    """After hundreds of sends there are no more descriptors, leases, mappings, and no
    more shared or device memory, than before.
    """
    sends = 400
    found = []
    for _ in range(2):
        pair.sender.start(send_many, sends)
        assert pair.receiver.ask(receive_many, sends)
        pair.sender.finish()
        nothing_is_out(pair.sender)
        # Who lets go of many has them until it is through with all.
        eventually(lambda: blocks_of(pair.sender) == 0, "the last thread has let go")
        found.append([actor.ask(act.census) for actor in (pair.sender, pair.receiver)])
    assert found[0] == found[1]
