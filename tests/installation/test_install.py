"""Installing into multiprocessing in this process, and undoing it exactly."""

from __future__ import annotations

import pickle

# Registers reducers of its own when it is imported: not to be seen as ours.
from multiprocessing import managers  # noqa: F401
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

import shmreduce
from shmreduce import (
    AttachError,
    ConfigurationError,
    OutOfSharedMemoryError,
    PluginError,
    ProducerDied,
    Reducer,
    ReducerConflictError,
    ReducerError,
    Settings,
    get_settings,
    get_sharing_strategy,
    install,
    pickler,
    uninstall,
    unpickling,
)
from shmreduce.memory.handle import MARK
from shmreduce.memory.loading import discard_message
from shmreduce.settings import set_settings
from tests.conftest import registered

if TYPE_CHECKING:
    from collections.abc import Iterator


class Signal:
    """A type of the tests' own."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.way = "ordinary"


class Loud(Signal):
    """Its subclass."""


def rebuild(cls: type[Signal], value: Any) -> Signal:
    """Make a signal that says it came through the reducer."""
    signal = cls(value)
    signal.way = "reducer"
    return signal


class SignalReducer(Reducer):
    types = (Signal,)
    subclasses = True

    def reduce(self, obj: Any, message: Any) -> Any:
        return rebuild, (type(obj), obj.value)


@pytest.fixture
def reducer() -> Iterator[SignalReducer]:
    """A reducer for signals, registered."""
    with registered(SignalReducer()) as reducer:
        yield reducer


def snapshot() -> tuple[dict[str, Any], dict[Any, Any], dict[str, Any], Settings]:
    """Return everything that installation may change."""
    return (
        dict(ForkingPickler.__dict__),
        dict(ForkingPickler._extra_reducers),  # type: ignore[attr-defined]
        dict(Connection.__dict__),
        get_settings(),
    )


def trip(obj: Any) -> Any:
    """Send an object through the pickler of multiprocessing."""
    return ForkingPickler.loads(ForkingPickler.dumps(obj))


def way(obj: Any) -> str:
    """Return how an object travels."""
    travelled: str = trip(obj).way
    return travelled


def test_uninstall_leaves_everything_as_it_was() -> None:
    """After uninstall the classes' dictionaries hold the same objects as before."""
    before = snapshot()
    install(strategy="file_system", inline_limit=5)
    install(strategy="file_descriptor")
    assert snapshot() != before
    uninstall()
    assert snapshot() == before
    assert "reducer_override" not in ForkingPickler.__dict__
    assert ForkingPickler.__dict__["loads"] is pickle.loads
    uninstall()
    assert snapshot() == before


def test_context_manager_undoes_itself(reducer: Reducer) -> None:
    """Within the block reducers are used, after it they are not, also after an error."""
    before = snapshot()
    with install() as installation:
        assert installation.installed
        assert way(Signal(1)) == "reducer"
    assert not installation.installed
    assert way(Signal(1)) == "ordinary"
    with pytest.raises(ZeroDivisionError), install():
        raise ZeroDivisionError
    assert snapshot() == before


def test_nested_installations_restore_innermost_first(reducer: Reducer) -> None:
    """Each end of a block restores strategy and settings of before the block."""
    with install(strategy="file_system", inline_limit=1):
        with install(strategy="file_descriptor"):
            assert get_sharing_strategy() == "file_descriptor"
            assert get_settings().inline_limit == 1
            with install(inline_limit=2):
                assert get_sharing_strategy() == "file_descriptor"
            assert get_settings().inline_limit == 1
        assert get_sharing_strategy() == "file_system"
        assert way(Signal(1)) == "reducer"


def test_installations_may_end_in_any_order(reducer: Reducer) -> None:
    """An outer installation that ends first takes nothing from an inner one."""
    before = snapshot()
    outer = install(inline_limit=1)
    inner = install(inline_limit=2)
    outer.uninstall()
    assert get_settings().inline_limit == 2
    assert way(Signal(1)) == "reducer"
    inner.uninstall()
    assert snapshot() == before
    outer.uninstall()
    inner.uninstall()
    assert snapshot() == before


def test_uninstall_ends_all_installations() -> None:
    """One uninstall takes back all; ends of blocks that come later change nothing."""
    before = snapshot()
    with install(inline_limit=1), install(inline_limit=2):
        uninstall()
        assert snapshot() == before
        with install(inline_limit=3) as third:
            assert third.installed
    assert snapshot() == before


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"strategy": "teleport"}, shmreduce.UnknownStrategyError),
        ({"budget": -1}, ConfigurationError),
        ({"colour": "red"}, ConfigurationError),
        ({"plugins": ("no such plugin",)}, PluginError),
    ],
)
def test_failed_install_changes_nothing(arguments: dict[str, Any], error: type) -> None:
    """After an error everything is as before the call."""
    before = snapshot()
    with pytest.raises(error):
        install(**arguments)
    assert snapshot() == before
    with install(inline_limit=1):
        within = snapshot()
        with pytest.raises(error):
            install(**arguments)
        assert snapshot() == within
    assert snapshot() == before


@pytest.mark.parametrize("ends", ["block", "uninstall"])
def test_an_installation_ends_though_the_settings_before_it_do_not_work(ends: str) -> None:
    """Whoever needs them gets their error, but not the end of the block."""
    before = get_settings()
    set_settings(before.changed(strategy="bogus"))
    try:
        made = install("file_system")
        if ends == "block":
            with pytest.raises(ZeroDivisionError), made:
                raise ZeroDivisionError
        else:
            shmreduce.uninstall()
        assert not made.installed
        assert get_settings().strategy == "bogus"
        assert pickle.loads(ForkingPickler.dumps([1])) == [1]
        assert "reducer_override" not in vars(ForkingPickler)
        with pytest.raises(shmreduce.UnknownStrategyError):
            shmreduce.get_sharing_strategy()
    finally:
        set_settings(before)


def test_a_failed_install_leaves_the_plugins_of_the_settings_before() -> None:
    """An array travels as before the call, although the call would have blocked its plugin."""
    array = np.zeros(1 << 20)
    with install():
        with pytest.raises(shmreduce.UnknownStrategyError):
            install("teleport", blocked=("numpy",))
        message = ForkingPickler.dumps(array)
        assert len(message) < 1000
        discard_message(bytes(message))


def test_subclasses_follow_the_reducer(reducer: Reducer) -> None:
    """With ``subclasses`` derived classes take the reducer's way and keep their class."""
    with install():
        travelled = trip(Loud(1))
    assert type(travelled) is Loud
    assert travelled.way == "reducer"


def test_containers_get_it_for_free(reducer: Reducer) -> None:
    """Objects inside other objects take the reducer's way, and identity is kept."""
    signal = Signal(1)
    with install():
        first, second, nested = trip([signal, signal, {"key": (signal,)}])
    assert first is second is nested["key"][0]
    assert first.way == "reducer"


def test_foreign_reducer_override_is_not_overwritten(
    monkeypatch: pytest.MonkeyPatch, reducer: Reducer
) -> None:
    """Somebody else's hook is an error naming it; with ``override`` it comes after ours."""

    def their_hook(self: Any, obj: Any) -> Any:
        return (
            (rebuild, (Signal, "theirs"))
            if isinstance(obj, bytearray | Signal)
            else NotImplemented
        )

    monkeypatch.setattr(ForkingPickler, "reducer_override", their_hook, raising=False)
    before = snapshot()
    with pytest.raises(ReducerConflictError, match=r"test_install\..*their_hook") as caught:
        install()
    assert caught.value.first.endswith("their_hook")
    assert snapshot() == before
    with install(override=True):
        assert trip(Signal("ours")).value == "ours"
    assert snapshot() == before
    assert trip(Signal("ours")).value == "theirs"


def their_reduce(signal: Signal) -> Any:
    """Reduce a signal as somebody else would."""
    return rebuild, (Signal, "theirs")


@pytest.fixture
def registered_by_others() -> Iterator[None]:
    """Somebody has registered a reducer for signals with ForkingPickler."""
    ForkingPickler.register(Signal, their_reduce)
    yield
    ForkingPickler._extra_reducers.pop(Signal)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("registered_by_others", "reducer")
def test_foreign_registration_is_not_overwritten() -> None:
    """A registered reducer for a class of ours is an error naming module and function."""
    before = snapshot()
    with pytest.raises(ReducerConflictError, match=r"test_install\.their_reduce") as caught:
        install()
    assert caught.value.type_name == f"{__name__}.Signal"
    assert snapshot() == before


@pytest.mark.usefixtures("registered_by_others", "reducer")
def test_override_goes_before_and_steps_back() -> None:
    """With ``override`` ours is used, and theirs again after uninstall."""
    before = snapshot()
    with install(override=True):
        assert trip(Signal("ours")).value == "ours"
        with install():
            assert trip(Signal("ours")).value == "ours"
    assert snapshot() == before
    assert trip(Signal("ours")).value == "theirs"


@pytest.mark.usefixtures("reducer")
def test_registration_after_install_wins() -> None:
    """What the user registers with ForkingPickler after installation is used."""
    with install():
        ForkingPickler.register(Signal, their_reduce)
        try:
            assert trip(Signal("ours")).value == "theirs"
            with install():
                assert trip(Signal("ours")).value == "theirs"
            with install(override=True):
                assert trip(Signal("ours")).value == "ours"
        finally:
            ForkingPickler._extra_reducers.pop(Signal)  # type: ignore[attr-defined]
        assert trip(Signal("ours")).value == "ours"


@pytest.mark.usefixtures("reducer")
def test_wrapper_of_ours_stays_and_passes_through() -> None:
    """Somebody who wrapped ours keeps the wrapper; without ours below it, it still works."""
    installation = install()
    ours = ForkingPickler.dump
    calls = []

    def wrapper(self: Any, obj: Any) -> None:
        calls.append(obj)
        ours(self, obj)

    ForkingPickler.dump = wrapper  # type: ignore[method-assign]
    try:
        installation.uninstall()
        assert ForkingPickler.dump is wrapper
        signal = Signal(1)
        assert way(signal) == "ordinary"
        with install():
            assert way(signal) == "reducer"
        assert calls == [signal, signal]
    finally:
        del ForkingPickler.dump


@pytest.mark.parametrize("answer", [3, None, [1], b"name"])
def test_reducer_that_returns_nonsense_is_named(answer: Any, reducer: SignalReducer) -> None:
    """A reducer must return a tuple, a string or NotImplemented."""
    reducer.reduce = lambda obj, message: answer  # type: ignore[method-assign]
    with install(), pytest.raises(ReducerError, match=r"SignalReducer.*returned") as caught:
        ForkingPickler.dumps(Signal(1))
    assert caught.value.type_name == f"{__name__}.Signal"


def test_reducer_may_decline(reducer: SignalReducer) -> None:
    """NotImplemented asks for ordinary pickling."""
    reducer.reduce = lambda obj, message: NotImplemented  # type: ignore[method-assign]
    with install():
        assert way(Signal(1)) == "ordinary"


class Recorder:
    """Stands in for Message and says what became of each."""

    made: ClassVar[list[Recorder]] = []

    def __init__(
        self, shared_memory: bool = True, mover: object = None, *, limits: object = None
    ) -> None:
        del mover, limits
        self.shared_memory = shared_memory
        self.before_many = 100
        self.fate: list[str] = []
        self.made.append(self)

    def commit(self, *, child: object = None) -> None:
        del child
        self.fate.append("commit")

    def rollback(self) -> None:
        self.fate.append("rollback")


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """The messages of the pickling runs to come."""
    monkeypatch.setattr(Recorder, "made", [])
    monkeypatch.setattr(pickler, "Message", Recorder)
    return Recorder.made


def test_message_is_committed_once(reducer: Reducer, messages: list[Recorder]) -> None:
    """One pickling run has one message, which is committed at its end."""
    with install():
        ForkingPickler.dumps([Signal(1), Signal(2)])
        assert [message.fate for message in messages] == [["commit"]]
        ForkingPickler.dumps([1, 2])
        assert len(messages) == 1


def test_message_is_rolled_back(reducer: Reducer, messages: list[Recorder]) -> None:
    """A run that fails, because of any object in it, rolls its message back."""
    with install(), pytest.raises((AttributeError, pickle.PicklingError)):
        ForkingPickler.dumps([Signal(1), lambda: None])
    assert [message.fate for message in messages] == [["rollback"]]


def test_errors_of_reducers_come_through(reducer: SignalReducer, messages: list[Recorder]) -> None:
    """What a reducer raises is raised as it is, and the message rolled back."""

    def fail(obj: Any, message: Any) -> Any:
        raise FloatingPointError("odd")

    reducer.reduce = fail  # type: ignore[method-assign]
    with install(), pytest.raises(FloatingPointError, match="odd"):
        ForkingPickler.dumps(Signal(1))
    assert [message.fate for message in messages] == [["rollback"]]


def test_nested_pickling_has_its_own_message(
    reducer: SignalReducer, messages: list[Recorder]
) -> None:
    """A reducer may pickle with another ForkingPickler; its failure is not the outer one's."""

    def nest(obj: Signal, message: Any) -> Any:
        if obj.value == "outer":
            ForkingPickler.dumps(Signal("inner"))
            with pytest.raises((AttributeError, pickle.PicklingError)):
                ForkingPickler.dumps([Signal("lost"), lambda: None])
        return rebuild, (Signal, obj.value)

    reducer.reduce = nest  # type: ignore[method-assign]
    with install():
        ForkingPickler.dumps(Signal("outer"))
    assert [message.fate for message in messages] == [["commit"], ["commit"], ["rollback"]]


def test_pickler_that_dumps_its_own_way_uses_no_shared_memory(
    reducer: Reducer, messages: list[Recorder]
) -> None:
    """A subclass that bypasses our ``dump`` has nobody to commit: it pickles as usual."""

    class Bypass(ForkingPickler):
        def dump(self, obj: Any) -> None:
            pickle.Pickler.dump(self, obj)

    with install():
        assert pickle.loads(Bypass.dumps(Signal(1))).way == "ordinary"
    assert messages == []


def explode(error: Exception) -> None:
    """Fail to be unpickled."""
    raise error


class Exploding:
    """An object that raises when it is unpickled."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return explode, (self.error,)


@pytest.mark.parametrize("has_handle", [True, False])
@pytest.mark.parametrize(
    ("error", "is_kept"),
    [
        (AttachError("too many open files"), True),
        (OutOfSharedMemoryError("no room"), True),
        (ProducerDied("gone"), False),
        (ZeroDivisionError("odd"), False),
    ],
)
def test_message_that_cannot_be_loaded(
    error: Exception, is_kept: bool, has_handle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is kept with an error that may pass, and its memory is released with any other."""
    discarded: list[bytes] = []
    monkeypatch.setattr(unpickling, "discard_message", discarded.append)
    with install():
        beside = MARK if has_handle else b""
        data = bytes(ForkingPickler.dumps((Exploding(error), beside)))
        with pytest.raises(type(error)) as caught:
            ForkingPickler.loads(data)
    if is_kept:
        assert data in getattr(caught.value, "message_bytes", b"")
        assert discarded == []
    else:
        assert getattr(caught.value, "message_bytes", None) is None
        assert discarded == ([data] if has_handle else [])


def test_loads_keeps_its_parameters() -> None:
    """``ForkingPickler.loads`` takes what ``pickle.loads`` takes, on class and instance."""
    data = b"\x80\x02U\x01\xe4q\x00."
    with install():
        assert ForkingPickler.loads(data, encoding="latin-1") == "\xe4"
        assert ForkingPickler.loads(memoryview(data), encoding="latin-1") == "\xe4"


def test_what_is_installed_is_pickled_by_name() -> None:
    """Each function that is installed travels as a reference to the place where it is, as the
    function that it replaces does, and is understood where nothing is installed.
    """
    places = [
        (ForkingPickler, "loads"),
        (ForkingPickler, "dump"),
        (Connection, "send"),
        (Connection, "_recv_bytes"),
        (Connection, "_poll"),
    ]
    with install():
        pickles = [pickle.dumps(getattr(owner, name)) for owner, name in places]
        assert [pickle.loads(data) for data in pickles] == [getattr(*place) for place in places]
    assert [pickle.loads(data) for data in pickles] == [getattr(*place) for place in places]


def test_types_without_a_reducer_stay_ordinary() -> None:
    """Types without a reducer give byte for byte the same pickles."""
    objects = [1, "text", {"a": [1.5, None]}, Signal, trip, Signal(3)]
    before = bytes(ForkingPickler.dumps(objects))
    with install():
        assert bytes(ForkingPickler.dumps(objects)) == before
