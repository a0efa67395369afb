"""Checks of shmreduce itself: settings, plugins, strategies, compiled parts, leftovers.

May import ``findings``, ``plugins`` of the command line, and everything below
the command line.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from shmreduce.cli.doctor.findings import Finding
from shmreduce.cli.plugins import find_plugins, is_usable
from shmreduce.errors import (
    ConfigurationError,
    ShmreduceError,
    ShmreduceWarning,
    StrategyUnusableError,
    UnknownStrategyError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmreduce.contracts import SharingStrategy
    from shmreduce.memory.headroom import Machine
    from shmreduce.plugin import PluginReport

__all__ = ["allocator", "compiled_modules", "leftovers", "plugins", "settings", "strategies"]


def settings(_machine: Machine) -> Finding:
    """Read the settings from the environment."""
    from shmreduce.settings import Settings, get_settings

    try:
        found = get_settings()
    except ConfigurationError as error:
        return Finding("settings", "problem", str(error), "mend or unset the variable")
    changed = [
        f"{name}={value!r}"
        for name, value in vars(found).items()
        if getattr(Settings(), name) != value
    ]
    return Finding("settings", "ok", ", ".join(changed) or "all defaults")


def plugins(_machine: Machine) -> Iterator[Finding]:
    """Find plugins that should work and do not, and reducers that do not work here."""
    reports = find_plugins()
    broken = [report for report in reports if not is_usable(report)]
    for report in reports:
        # Not a problem: a machine without a GPU, for example, cannot use a plugin for GPUs.
        for reason in report.unusable:
            yield Finding(f"plugin {report.name}", "ok", f"does not work here: {reason}")
    if not broken:
        yield Finding("plugins", "ok", ", ".join(f"{each.name} {each.status}" for each in reports))
        return
    yield Finding(
        "plugins",
        "problem",
        "; ".join(f"{each.name} of {each.distribution}: {each.reason}" for each in broken),
        _remedy(broken),
    )


def _remedy(broken: list[PluginReport]) -> str:
    """Return what to do. If two are in conflict, only the user can know which one to block."""
    names = [each.name for each in broken if each.status != "conflict"]
    remedies = []
    if names:
        remedies.append(
            "mend or uninstall the distribution, or block the plugin: "
            f"SHMREDUCE_BLOCK={','.join(names)}"
        )
    if len(names) < len(broken):
        remedies.append(
            "of two plugins in conflict, uninstall or block the one that is not wanted: "
            "SHMREDUCE_BLOCK=NAME"
        )
    return "; ".join(remedies)


def strategies(_machine: Machine) -> Iterator[Finding]:
    """Try every sharing strategy that there is."""
    from shmreduce.process_registry import get_registry
    from shmreduce.strategies import DEFAULT_ORDER, current_strategy, reason_against

    reasons = {
        name: reason_against(claim.strategy) or _fault_of(claim.strategy)
        for name, claim in sorted(get_registry().strategies().items())
    }
    default = next((name for name in DEFAULT_ORDER if reasons.get(name, "missing") is None), None)
    try:
        chosen = current_strategy().name
    except (StrategyUnusableError, UnknownStrategyError) as error:
        yield Finding(
            "chosen strategy", "problem", str(error), "name one that works: SHMREDUCE_STRATEGY"
        )
    else:
        if reasons[chosen] is None:
            yield Finding("chosen strategy", "ok", chosen)
        else:
            remedy = f"SHMREDUCE_STRATEGY={default}" if default else "mend what is named below"
            yield Finding("chosen strategy", "problem", f"{chosen} does not work", remedy)
    for name, reason in reasons.items():
        title = f"strategy {name}"
        if reason is None:
            yield Finding(title, "ok", "works")
        else:
            other = f"use {default} meanwhile" if default else "mend what it names"
            yield Finding(title, "warning", reason, other)


def _fault_of(strategy: SharingStrategy) -> str | None:
    """Return what is wrong with a strategy whose ``unusable_reason()`` is None, or None."""
    from shmreduce.memory.segment_creation import try_strategy

    try:
        try_strategy(strategy)
    except ShmreduceError as error:
        return str(error)
    # A plugin may raise anything.
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def allocator(_machine: Machine) -> Finding:
    """Try to load the compiled allocator."""
    from shmreduce.born.library import load
    from shmreduce.errors import AllocatorUnavailableError

    title = "allocator"
    try:
        load()
    except AllocatorUnavailableError as error:
        # Not a problem: most programs do not need it.
        return Finding(title, "ok", f"no shared_allocations: {error.reason}")
    return Finding(title, "ok", "works")


def compiled_modules(_machine: Machine) -> Finding:
    """Try to import the compiled modules."""
    from shmreduce.compiled import reason_unused

    reason = reason_unused()
    # Not a problem: everything works without them.
    found = f"not used, so messages take longer: {reason}" if reason else "used"
    return Finding("compiled modules", "ok", found)


def leftovers(_machine: Machine) -> Finding:
    """Look for named segments whose owners were killed."""
    from shmreduce.memory.inspection import leftovers as find_leftovers

    title = "left by killed processes"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", ShmreduceWarning)
            names = find_leftovers()
    except (OSError, ShmreduceWarning) as error:
        return Finding(
            title, "warning", f"cannot be listed: {error}", "see the strategies that use names"
        )
    if not names:
        return Finding(title, "ok", "nothing")
    return Finding(
        title,
        "warning",
        f"{len(names)} named segments, such as {names[0]}",
        "remove them with `shmreduce gc`",
    )
