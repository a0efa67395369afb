"""The pages of benchmarks give the reasons that the program gives."""

from __future__ import annotations

import pytest

from shmreduce.bench.reasons import REASONS
from tests.docs.pages import Page, pages

_OLDER = "<!-- older than the reasons -->"
"""Stands in a page that was measured before the reasons became what they are."""
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
