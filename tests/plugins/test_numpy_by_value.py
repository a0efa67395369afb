"""Arrays by value: as with ordinary pickling, but through shared memory."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shmreduce
from shmreduce_numpy import rebuild
from tests.plugins.messages import loads, message_of, round_trip
from tests.plugins.numpy_samples import arrays, views, written_back_to

if TYPE_CHECKING:
    from collections.abc import Iterator

Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.usefixtures("installed")


@pytest.fixture(params=[0, None], ids=["everything in blocks", "default limit"])
def installed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Install with small arrays in shared memory too, and as usual."""
    options = {} if request.param is None else {"inline_limit": request.param}
    with shmreduce.install(**options):
        yield


PROPERTY = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def assert_as_pickled(received: Array, original: Array) -> None:
    """Compare with what ordinary pickling makes of the original, bit by bit."""
    pickled = pickle.loads(pickle.dumps(original, 4))
    assert type(received) is type(pickled)
    assert received.shape == pickled.shape
    assert received.flags.c_contiguous == pickled.flags.c_contiguous
    assert received.flags.f_contiguous == pickled.flags.f_contiguous
    # Here it is better: ordinary pickling up to protocol 4 forgets these.
    assert received.dtype == original.dtype
    assert received.dtype.isalignedstruct == original.dtype.isalignedstruct
    assert received.flags.writeable == original.flags.writeable
    assert received.tobytes() == original.tobytes()


@PROPERTY
@given(st.data())
def test_any_array_arrives_as_if_pickled(data: st.DataObject) -> None:
    """Every dtype and layout arrives with the same bits, order and class."""
    original = data.draw(views(data.draw(arrays())))
    assert_as_pickled(round_trip(original), original)


@PROPERTY
@given(st.data())
def test_any_array_can_be_passed_on(data: st.DataObject) -> None:
    """What was received is sent on as if it had been made here."""
    received = round_trip(data.draw(arrays()))
    view = data.draw(views(received))
    assert_as_pickled(round_trip(view), view)


@pytest.mark.parametrize("count", [4, 100_000])
def test_messages_are_snapshots(count: int) -> None:
    """What is written after pickling does not show, however often the array is sent."""
    buffer = np.zeros(count)
    messages = []
    for number in range(5):
        buffer[:] = number
        messages.append(message_of(buffer))
    received = [loads(message) for message in messages]
    assert [array[0] for array in received] == [0, 1, 2, 3, 4]
    assert [array[-1] for array in received] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("count", [4, 100_000, 2_000_000])
def test_a_received_array_is_its_receivers(count: int) -> None:
    """Received, changed, sent on, changed again: each copy is independent."""
    first = np.arange(count, dtype=float)
    second = round_trip(first)
    second += 1
    message = message_of(second)
    second += 1
    third = loads(message)
    third[0] = -1
    assert (first[0], second[0], third[0]) == (0, 2, -1)
    assert (first[-1], second[-1], third[-1]) == (count - 1, count + 1, count)


def test_views_of_one_array_arrive_independent() -> None:
    """Two by-value views do not share memory at the receiver, as with pickling."""
    base = round_trip(np.arange(200_000.0))
    first, second = round_trip([base, base[:100_000]])
    first[0] = -1
    assert second[0] == 0


def test_one_received_array_sent_twice() -> None:
    """Two receivers of one array do not see each other's writes."""
    received = round_trip(np.arange(200_000.0))
    first, second = loads(message_of(received)), loads(message_of(received))
    first[0] = -1
    received[0] = -2
    assert (first[0], second[0], received[0]) == (-1, 0, -2)


def test_gaps_between_fields_arrive() -> None:
    """Padding is bytes like others: nothing of an earlier array shows in it."""
    dtype = np.dtype([("a", "u1"), ("b", "f8")], align=True)
    secret = np.full(160_000, 0x55, np.uint8)
    round_trip(secret)
    original = np.zeros(20_000, dtype)[::2]
    received = round_trip(original)
    assert not received.view(np.uint8).any()


@pytest.mark.parametrize("count", [3, 100_000])
def test_metadata_of_dtypes_arrives(count: int) -> None:
    """A dtype with metadata keeps it."""
    original = np.zeros(count, np.dtype("f8", metadata={"unit": "m"}))
    assert dict(round_trip(original).dtype.metadata) == {"unit": "m"}


@pytest.mark.parametrize("count", [3, 100_000])
def test_titles_of_fields_arrive(count: int) -> None:
    """A structured dtype keeps the titles of its fields."""
    original = np.zeros(count, [(("the title", "x"), "f8"), ("y", "i4")])
    assert round_trip(original).dtype.fields == original.dtype.fields


@pytest.mark.parametrize(
    "original",
    [
        np.array([1, "two", None] * 20_000, object),
        np.array([(1, [2])] * 20_000, [("number", "i4"), ("list", "O")]),
    ],
    ids=["object", "object in a structure"],
)
def test_python_objects_are_pickled(original: Array) -> None:
    """Arrays of Python objects go by ordinary pickling, objects and all."""
    read_only = original[:10].copy()
    read_only.flags.writeable = False
    for array in (original, original[:10], read_only, read_only[::2]):
        received = round_trip(array)
        assert received.dtype == array.dtype
        assert received.tolist() == array.tolist()
        assert received.flags.owndata


class Probe:
    """An object whose copies can be told from it."""


@pytest.mark.parametrize("writeable", [True, False])
def test_python_objects_are_copied(writeable: bool) -> None:
    """Every object of an array is pickled: no address of one ever travels."""
    original = np.array([Probe()])
    original.flags.writeable = writeable
    assert round_trip(original)[0] is not original[0]


@pytest.mark.skipif(
    not hasattr(getattr(np, "dtypes", None), "StringDType"), reason="needs NumPy 2"
)
def test_strings_of_any_length_are_pickled() -> None:
    """Arrays of StringDType, whose text lies elsewhere, go by ordinary pickling."""
    original = np.array(["short", "long" * 50] * 5_000, np.dtypes.StringDType())
    received = round_trip(original)
    assert received.dtype == original.dtype
    assert received.tolist() == original.tolist()


def test_dtypes_of_other_packages() -> None:
    """A dtype that another package defines travels as itself."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    original = np.arange(100_000).astype(ml_dtypes.bfloat16)
    received = round_trip(original)
    assert received.dtype == original.dtype
    assert received.tobytes() == original.tobytes()


def test_a_read_only_array_stays_read_only() -> None:
    """Nor can its receiver make it writeable behind our back, while it is small."""
    for count in (3, 100_000):
        original = np.arange(count)
        original.flags.writeable = False
        received = round_trip(original)
        with pytest.raises(ValueError, match="read-only"):
            received[0] = 1


def test_elements_without_size() -> None:
    """Arrays of empty text and empty records arrive."""
    dtypes: list[Any] = ["V0", "S0", "U0", []]
    for dtype in dtypes:
        original = np.zeros(3, np.dtype(dtype))
        received = round_trip(original)
        assert (received.dtype, received.shape) == (original.dtype, original.shape)


def test_arrays_over_other_buffers() -> None:
    """Arrays over bytes, and arrays over memoryviews of arrays, travel by value."""
    over_bytes = np.frombuffer(bytes(range(256)) * 1024, np.uint8)
    assert np.array_equal(round_trip(over_bytes), over_bytes)
    numbers: Any = np.arange(100_000.0)
    over_view = np.asarray(memoryview(numbers)[::2])
    assert np.array_equal(round_trip(over_view), over_view)


@pytest.mark.parametrize("make", [np.copy, shmreduce.array, round_trip])
def test_arrays_that_are_written_back_later(make: Any) -> None:
    """A temporary copy that NumPy writes back in the end has memory of its own, and arrives."""
    source = make(np.arange(100_000.0))
    with written_back_to(source) as iterator:
        copy = iterator.operands[0]
        copy += 1
        received = round_trip(copy)
        assert received.dtype == copy.dtype
        assert received.tolist() == copy.tolist()
        assert not shmreduce.is_shared(copy)
    assert received.tolist() == source.tolist()


def test_large_arrays_are_small_messages() -> None:
    """A message with a large array is a few hundred bytes."""
    assert len(message_of(np.zeros(1_000_000))) < 400


class Forged:
    """Pickles as an array that is somewhere else than in its block."""

    def __init__(self, rebuilt: Any, handle: bytes, *where: Any) -> None:
        self.reduced = rebuilt, (handle, *where)

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize(
    ("function", "where", "said"),
    [
        (rebuild.rebuild_copy, ((900_000,), "C", "|u1", True), "900000"),
        (rebuild.rebuild_view, (1, (100_000,), None, "|u1", True), "100000"),
        (rebuild.rebuild_view, (-8, (10,), None, "|u1", True), "8 bytes before the block"),
        (rebuild.rebuild_view, (-8, (10,), (1,), "|u1", True), "8 bytes before the block"),
    ],
)
def test_a_forged_place_is_refused(function: Any, where: Any, said: str) -> None:
    """A message whose array would reach beyond its block is an InvalidHandleError."""
    message = shmreduce.Message()
    taken = message.allocate(100_000)
    assert taken is not None
    message.commit()
    with pytest.raises(shmreduce.InvalidHandleError) as caught:
        round_trip(Forged(function, taken[1], *where))
    assert said in str(caught.value)
