"""The pages of benchmarks give the reasons that the program gives, the README their figures."""

from __future__ import annotations

import re

import pytest

from shmreduce.bench.reasons import REASONS
from tests.docs.pages import Page, pages

_OLDER = "<!-- older than the reasons -->"
"""Stands in a page that was measured before the reasons became what they are."""
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BENCHMARKS = [page for page in pages() if page.name.startswith("docs/benchmarks")]


def reasons_of(page: Page) -> list[str]:
    """Return what stands in the last column of the figures that are not met."""
    rows = [line.strip("| ").split(" | ") for line in page.prose if "| **not met** |" in line]
    return [row[4].replace("\\|", "|") for row in rows if len(row) > 4]


@pytest.mark.parametrize("page", _BENCHMARKS, ids=lambda page: page.name)
def test_each_reason_on_a_page_is_one_of_the_program(page: Page) -> None:
    """What is said of a figure that is not met is what ``shmreduce bench`` would say today.

    A page says if it is older, and has the mark only as long as it needs it.
    """
    told = reasons_of(page)
    assert told
    unknown = set(told) - set(REASONS.values())
    assert bool(unknown) == any(_OLDER in line for line in page.prose), unknown


def page_named(name: str) -> Page:
    """Return the page of this name."""
    return next(page for page in pages() if page.name == name)


def seconds_of(workload: str) -> dict[str, dict[str, float]]:
    """Return the first table of a workload, in seconds by system and row."""
    lines = page_named("docs/benchmarks.md").prose
    start = next(
        number
        for number in range(lines.index(f"## {workload}"), len(lines))
        if lines[number].startswith("|  |")
    )
    rows = [line.strip("| ").split(" | ") for line in lines[start : lines.index("", start)]]
    found: dict[str, dict[str, float]] = {}
    for system, *cells in rows[2:]:
        times = [re.match(r"([\d.]+) (\w+)", cell) for cell in cells]
        found[system] = {
            row: float(time[1]) * _SECONDS[time[2]]
            for row, time in zip(rows[0], times, strict=True)
            if time is not None
        }
    return found


def test_the_readme_has_the_figures_of_the_page() -> None:
    """Its table, and what it says of queues, to two digits."""
    fresh, shared = seconds_of("fresh"), seconds_of("shared")
    readme = "\n".join(page_named("README.md").prose)
    rows = re.findall(r"\| (\d+ MiB) \| ([\d.]+) ms \| (\d+) times .*?\| ([\d.]+) times", readme)
    assert len(rows) == 3
    for size, *told in rows:
        ours = fresh["shmreduce install"][size]
        torch = min(fresh["torch"][size], fresh["torch file_system"][size])
        measured = [1000 * ours, fresh["multiprocessing"][size] / ours, torch / ours]
        assert [float(each) for each in told] == pytest.approx(measured, rel=0.03)
    small = re.search(r"Ten bytes over its queues take ([\d.]+) times", readme)
    assert small is not None
    assert float(small[1]) == pytest.approx(
        fresh["shmreduce"]["10 B"] / fresh["multiprocessing"]["10 B"], rel=0.03
    )
    flat = re.search(r"128 B to 1 GiB\s+([\d.]+) to ([\d.]+)\s+times", readme)
    assert flat is not None
    ratios = [shared["shmreduce"][row] / shared["ten bytes"][row] for row in shared["shmreduce"]]
    assert [float(flat[1]), float(flat[2])] == pytest.approx([min(ratios), max(ratios)], rel=0.03)
