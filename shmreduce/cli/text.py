"""How the commands write tables, sizes and durations.

May import the standard library, and rich, which draws the tables on a terminal if it is
installed. Otherwise tables are plain lines, which other programs can read.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Table", "print_json", "size_text", "time_text"]

_ANY_WIDTH = 1_000_000
"""Columns, more than any table has."""
_SIZE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_text(nbytes: float) -> str:
    """Return a number of bytes as text for people.

    Examples
    --------
    >>> size_text(128), size_text(65536), size_text(3.5 * 2**30)
    ('128 B', '64 KiB', '3.5 GiB')
    """
    value = float(nbytes)
    for unit in _SIZE_UNITS:
        if abs(value) < 1024 or unit == _SIZE_UNITS[-1]:
            break
        value /= 1024
    return f"{_short(value)} {unit}"


def time_text(seconds: float) -> str:
    """Return a duration as text for people.

    Examples
    --------
    >>> time_text(0.0000123), time_text(0.25), time_text(90), time_text(90_000)
    ('12.3 us', '250 ms', '90 s', '25 h')
    """
    if abs(seconds) < 1e-3:
        return f"{_short(seconds * 1e6)} us"
    if abs(seconds) < 1:
        return f"{_short(seconds * 1e3)} ms"
    if abs(seconds) < 600:
        return f"{_short(seconds)} s"
    if abs(seconds) < 2 * 3600:
        return f"{_short(seconds / 60)} min"
    return f"{_short(seconds / 3600)} h"


def print_json(value: Any) -> None:
    """Print ``value`` as one JSON document."""
    print(json.dumps(value, indent=2))


@dataclass
class Table:
    """Rows of text under a title.

    Examples
    --------
    >>> table = Table("Fruit", ("name", "count"))
    >>> table.add("apple", 3)
    >>> print(table.plain())
    Fruit
    name   count
    apple  3
    """

    title: str
    columns: Sequence[str]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """Append one row; each cell is written by ``str``."""
        self.rows.append(tuple(str(cell) for cell in cells))

    def plain(self) -> str:
        """Return the table as aligned lines."""
        lines = [tuple(self.columns), *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = (
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            for line in lines
        )
        return "\n".join([self.title, *(line.rstrip() for line in text)])

    def print(self) -> None:
        """Print the table, drawn by rich if that is installed and a terminal has room for it."""
        if not (sys.stdout.isatty() and self._print_by_rich()):
            print(self.plain())

    def _print_by_rich(self) -> bool:
        """Print the table by rich, and return True, if that is installed and has room for it."""
        try:
            from rich.console import Console
            from rich.measure import Measurement
            from rich.table import Table as RichTable
            from rich.text import Text
        except ModuleNotFoundError:
            return False
        drawn = RichTable(title=self.title, title_justify="left")
        for column in self.columns:
            drawn.add_column(column, overflow="fold")
        for row in self.rows:
            drawn.add_row(*(Text(cell) for cell in row))
        console = Console()
        unlimited = console.options.update(width=_ANY_WIDTH)
        if Measurement.get(console, unlimited, drawn).minimum > console.width:
            # Too narrow: rich would break words into pieces of a few letters.
            return False
        console.print(drawn)
        return True


def _short(value: float) -> str:
    """Three significant digits, no exponent, no trailing zeros."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"
