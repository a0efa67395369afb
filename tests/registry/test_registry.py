"""The registry of reducers by type and of strategies by name."""

from __future__ import annotations

import gc
import sys
import threading
import types
import weakref
from typing import Any

import pytest

from shmreduce import (
    PluginError,
    Reducer,
    ReducerConflictError,
    ReducerError,
    SegmentFile,
    SharingStrategy,
    StrategyConflictError,
)
from shmreduce.registry import Registry


class Base:
    """A class to claim."""


class Derived(Base):
    """Its subclass."""


class Grandchild(Derived):
    """The subclass's subclass."""


BASE = f"{__name__}.Base"
DERIVED = f"{__name__}.Derived"


def make_reducer(*claimed: type | str, subclasses: bool = False) -> Reducer:
    """Return a reducer that claims some types."""

    class ForTest(Reducer):
        types = claimed

        def reduce(self, obj: Any, message: Any) -> Any:
            return NotImplemented

    reducer = ForTest()
    reducer.subclasses = subclasses
    return reducer


def found(registry: Registry, cls: type) -> Reducer | None:
    """Return the reducer that the registry finds for a class."""
    claim = registry.find(cls)
    return None if claim is None else claim.reducer


@pytest.mark.parametrize("claimed", [Base, BASE])
def test_class_and_name_claim_the_same(claimed: type | str) -> None:
    """A class can be claimed by itself or by its qualified name."""
    registry = Registry()
    reducer = make_reducer(claimed)
    registry.register(reducer, "test")
    assert found(registry, Base) is reducer


def test_exact_claim_leaves_subclasses_alone() -> None:
    """Without ``subclasses`` a reducer gets objects of exactly its class."""
    registry = Registry()
    registry.register(make_reducer(Base), "test")
    assert found(registry, Derived) is None


def test_nearest_base_wins() -> None:
    """Among reducers for bases the one of the nearest base in the MRO decides."""
    registry = Registry()
    far, near = make_reducer(Base, subclasses=True), make_reducer(DERIVED, subclasses=True)
    registry.register(far, "test")
    assert found(registry, Grandchild) is far
    registry.register(near, "test")
    assert found(registry, Grandchild) is near
    assert found(registry, Base) is far


def test_exact_claims_of_bases_are_passed_over() -> None:
    """A reducer without ``subclasses`` does not hide a farther one that has it."""
    registry = Registry()
    far, near = make_reducer(Base, subclasses=True), make_reducer(Derived)
    registry.register(far, "test")
    registry.register(near, "test")
    assert found(registry, Derived) is near
    assert found(registry, Grandchild) is far


def test_exact_claim_beats_base() -> None:
    """An exact claim wins over a claim of a base with ``subclasses``."""
    registry = Registry()
    registry.register(make_reducer(Base, subclasses=True), "test")
    exact = make_reducer(Grandchild)
    registry.register(exact, "test")
    assert found(registry, Grandchild) is exact


def test_name_is_claimed_before_its_module_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may be registered first and its class come into being later."""
    registry = Registry()
    reducer = make_reducer("later_module.Thing")
    registry.register(reducer, "test")
    assert "later_module" not in sys.modules
    thing = type("Thing", (), {"__module__": "later_module"})
    module = types.ModuleType("later_module")
    module.Thing = thing  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "later_module", module)
    assert found(registry, thing) is reducer


def test_public_path_leads_to_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class may be claimed by a path other than the name it calls itself."""
    module = types.ModuleType("public_path")
    module.Alias = Base  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "public_path", module)
    registry = Registry()
    reducer = make_reducer("public_path.Alias")
    registry.register(reducer, "test")
    assert found(registry, Base) is reducer
    with pytest.raises(ReducerConflictError):
        registry.register(make_reducer(Base), "test")


def test_looking_up_a_name_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module's lazy ``__getattr__`` is not called to resolve a claimed name."""
    module = types.ModuleType("lazy_module")

    def refuse(name: str) -> None:
        raise ImportError(f"{name} was asked for")

    module.__getattr__ = refuse  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy_module", module)
    registry = Registry()
    registry.register(make_reducer("lazy_module.Thing"), "test")
    assert found(registry, Base) is None


@pytest.mark.parametrize("first", [Base, BASE])
@pytest.mark.parametrize("second", [Base, BASE])
def test_conflict_names_both_and_changes_nothing(first: type | str, second: type | str) -> None:
    """A second claim on a class is an error that names both reducers and their origins."""
    registry = Registry()
    winner = make_reducer(first)
    registry.register(winner, "from here")
    with pytest.raises(ReducerConflictError, match=r"ForTest \(from here\).*ForTest \(from there"):
        registry.register(make_reducer(second, DERIVED), "from there")
    assert found(registry, Base) is winner
    assert found(registry, Derived) is None


def test_two_names_of_one_class_conflict_when_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims on two names that later turn out to be one class are an error, not a guess."""
    registry = Registry()
    registry.register(make_reducer("first_path.Thing"), "one")
    registry.register(make_reducer("second_path.Thing"), "two")
    thing = type("Thing", (), {"__module__": "first_path"})
    module = types.ModuleType("second_path")
    module.Thing = thing  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "second_path", module)
    with pytest.raises(ReducerConflictError, match=r"first_path\.Thing"):
        registry.find(thing)


def test_registering_again_changes_nothing() -> None:
    """Registering the same instance twice is allowed."""
    registry = Registry()
    reducer = make_reducer(Base)
    registry.register(reducer, "test")
    registry.register(reducer, "test")
    assert len(registry.reducers()) == 1


def test_changes_reach_remembered_answers() -> None:
    """Answers, also negative ones, are forgotten when reducers come and go."""
    registry = Registry()
    assert found(registry, Base) is None
    reducer = make_reducer(Base)
    registry.register(reducer, "test")
    assert found(registry, Base) is reducer
    registry.unregister(reducer)
    assert found(registry, Base) is None


def test_unregistering_a_stranger_is_an_error() -> None:
    """Only what is registered can be unregistered."""
    with pytest.raises(ReducerError, match="not registered"):
        Registry().unregister(make_reducer(Base))


def test_registries_are_independent() -> None:
    """A registry knows nothing of another's reducers."""
    first, second = Registry(), Registry()
    first.register(make_reducer(Base), "test")
    assert found(second, Base) is None


def test_looked_up_classes_are_not_kept_alive() -> None:
    """A class that was only asked about can be freed, and its answer goes with it."""
    registry = Registry()
    cls = type("Passing", (Base,), {})
    registry.find(cls)
    remembered = len(registry._answers)
    reference = weakref.ref(cls)
    del cls
    gc.collect()
    assert reference() is None
    assert len(registry._answers) == remembered - 1


@pytest.mark.parametrize(
    ("types_", "complaint"),
    [
        ((), "there is none"),
        ("numpy.ndarray", "must be a sequence"),
        (Base, "must be a sequence"),
        (None, "must be a sequence"),
        ((3,), "3 is neither"),
        (("ndarray",), "'ndarray' is neither"),
        (("a b.c",), "neither"),
    ],
)
def test_bad_types_are_refused(types_: Any, complaint: str) -> None:
    """``types`` must be a sequence of classes and dotted names."""
    reducer = make_reducer(Base)
    reducer.types = types_
    with pytest.raises(ReducerError, match=complaint):
        Registry().register(reducer, "test")


@pytest.mark.parametrize("wrong", [object(), type(make_reducer(Base))])
def test_only_reducers_are_registered(wrong: Any) -> None:
    """What is no instance of Reducer is refused."""
    with pytest.raises(ReducerError, match="is not a Reducer"):
        Registry().register(wrong, "test")


class Files(SharingStrategy):
    name = "files"

    def unusable_reason(self) -> str | None:
        return None

    def create(self, size: int, token: str) -> SegmentFile:
        raise NotImplementedError

    def locator(self, file: SegmentFile) -> str:
        raise NotImplementedError

    def open(self, locator: str) -> SegmentFile:
        raise NotImplementedError


def test_strategy_names_are_unique() -> None:
    """A second strategy of a name is an error that names both and their origins."""
    registry = Registry()
    strategy = Files()
    registry.register_strategy(strategy, "from here")
    registry.register_strategy(strategy, "from here")
    with pytest.raises(StrategyConflictError, match=r"Files \(from here.*Files \(from there"):
        registry.register_strategy(Files(), "from there")
    assert registry.strategies()["files"].strategy is strategy
    registry.unregister_strategy(strategy)
    assert not registry.strategies()


@pytest.mark.parametrize("wrong", [object(), Files])
def test_only_strategies_are_registered(wrong: Any) -> None:
    """What is no instance of SharingStrategy is refused."""
    with pytest.raises(PluginError, match="is not a SharingStrategy"):
        Registry().register_strategy(wrong, "test")


def test_strategies_have_names() -> None:
    """A strategy without a name is refused."""
    strategy = Files()
    strategy.name = ""
    with pytest.raises(PluginError, match="has no name"):
        Registry().register_strategy(strategy, "test")


class Prepares(Reducer):
    """Notes how often it was prepared, and can look something up meanwhile."""

    types = (Base,)
    subclasses = True

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.prepared = 0
        self.error: Exception | None = None
        self.meanwhile: Any = lambda: None

    def prepare(self) -> None:
        self.prepared += 1
        self.meanwhile()
        if self.error is not None:
            raise self.error

    def reduce(self, obj: Any, message: Any) -> Any:
        return NotImplemented


def test_a_reducer_is_prepared_for_each_class_once() -> None:
    """Before the registry names it for the first time."""
    registry = Registry()
    reducer = Prepares(registry)
    registry.register(reducer, "test")
    assert reducer.prepared == 0
    for prepared, cls in enumerate((Base, Derived), start=1):
        assert found(registry, cls) is found(registry, cls) is reducer
        assert reducer.prepared == prepared


def test_a_reducer_that_cannot_be_prepared_is_tried_again() -> None:
    """Its exception is the answer until then."""
    registry = Registry()
    reducer = Prepares(registry)
    registry.register(reducer, "test")
    reducer.error = ImportError("no such library")
    for _ in range(2):
        with pytest.raises(ImportError, match="no such library"):
            registry.find(Base)
    reducer.error = None
    assert found(registry, Base) is reducer
    assert reducer.prepared == 3


def test_a_reducer_is_prepared_without_the_lock() -> None:
    """Another thread can look up a class meanwhile: it may be importing the same module."""
    registry = Registry()
    reducer = Prepares(registry)
    registry.register(reducer, "test")
    others: list[Reducer | None] = []

    def look_up() -> None:
        reducer.meanwhile = lambda: None
        thread = threading.Thread(target=lambda: others.append(found(registry, Derived)))
        thread.start()
        thread.join(30)

    reducer.meanwhile = look_up
    assert found(registry, Base) is reducer
    assert others == [reducer]


def test_claims_change_while_a_reducer_is_prepared() -> None:
    """The reducer that has the claim at the end is prepared, and is the answer."""
    registry = Registry()
    first, second = Prepares(registry), Prepares(registry)
    registry.register(first, "test")

    def exchange() -> None:
        registry.unregister(first)
        registry.register(second, "test")

    first.meanwhile = exchange
    assert found(registry, Base) is second
    assert (first.prepared, second.prepared) == (1, 1)
