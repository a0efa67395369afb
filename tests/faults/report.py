"""Puts what was counted into docs/reliability.md: ``python -m tests.faults.report --runs FILE``.

Each table stands between two comments, ``<!-- name -->`` and ``<!-- /name -->``.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from tests.faults.run import read_journal
from tests.faults.soak import plot, read_samples, summary
from tests.faults.table import table

__all__ = ["main"]

_DOCS = Path(__file__).parent.parent.parent / "docs"
_PAGE = _DOCS / "reliability.md"
_PLOT = _DOCS / "reliability-soak.svg"


def _put(name: str, text: str) -> None:
    page = _PAGE.read_text()
    mark = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    replaced, count = mark.subn(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page)
    if count != 1:
        raise SystemExit(f"{_PAGE} has no place for {name!r}")
    _PAGE.write_text(replaced)


def main(arguments: list[str] | None = None) -> int:
    """Replace the tables for which there are files."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.report", description=__doc__)
    parser.add_argument("--runs", type=Path, help="journal of runs of shmreduce")
    parser.add_argument("--others", type=Path, help="journal of runs of others")
    parser.add_argument("--soak", type=Path, help="samples of a soak")
    options = parser.parse_args(arguments)
    if options.runs:
        _put("fault runs", table(read_journal(options.runs)))
    if options.others:
        # Ours beside them, where both are given.
        ours = read_journal(options.runs) if options.runs else ()
        _put("others", table([*ours, *read_journal(options.others)]))
    if options.soak:
        samples = read_samples(options.soak)
        picture = ""
        if plot(samples, _PLOT):
            picture = f"\n\n![What was measured over time]({_PLOT.name})"
        _put("soak", summary(samples) + picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
