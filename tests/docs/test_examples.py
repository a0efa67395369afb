"""The examples in the pages do what the pages say."""

from __future__ import annotations

import doctest
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.born.allocator import needs_allocator
from tests.docs.pages import Page, pages

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE = 100
BESIDE_THREADS = "ignore:This process:DeprecationWarning"
"""What CPython says of forks beside threads, as those of the standard library's queues are.

Before 3.15 it is never an error.
"""
WITH_EXAMPLES = [page for page in pages() if page.program]


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run_and_print_what_it_says(page: Page, tmp_path: Path) -> None:
    """Run in order from one file, a page's examples end well, without a warning,
    and print what the page shows.
    """
    if "shared_allocations" in page.program:
        needs_allocator()
    program = tmp_path / "page.py"
    program.write_text(page.program)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", BESIDE_THREADS, program.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, f"{page.name} (line numbers are the page's):\n{done.stderr}"
    # What a child process warns about does not change the exit status.
    assert not done.stderr
    if page.output is not None:
        checker = doctest.OutputChecker()
        assert checker.check_output(page.output, done.stdout, doctest.ELLIPSIS), (
            f"{page.name} says:\n{page.output}\nand prints:\n{done.stdout}"
        )


def test_blocks_are_marked_in_one_way() -> None:
    """No block says in a form of its own that it is Python, and so escapes being run."""
    known = {"python", "python no-run", "output", "text", "console", "bash", "toml", "json", "sh"}
    found = {(page.name, block.line, block.info) for page in pages() for block in page.blocks}
    assert not sorted(each for each in found if each[2] not in known)


def test_a_page_with_a_wrong_output_would_be_noticed() -> None:
    """The comparison of outputs tells a difference: this guards the guard."""
    checker = doctest.OutputChecker()
    assert not checker.check_output("1\n2\n", "1\n3\n", doctest.ELLIPSIS)
    assert checker.check_output("1\n...\n3\n", "1\n2\n3\n", doctest.ELLIPSIS)
