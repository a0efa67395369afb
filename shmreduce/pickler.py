"""One run of a pickler: it calls reducers by type, and commits or rolls back the message.

May import errors, registry, process_registry, plain_objects, pickled_calls and, of
:mod:`shmreduce.memory`, ``message``, ``mover`` and ``parts``.
Changes nothing outside itself: :mod:`shmreduce.forking` puts :func:`ask_reducer` and
:func:`dump_message` into ``ForkingPickler``, the channels of shmreduce use :func:`pickle_into`.

The message is made when a reducer first needs it. It is rolled back if the dump fails;
otherwise the caller of the dump commits it. During a dump, a ``ForkingPickler`` keeps its
:class:`Message` as an attribute.
"""

from __future__ import annotations

import copyreg
import operator
import pickle
from multiprocessing.reduction import ForkingPickler
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
from typing import TYPE_CHECKING, Any, NamedTuple

from shmreduce.errors import ReducerError
from shmreduce.memory.message import Message
from shmreduce.memory.mover import take_mover
from shmreduce.memory.parts import IN_BLOCK
from shmreduce.pickled_calls import PROTOCOL
from shmreduce.plain_objects import override_of_others
from shmreduce.process_registry import get_registry
from shmreduce.registry import describe, imported_class, qualified_name

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Mapping

    from shmreduce.memory.mover import Mover
    from shmreduce.memory.parts import Limits
    from shmreduce.presized_pickle import PresizedBuffer
    from shmreduce.registry import ReducerClaim, Registry

    _Reduce = Callable[[Any], Any]

__all__ = [
    "Begun",
    "Run",
    "ask_reducer",
    "claim_in",
    "dump_message",
    "pickle_into",
    "reducer_claim",
]

_MESSAGE = "_shmreduce_message"
"""The pickler's attribute for the message of the current dump; None until it is needed."""
_MOVER = "_shmreduce_mover"
"""The pickler's attribute for the mover of that message's arrays, or None."""
_REDUCED = (tuple, str)
"""What ``__reduce__`` may return. ``tuple | str`` would be built anew at each use."""
_BY_NAME = (type, FunctionType)
"""Types whose instances are pickled by name before the dispatch table is looked at."""
_NAMED = (*_BY_NAME, BuiltinFunctionType)
"""Types whose instances are pickled by name, without a call of their methods."""
_ITEMS = 3
"""The place in what ``__reduce__`` returns of the iterator of a list's items; next to it is that
of a dictionary's."""
_MOST_CLASSES = 64
"""How many classes a pickler that is used again remembers. With more, all are forgotten."""
_HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: a class that is freed if nothing refers to it; see
https://docs.python.org/3/c-api/typeobj.html#c.Py_TPFLAGS_HEAPTYPE"""
_METHODS = ("__reduce_ex__", "__reduce__", "__getstate__", "__iter__", "items")
"""What a pickler calls, or ``object.__reduce_ex__`` for it."""
_BUILT_IN = (MethodDescriptorType, WrapperDescriptorType)
"""Types of methods that are written in C."""
_by_its_method = operator.methodcaller("__reduce_ex__", PROTOCOL)
"""What a pickler does for an object that no table names. It is not a function of Python: that
would take as long as all the rest for a number of NumPy, say."""


# What any pickler does


def ask_reducer(
    pickler: Any,
    obj: Any,
    claim: ReducerClaim,
    *,
    outranked: Mapping[type, object],
    shared_memory: Callable[[], bool],
    limits: Limits,
) -> Any:
    """Return what a reducer returns for an object, for use in ``reducer_override``.

    Parameters
    ----------
    pickler : pickle.Pickler
        A pickler that is in a dump by :func:`dump_message`.
    obj : object
        The object that is being pickled.
    claim : ReducerClaim
        The registry's answer for its type.
    outranked : mapping of type to callable
        Entries of the pickler's ``dispatch_table`` that the registry overrides. Any other
        entry for the object's class overrides the registry.
    shared_memory : callable
        Returns whether a new message may use shared memory.
    limits : Limits
        As for :class:`Message`.

    Returns
    -------
    tuple, str or NotImplemented
        The same as ``__reduce__`` returns; NotImplemented asks for ordinary pickling.

    Raises
    ------
    ReducerError
        If the reducer returns anything else.
    """
    state = pickler.__dict__
    if _MESSAGE not in state or _is_outranked(pickler, type(obj), outranked):
        return NotImplemented
    message = state[_MESSAGE]
    if message is None:
        message = state[_MESSAGE] = Message(shared_memory(), state[_MOVER], limits=limits)
    message.before_many -= 1
    if not message.before_many:
        message.has_many = True
    result = claim.reducer.reduce(obj, message)
    _check_result(claim, obj, result)
    return result


def dump_message(
    pickler: Any,
    obj: Any,
    dump: Callable[[Any, Any], None],
    begun: Message | None = None,
    mover: Mover | None = None,
) -> Message | None:
    """Pickle an object by ``dump(pickler, obj)``, the pickler's own method.

    Returns the message, which the caller commits or rolls back, or None if no reducer
    needed one. If ``begun`` is given, that is the message. If pickling fails, all memory
    is given back. ``mover`` is the result of :func:`take_mover` for the object, if the
    caller has it already.
    """
    state = pickler.__dict__
    state[_MESSAGE] = begun
    state[_MOVER] = mover or take_mover(obj)
    try:
        dump(pickler, obj)
    except BaseException:
        if state[_MESSAGE] is not None:
            state[_MESSAGE].rollback()
        raise
    else:
        message: Message | None = state[_MESSAGE]
        return message
    finally:
        del state[_MESSAGE], state[_MOVER]


def _is_outranked(pickler: Any, cls: type, outranked: Mapping[type, object]) -> bool:
    """Return whether somebody has registered a reducer for exactly this class with the pickler."""
    reduce = pickler.dispatch_table.get(cls)
    return (
        reduce is not None
        # An entry of copyreg holds for all picklers: our reducers are meant to replace it.
        and reduce is not copyreg.dispatch_table.get(cls)
        and reduce is not outranked.get(cls)
    )


def _check_result(claim: ReducerClaim, obj: Any, result: Any) -> None:
    if isinstance(result, _REDUCED) or result is NotImplemented:
        return
    type_name = qualified_name(type(obj))
    raise ReducerError(
        f"reducer {describe(claim.reducer)} ({claim.origin}) returned "
        f"{type(result).__name__} for {type_name}: reduce() must return a tuple "
        "(rebuild, args) or NotImplemented",
        reducer=describe(claim.reducer),
        type_name=type_name,
        reason=f"returned {type(result).__name__}",
    )


# The picklers of our own channels


class Begun(NamedTuple):
    """An object, what its reducer returned for it, and the message that the reducer used."""

    obj: object
    reduced: tuple[Any, ...]
    message: Message


class _Dispatch(dict[type, "_Reduce"]):
    """The ``dispatch_table`` of a pickler: how objects of a class are pickled.

    The pickler looks here for each object, in C, and a function in Python is called only
    when a class is not here yet: a message may have ten thousand objects of one class. See
    https://docs.python.org/3/library/pickle.html#pickle.Pickler.dispatch_table

    After a dump that has called no reducer, the classes stay for the next one, if all of them
    would live as long anyway, because their modules have them.

    Parameters
    ----------
    registry : Registry
        Says which reducer a class has.
    asks_for_all : bool
        Whether the functions return NotImplemented for what no reducer pickles.
    """

    __slots__ = (
        "_asks_for_all", "_is_careful", "_is_to_end", "_registry", "begun", "iterating", "limits",
        "message", "mover",
    )  # fmt: skip

    begun: Begun | None
    iterating: list[bool]
    """Not empty once an object may be pickled by an iterator: its code runs between any two
    objects from then on, so that nothing may stay uncut. A list, which functions in the table can
    refer to without a cycle."""
    limits: Limits
    message: Message | None
    mover: Mover | None
    """What :func:`pickle_into` was given. The message is made when a reducer needs it."""

    def __init__(self, registry: Registry, asks_for_all: bool) -> None:
        self._registry = registry
        self._asks_for_all = asks_for_all
        self._is_careful = self._is_to_end = False
        self.iterating = []

    def end(self) -> None:
        """Forget the dump."""
        if self.message is not None or self._is_to_end or len(self) > _MOST_CLASSES:
            # Functions that call a reducer refer to the message and to the table.
            self.clear()
        self.begun = self.mover = self.message = None
        self._is_careful = self._is_to_end = False
        self.iterating.clear()

    def __missing__(self, cls: type) -> _Reduce:
        claim = self._registry.find(cls)
        found: _Reduce | None
        if claim is not None and cls not in _registered():
            found = self._by_reducer(claim, cls)
        elif self._asks_for_all:
            found = _decline
        else:
            found = self._ordinary(cls)
            if found is None:
                raise KeyError(cls)
        if type(cls).__eq__ is type.__eq__:
            # Not if a metaclass says which classes are equal: each has its own reducer.
            self[cls] = found
            if cls.__flags__ & _HEAP_TYPE and imported_class(qualified_name(cls)) is not cls:
                self._is_to_end = True
        return found

    def _by_reducer(self, claim: ReducerClaim, cls: type) -> _Reduce:
        if self.message is None:
            self.message = Message(True, self.mover, limits=self.limits)
        message = self.message
        reduce = claim.reducer.reduce
        begun = self.begun
        mover: Any = self.mover
        uncut = () if mover is None else mover.uncut
        iterating = self.iterating
        has_methods = _has_methods(cls)

        def ask(obj: Any) -> Any:
            # As in ask_reducer(), without a call: a list may have ten thousand arrays.
            if begun is not None and obj is begun.obj:
                result: Any = begun.reduced
            else:
                if has_methods and uncut:
                    # The reducer may call them, and they may write to arrays.
                    mover.cut_off()
                message.before_many -= 1
                if not message.before_many:
                    message.has_many = True
                result = reduce(obj, message)
            is_tuple = type(result) is tuple
            if is_tuple and len(result) > _ITEMS and _has_iterator(result):
                iterating.append(True)
            if uncut:
                if iterating:
                    mover.cut_off()
                elif not self._is_careful:
                    self.take_care()
            if is_tuple:
                return result
            _check_result(claim, obj, result)
            if result is NotImplemented and not self._asks_for_all:
                ordinary = self._ordinary(type(obj))
                return obj.__qualname__ if ordinary is None else ordinary(obj)
            return result

        return ask

    def take_care(self) -> None:
        """From now on, cut received arrays off before anything could write to them."""
        self._is_careful = True
        # What is pickled by its own method so far needs another function now.
        self.clear()

    def _ordinary(self, cls: type) -> _Reduce | None:
        """Return what pickles objects of a class if no reducer does; None if that is by name."""
        reduce: _Reduce | None = _registered().get(cls) or copyreg.dispatch_table.get(cls)
        if reduce is None:
            if issubclass(cls, type):
                return None
            reduce = _by_its_method
        if issubclass(cls, _NAMED):
            return reduce
        if _may_iterate(cls):
            reduce = _watched(reduce, self.iterating)
        if not self._is_careful:
            return reduce
        mover: Any = self.mover

        def after_cutting_off(obj: Any) -> Any:
            # The object's own methods are called now, and they may write to arrays.
            mover.cut_off()
            return reduce(obj)

        return after_cutting_off


def _has_methods(cls: type) -> bool:
    """Return whether a pickler calls methods of a class that are not written in C."""
    return any(
        not isinstance(getattr(cls, name, None), (*_BUILT_IN, type(None))) for name in _METHODS
    )


def _may_iterate(cls: type) -> bool:
    """Return whether other code than that of types in C may say what an object's items are."""
    return cls in _registered() or cls in copyreg.dispatch_table or _has_methods(cls)


def _has_iterator(reduced: tuple[Any, ...]) -> bool:
    return any(each is not None for each in reduced[_ITEMS : _ITEMS + 2])


def _watched(reduce: _Reduce, iterating: list[bool]) -> _Reduce:
    """Return a function that pickles as another does, and notes whether there is an iterator."""

    def watch(obj: Any) -> Any:
        result = reduce(obj)
        if type(result) is tuple and len(result) > _ITEMS and _has_iterator(result):
            iterating.append(True)
        return result

    return watch


class _AskingPickler(pickle.Pickler):
    """Asks about every object, also about what is pickled by its name."""

    def __init__(
        self,
        file: io.BytesIO | PresizedBuffer,
        keep_buffer: Callable[[pickle.PickleBuffer], bool] | None,
        functions: _Dispatch,
    ) -> None:
        super().__init__(file, PROTOCOL, True, keep_buffer)
        self.dispatch_table = {**copyreg.dispatch_table, **_registered()}
        self._functions = functions

    def reducer_override(self, obj: Any) -> Any:
        """Return how to pickle an object, or NotImplemented for the ordinary way."""
        result = self._functions[type(obj)](obj)
        if result is NotImplemented:
            mover = self._functions.mover
            others = override_of_others()
            if mover is not None and not isinstance(obj, _NAMED):
                mover.cut_off()
                # What pickles it now returns its result to the pickler alone.
                if others is not None or _may_iterate(type(obj)):
                    self._functions.iterating.append(True)
            if others is not None:
                return others(self, obj)
        return result


def pickle_into(
    file: io.BytesIO | PresizedBuffer,
    obj: Any,
    keep_buffer: Callable[[pickle.PickleBuffer], bool] | None = None,
    begun: Begun | None = None,
    message: Message | None = None,
    mover: Mover | None = None,
    *,
    limits: Limits = IN_BLOCK,
) -> Message | None:
    """Pickle an object for the channels of shmreduce.

    It respects reducers that were registered by ``ForkingPickler.register``, and a
    ``reducer_override`` that somebody has added to that class. If it fails, all memory is
    given back.

    Parameters
    ----------
    file : binary file
        Where to write. It stays the caller's.
    obj : object
        The object.
    keep_buffer : callable, optional
        The pickler's ``buffer_callback``: returns False for an out-of-band buffer that it
        keeps, True for one that is to be pickled in-band.
    begun : Begun, optional
        If the reducer was called for the object already: what it returned.
    message : Message, optional
        The message to add to; if ``begun`` is given, that of ``begun``.
    mover : Mover, optional
        Moves the arrays of the object.
    limits : Limits
        As for :class:`Message`; used if no message is given.

    Returns
    -------
    Message or None
        The caller commits it, or rolls it back. None if no reducer needed one.
    """
    return Run(file, keep_buffer, get_registry()).dump(obj, begun, message, mover, limits)


class Run:
    """A pickler that can pickle one message after another.

    A new one takes as long as it needs for a few objects, since it has to find how their
    classes are pickled. What is registered during a dump holds in that dump only for classes
    that it has not met before.

    Parameters
    ----------
    file, keep_buffer
        As for :func:`pickle_into`.
    registry : Registry
        Says which reducer a class has.
    """

    __slots__ = (
        "_copyreg", "_functions", "_generation", "_had_override", "_pickler", "_registered",
        "_registry",
    )  # fmt: skip

    def __init__(
        self,
        file: io.BytesIO | PresizedBuffer,
        keep_buffer: Callable[[pickle.PickleBuffer], bool] | None,
        registry: Registry,
    ) -> None:
        self._registry = registry
        self._generation = registry.generation
        # Copies: an entry is compared with what it is when the pickler is used again.
        self._copyreg = dict(copyreg.dispatch_table)
        self._registered = dict(_registered())
        # The pickler asks for every object then, and would go on when the override is gone.
        self._had_override = override_of_others() is not None
        asks_for_all = _must_ask_for_all(registry)
        self._functions = _Dispatch(registry, asks_for_all)
        self._pickler: pickle.Pickler
        if asks_for_all:
            self._pickler = _AskingPickler(file, keep_buffer, self._functions)
        else:
            self._pickler = pickle.Pickler(file, PROTOCOL, True, keep_buffer)
            self._pickler.dispatch_table = self._functions

    def is_current(self, registry: Registry) -> bool:
        """Return whether a new one would pickle every class as this one does."""
        return (
            self._registry is registry
            and self._generation == registry.generation
            and self._copyreg == copyreg.dispatch_table
            and self._registered == _registered()
            and not self._had_override
            and override_of_others() is None
        )

    def dump(
        self,
        obj: Any,
        begun: Begun | None,
        message: Message | None,
        mover: Mover | None,
        limits: Limits,
    ) -> Message | None:
        """Pickle an object; see :func:`pickle_into`."""
        functions = self._functions
        functions.begun, functions.mover = begun, mover
        functions.message, functions.limits = message, limits
        try:
            self._pickler.dump(obj)
            # It refers to all that was pickled, so that nothing would be freed.
            self._pickler.clear_memo()
            message = functions.message
            functions.end()
        except BaseException:
            message = message or functions.message
            if message is not None:
                message.rollback()
            functions.end()
            raise
        return message


def reducer_claim(cls: type) -> ReducerClaim | None:
    """Return this process's :func:`claim_in` its registry."""
    return claim_in(get_registry(), cls)


def claim_in(registry: Registry, cls: type) -> ReducerClaim | None:
    """Return a registry's claim on a class; None if ``ForkingPickler.register`` overrides it."""
    claim = registry.find(cls)
    return None if claim is None or cls in _registered() else claim


def _registered() -> dict[type, Any]:
    """Return what was registered by ``ForkingPickler.register``, which any pickler respects."""
    # Type checkers do not know it. ForkingPickler.register() only fills it.
    return ForkingPickler._extra_reducers  # type: ignore[attr-defined,no-any-return]


_latest: tuple[object, int, bool] = None, 0, False
"""A registry, its generation, and whether it has reducers of what is pickled by name."""


def _must_ask_for_all(registry: Registry) -> bool:
    """Return whether a dispatch table is not enough.

    It is not asked about objects that are pickled by name, such as functions; nor does it do
    if somebody has given ``ForkingPickler`` a ``reducer_override``.
    """
    global _latest
    if override_of_others() is not None:
        return True
    known, generation, found = _latest
    if known is not registry or generation != registry.generation:
        generation = registry.generation
        found = any(registry.find(cls) is not None for cls in _BY_NAME)
        _latest = registry, generation, found
    return found


def _decline(_: Any) -> Any:
    return NotImplemented
