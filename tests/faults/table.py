"""The table of many runs, one line for each system and strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.faults.watcher import Outcome

__all__ = ["table"]

_COLUMNS = (
    "system",
    "strategy",
    "runs",
    "processes",
    "killed",
    "groups killed",
    "stopped",
    "calls failed",
    "sent",
    "received",
    "lost with killed",
    "lost otherwise",
    "corrupted",
    "hangs",
    "runs with leaks",
    "runs with wrong errors",
)


def table(outcomes: Iterable[Outcome]) -> str:
    """Return a Markdown table.

    Examples
    --------
    >>> print(table([]).splitlines()[0][:28])
    | system | strategy | runs |
    """
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for each in outcomes:
        groups.setdefault((each.system, each.strategy), []).append(each)
    lines = [_line(_COLUMNS), _line("---" for _ in _COLUMNS)]
    for (system, strategy), runs in groups.items():
        numbers = (
            len(runs),
            sum(each.processes for each in runs),
            sum(each.killed for each in runs),
            sum(each.group_killed for each in runs),
            sum(each.stopped for each in runs),
            sum(each.errors_injected for each in runs),
            sum(each.sent for each in runs),
            sum(each.received for each in runs),
            sum(each.lost_with_killed for each in runs),
            sum(each.lost for each in runs),
            sum(each.corrupted for each in runs),
            sum(each.hangs for each in runs),
            sum(bool(each.leaks) for each in runs),
            sum(bool(each.errors) for each in runs),
        )
        lines.append(_line((system, strategy, *(f"{each:,}" for each in numbers))))
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
