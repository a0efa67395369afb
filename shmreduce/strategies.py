"""Chooses the sharing strategy by name and says why others cannot be chosen.

May import :mod:`shmreduce.errors`, :mod:`shmreduce.contracts`,
:mod:`shmreduce.settings`, :mod:`shmreduce.signals`, ``free_descriptors``,
``interpreter`` and :mod:`shmreduce.process_registry`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from shmreduce.errors import StrategyUnusableError, UnknownStrategyError
from shmreduce.free_descriptors import need_descriptors
from shmreduce.interpreter import is_free_threaded
from shmreduce.process_registry import get_plugins, get_registry
from shmreduce.settings import get_settings, set_settings
from shmreduce.signals import is_from_handler

if TYPE_CHECKING:
    from shmreduce.contracts import SharingStrategy

__all__ = [
    "DEFAULT_ORDER",
    "choose_strategy",
    "current_strategy",
    "find_strategy",
    "get_all_sharing_strategies",
    "get_sharing_strategy",
    "reason_against",
    "set_sharing_strategy",
]

_VARIABLE = "SHMREDUCE_STRATEGY"

DEFAULT_ORDER: Final = ("file_descriptor", "file_system")
"""If the settings name no strategy, the first of these that works is used."""

_DESCRIPTORS_FOR_A_TRIAL = 2
"""Descriptors that a trial of one of these has open at the same time."""

_chosen: tuple[str | None, int, SharingStrategy] | None = None


def find_strategy(name: str) -> SharingStrategy:
    """Return the strategy of that name, usable here or not.

    Raises
    ------
    UnknownStrategyError
        If no plugin provides it. The message lists the strategies that there are.

    Examples
    --------
    >>> find_strategy("file_system").name
    'file_system'
    """
    claim = get_registry().strategies().get(name)
    if claim is None:
        usable, unusable = _usable_and_unusable()
        # Who gets the error may not know that the variable is set.
        asked_by = {"variable": _VARIABLE} if os.environ.get(_VARIABLE, "").strip() == name else {}
        origin = f", which {_VARIABLE} names" if asked_by else ""
        raise UnknownStrategyError(
            f"there is no sharing strategy {name!r}{origin}; {_what_there_is(usable, unusable)}",
            setting="strategy",
            value=name,
            name=name,
            available=usable,
            unusable=unusable,
            **asked_by,
        )
    return claim.strategy


def reason_against(strategy: SharingStrategy) -> str | None:
    """Return why a strategy does not work here, or None if it does.

    A strategy whose ``unusable_reason()`` raises does not work either. The error is not
    passed on, since the other strategies can still be used.
    """
    if is_free_threaded():
        return (
            "this Python is a free-threaded build, which shmreduce does not support: use a build "
            "with the global interpreter lock"
        )
    try:
        reason = strategy.unusable_reason()
    except Exception as error:
        if is_from_handler(error):
            raise
        return f"its unusable_reason() raised {type(error).__name__}: {error}"
    if reason is None or (isinstance(reason, str) and reason):
        return reason
    return f"its unusable_reason() returned {reason!r}, which is neither None nor a reason"


def choose_strategy(name: str | None) -> SharingStrategy:
    """Return a usable strategy: that of ``name``, or the default for None.

    Raises
    ------
    UnknownStrategyError
        If no plugin provides a strategy of that name.
    StrategyUnusableError
        If it does not work on this machine; or, without a name, if no default strategy
        works. The message gives the reasons and lists the strategies that work.
    SegmentError
        If, without a name, no descriptor is free to try them with.
    """
    if name is None:
        default = _usable_default()
        if default is not None:
            return default
        reason = f"neither {' nor '.join(DEFAULT_ORDER)} works here"
    else:
        strategy = find_strategy(name)
        found = reason_against(strategy)
        if found is None:
            return strategy
        reason = found
    usable, unusable = _usable_and_unusable()
    subject = "the default sharing strategy" if name is None else f"sharing strategy {name!r}"
    raise StrategyUnusableError(
        f"{subject} cannot be used: {reason}; {_what_there_is(usable, unusable)}",
        name=name,
        reason=reason,
        available=usable,
    )


def _usable_default() -> SharingStrategy | None:
    strategies = get_registry().strategies()
    # A strategy that is tried while no descriptor is free says that it does not work here. Then
    # the next one would be taken, for as long as this process lives.
    need_descriptors(_DESCRIPTORS_FOR_A_TRIAL, "try the sharing strategies")
    for name in DEFAULT_ORDER:
        if name in strategies:
            strategy = strategies[name].strategy
            if reason_against(strategy) is None:
                return strategy
    return None


def current_strategy() -> SharingStrategy:
    """Return the strategy with which this process makes new segments.

    The choice is cached until the settings or the plugins change.

    Raises
    ------
    UnknownStrategyError, StrategyUnusableError
        As :func:`choose_strategy`.
    """
    global _chosen
    name = get_settings().strategy
    generation = get_registry().generation
    chosen = _chosen
    if chosen is None or chosen[:2] != (name, generation):
        chosen = (name, generation, choose_strategy(name))
        _chosen = chosen
    return chosen[2]


def get_sharing_strategy() -> str:
    """Return the name of the sharing strategy with which new segments are made.

    Returns
    -------
    str
        One of :func:`get_all_sharing_strategies`.

    Raises
    ------
    UnknownStrategyError
        If the settings name a strategy that no plugin provides.
    StrategyUnusableError
        If the settings name a strategy that does not work on this machine; or if they
        name none, and no default strategy works.

    Examples
    --------
    >>> get_sharing_strategy() in get_all_sharing_strategies()
    True
    """
    return current_strategy().name


def set_sharing_strategy(new_strategy: str) -> None:
    """Make new segments with another strategy, in this process and its future children.

    Arrays that are already shared, and unread messages, stay where they are and are
    received as before. Children that ``multiprocessing`` spawns, or starts by a fork
    server, get it only after :func:`shmreduce.install`.

    Parameters
    ----------
    new_strategy : str
        One of :func:`get_all_sharing_strategies`.

    Raises
    ------
    UnknownStrategyError
        If no plugin provides a strategy of that name.
    StrategyUnusableError
        If it does not work on this machine.

    Notes
    -----
    After either error nothing has changed. Both errors list the strategies that work.

    Examples
    --------
    >>> set_sharing_strategy("teleport")
    Traceback (most recent call last):
        ...
    shmreduce.errors.UnknownStrategyError: there is no sharing strategy 'teleport'; ...
    """
    choose_strategy(new_strategy)
    set_settings(get_settings().changed(strategy=new_strategy))


def get_all_sharing_strategies() -> set[str]:
    """Return the names of the sharing strategies that work on this machine.

    Returns
    -------
    set of str
        The strategies whose ``unusable_reason()`` is None.

    Examples
    --------
    >>> "file_system" in get_all_sharing_strategies()
    True
    """
    return set(_usable_and_unusable()[0])


def _usable_and_unusable() -> tuple[list[str], dict[str, str]]:
    """Return the names of the usable strategies, and why each of the others is not usable."""
    usable, unusable = [], {}
    for name, claim in sorted(get_registry().strategies().items()):
        reason = reason_against(claim.strategy)
        if reason is None:
            usable.append(name)
        else:
            unusable[name] = reason
    return usable, unusable


def _what_there_is(usable: list[str], unusable: dict[str, str]) -> str:
    parts = [f"usable here: {', '.join(usable)}" if usable else "none is usable here"]
    parts += [f"{name} is not: {reason}" for name, reason in unusable.items()]
    parts += [
        f"plugin {report.name!r} is {report.status}: {report.reason}"
        for report in get_plugins().reports()
        if report.reason
    ]
    return "; ".join(parts)
