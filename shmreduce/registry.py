"""The registry: which reducer handles a type, which strategy has a name.

May import errors, contracts, ``importing`` and ``thread_locks``.

The rule for types
------------------
A reducer claims a class itself, or a qualified name. A claim on a name holds
for the class whose ``__module__`` and ``__qualname__`` make up that name, and
for the class that is found under the name once its module is imported.

The reducer that claims C handles the objects of class C. If there is none, the
registry goes through the bases of C in MRO order; the first base that is
claimed by a reducer with ``subclasses = True`` decides. A reducer without
``subclasses`` never handles derived classes.

One class has one reducer: a second claim is a :class:`ReducerConflictError`.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

from shmreduce.contracts import Reducer, SharingStrategy
from shmreduce.errors import (
    PluginError,
    ReducerConflictError,
    ReducerError,
    StrategyConflictError,
)
from shmreduce.importing import while_importing
from shmreduce.thread_locks import interrupt_safe

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ReducerClaim",
    "Registry",
    "StrategyClaim",
    "describe",
    "imported_class",
    "qualified_name",
]

_ABSENT: Final = object()


class ReducerClaim(NamedTuple):
    """A reducer, and a text that says who registered it from where."""

    reducer: Reducer
    origin: str


class StrategyClaim(NamedTuple):
    """A strategy, and a text that says who registered it from where."""

    strategy: SharingStrategy
    origin: str


def qualified_name(cls: type) -> str:
    """Return a class's own name, with its module's.

    Examples
    --------
    >>> import collections
    >>> qualified_name(collections.OrderedDict)
    'collections.OrderedDict'
    """
    return f"{cls.__module__}.{cls.__qualname__}"


def describe(instance: object) -> str:
    """Return the qualified name of an object's class, for messages."""
    return qualified_name(type(instance))


class Registry:
    """Reducers by type and strategies by name.

    Registries are independent of each other. Methods may be called from any
    thread. What is registered stays referenced until it is unregistered;
    classes that were only looked up are not kept alive.

    Examples
    --------
    >>> class Plain(Reducer):
    ...     types = ("decimal.Decimal",)
    ...     def reduce(self, obj, message):
    ...         return NotImplemented
    >>> registry = Registry()
    >>> registry.register(Plain(), origin="this example")
    >>> from decimal import Decimal
    >>> registry.find(Decimal).origin
    'this example'
    >>> registry.find(int) is None
    True
    """

    def __init__(self) -> None:
        self._lock = interrupt_safe(threading.RLock())
        # By id(class), since a metaclass may say that two classes are equal.
        self._by_class: dict[int, tuple[type, ReducerClaim]] = {}
        self._by_name: dict[str, ReducerClaim] = {}
        self._strategies: dict[str, StrategyClaim] = {}
        # Answers by id(class): that takes half the time of a WeakKeyDictionary. The
        # callback of the weak reference drops an answer before its id can be reused.
        self._answers: dict[int, ReducerClaim | None] = {}
        self._watched: dict[int, weakref.ref[type]] = {}
        self.generation = 0
        """A number that grows with every change, for those who cache answers."""

    def renew_lock(self) -> None:
        """Replace the lock in a forked child, where another thread may have held it."""
        self._lock = interrupt_safe(threading.RLock())

    # Reducers

    def register(self, reducer: Reducer, origin: str) -> None:
        """Let ``reducer`` handle its types.

        Registering the same instance again changes nothing.

        Parameters
        ----------
        reducer : Reducer
            Kept until it is unregistered.
        origin : str
            Who registers it from where, for messages.

        Raises
        ------
        ReducerError
            If it is no Reducer or its ``types`` are not classes and names.
        ReducerConflictError
            If one of its types is claimed already. Nothing is changed then.
        """
        types = _checked_types(reducer)
        claim = ReducerClaim(reducer, origin)
        with self._lock:
            if any(known.reducer is reducer for known in self.reducers()):
                return
            for wanted in types:
                rival = self._claim_on(wanted)
                if rival is not None:
                    _conflict(wanted, rival, claim)
            for wanted in types:
                if isinstance(wanted, str):
                    self._by_name[wanted] = claim
                else:
                    self._by_class[id(wanted)] = wanted, claim
            self._forget_answers()

    def unregister(self, reducer: Reducer) -> None:
        """Give up all claims of ``reducer``.

        Raises
        ------
        ReducerError
            If it is not registered.
        """
        with self._lock:
            if not any(known.reducer is reducer for known in self.reducers()):
                raise ReducerError(
                    f"reducer {describe(reducer)} is not registered: unregister the "
                    "instance that was registered",
                    reducer=describe(reducer),
                    type_name=None,
                    reason="not registered",
                )
            self._by_class = {
                key: (cls, claim)
                for key, (cls, claim) in self._by_class.items()
                if claim.reducer is not reducer
            }
            self._by_name = {
                name: claim
                for name, claim in self._by_name.items()
                if claim.reducer is not reducer
            }
            self._forget_answers()

    def reducers(self) -> list[ReducerClaim]:
        """List the registered reducers, each once, in order of registration by type."""
        by_class = (claim for _, claim in self._by_class.values())
        claims = [*by_class, *self._by_name.values()]
        return list({id(claim.reducer): claim for claim in claims}.values())

    def find(self, cls: type) -> ReducerClaim | None:
        """Return who handles objects of exactly this class, or None.

        Answers are remembered, and so is None. So a claim on an alias of a class is
        missed if the alias's module is imported only after the class was first looked
        up; it counts from the next change of the registry.

        Raises
        ------
        ReducerConflictError
            If two reducers have claimed the same class under two names.
        """
        answer = self._answers.get(id(cls), _ABSENT)
        if answer is not _ABSENT:
            return answer  # type: ignore[return-value]
        return self._find_and_remember(cls)

    def find_exact(self, cls: type) -> ReducerClaim | None:
        """Return who claims this class itself, by class or by name, or None."""
        with self._lock:
            found = self._by_class.get(id(cls))
            candidates = [] if found is None else [found[1]]
            own_name = qualified_name(cls)
            for name, claim in self._by_name.items():
                if name == own_name or imported_class(name) is cls:
                    candidates.append(claim)
            for claim in candidates[1:]:
                if claim.reducer is not candidates[0].reducer:
                    _conflict(cls, candidates[0], claim)
            return candidates[0] if candidates else None

    def _find_and_remember(self, cls: type) -> ReducerClaim | None:
        prepared: ReducerClaim | None = None
        while True:
            with self._lock:
                claim = self._claim_for(cls)
                if claim is prepared:
                    self._remember(cls, claim)
                    return claim
            # Without the lock: another thread may need it to import the same module. If the
            # claims have changed meanwhile, another reducer is to be prepared.
            if claim is not None:
                while_importing(claim.reducer.prepare)
            prepared = claim

    def _claim_for(self, cls: type) -> ReducerClaim | None:
        # Not cls.__mro__: a metaclass may define an attribute of that name.
        for base in type.__dict__["__mro__"].__get__(cls):
            claim = self.find_exact(base)
            if claim is not None and (base is cls or claim.reducer.subclasses):
                return claim
        return None

    def _remember(self, cls: type, answer: ReducerClaim | None) -> None:
        key = id(cls)
        answers, watched = self._answers, self._watched

        def forget(_reference: weakref.ref[type]) -> None:
            answers.pop(key, None)
            watched.pop(key, None)

        watched[key] = weakref.ref(cls, forget)
        answers[key] = answer

    def _claim_on(self, wanted: type | str) -> ReducerClaim | None:
        """Return who has claimed this class or name already."""
        if not isinstance(wanted, str):
            return self.find_exact(wanted)
        if wanted in self._by_name:
            return self._by_name[wanted]
        present = imported_class(wanted)
        for cls, claim in self._by_class.values():
            if cls is present or qualified_name(cls) == wanted:
                return claim
        return None if present is None else self.find_exact(present)

    def _forget_answers(self) -> None:
        # New dictionaries, not clear(): another thread in find() still uses the old ones.
        self._answers = {}
        self._watched = {}
        self.generation += 1

    # Strategies

    def register_strategy(self, strategy: SharingStrategy, origin: str) -> None:
        """Let ``strategy`` be chosen by its name.

        Raises
        ------
        PluginError
            If it is no SharingStrategy or has no name.
        StrategyConflictError
            If the name is taken. Nothing is changed then.
        """
        if not isinstance(strategy, SharingStrategy):
            raise PluginError(
                f"{strategy!r} is not a SharingStrategy ({origin}): return instances of "
                "subclasses of shmreduce.SharingStrategy",
                plugin=None,
                distribution=None,
                reason="not a SharingStrategy",
            )
        name = getattr(strategy, "name", None)
        if not isinstance(name, str) or not name:
            raise PluginError(
                f"sharing strategy {describe(strategy)} ({origin}) has no name: set its "
                "class attribute 'name' to text",
                plugin=None,
                distribution=None,
                reason="strategy without a name",
            )
        with self._lock:
            rival = self._strategies.get(name)
            if rival is not None and rival.strategy is not strategy:
                raise StrategyConflictError(
                    f"two sharing strategies are called {name!r}: {describe(rival.strategy)} "
                    f"({rival.origin}) and {describe(strategy)} ({origin}); block one of "
                    "their plugins with SHMREDUCE_BLOCK or install(blocked=...)",
                    name=name,
                    first=f"{describe(rival.strategy)} ({rival.origin})",
                    second=f"{describe(strategy)} ({origin})",
                )
            self._strategies[name] = StrategyClaim(strategy, origin)
            self.generation += 1

    def unregister_strategy(self, strategy: SharingStrategy) -> None:
        """Give up the name of ``strategy``; do nothing if it is not registered."""
        with self._lock:
            self._strategies = {
                name: claim
                for name, claim in self._strategies.items()
                if claim.strategy is not strategy
            }
            self.generation += 1

    def strategies(self) -> Mapping[str, StrategyClaim]:
        """Return the registered strategies by name, read-only."""
        return MappingProxyType(self._strategies)


def _checked_types(reducer: Reducer) -> tuple[type | str, ...]:
    if not isinstance(reducer, Reducer):
        hint = " (give an instance, not the class)" if isinstance(reducer, type) else ""
        raise ReducerError(
            f"{reducer!r} is not a Reducer{hint}: derive its class from shmreduce.Reducer",
            reducer=repr(reducer),
            type_name=None,
            reason="not a Reducer",
        )
    if isinstance(reducer.types, str | type) or not isinstance(reducer.types, Iterable):
        raise ReducerError(
            f"reducer {describe(reducer)}: types={reducer.types!r} must be a sequence of "
            "classes and qualified names: put it into a tuple",
            reducer=describe(reducer),
            type_name=None,
            reason="types is not a sequence",
        )
    types = tuple(reducer.types)
    wrong = [each for each in types if not isinstance(each, type) and not _is_name(each)]
    if wrong or not types:
        found = f"{wrong[0]!r} is neither" if wrong else "there is none"
        raise ReducerError(
            f"reducer {describe(reducer)}: types must hold classes and qualified names such "
            f"as 'package.module.Class', and {found}",
            reducer=describe(reducer),
            type_name=None,
            reason="bad types",
        )
    return types


def _is_name(value: object) -> bool:
    return (
        isinstance(value, str)
        and "." in value
        and all(part.isidentifier() or part == "<locals>" for part in value.split("."))
    )


def imported_class(name: str) -> type | None:
    """Return the class of that name if its module is imported already."""
    parts = name.split(".")
    for split in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:split]))
        if module is None:
            continue
        found: object = module
        for part in parts[split:]:
            # Not getattr: a module's __getattr__ (PEP 562) would import things.
            found = getattr(found, "__dict__", {}).get(part)
        return found if isinstance(found, type) else None
    return None


def _conflict(wanted: type | str, first: ReducerClaim, second: ReducerClaim) -> NoReturn:
    type_name = wanted if isinstance(wanted, str) else qualified_name(wanted)
    claims = [f"{describe(claim.reducer)} ({claim.origin})" for claim in (first, second)]
    raise ReducerConflictError(
        f"two reducers claim {type_name}: {claims[0]} and {claims[1]}; unregister one of "
        "them, or block its plugin with SHMREDUCE_BLOCK or install(blocked=...)",
        type_name=type_name,
        first=claims[0],
        second=claims[1],
    )
