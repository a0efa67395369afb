"""Tables, sizes and durations."""

from __future__ import annotations

import io
import sys

import pytest

from shmreduce.cli.text import Table, size_text, time_text


class Terminal(io.StringIO):
    """Keeps what is printed on it."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (2**50, "1024 TiB")],
)
def test_sizes_are_written_in_the_largest_unit_that_fits(nbytes: int, text: str) -> None:
    """A size has three digits or more and a unit of 1024s."""
    assert size_text(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 us"), (0.0005, "500 us"), (0.5, "500 ms"), (5.0, "5 s"), (1200.0, "20 min")],
)
def test_durations_are_written_in_a_unit_that_fits(seconds: float, text: str) -> None:
    """A duration is written without exponent or leading zeros."""
    assert time_text(seconds) == text


def test_a_table_into_a_pipe_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Where no terminal is there, each row is one line, however long."""
    table = Table("Long", ("name", "path"))
    table.add("x" * 60, "y" * 120)
    table.print()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Long"
    assert lines[2] == f"{'x' * 60}  {'y' * 120}"


def test_a_table_on_a_terminal_is_drawn_by_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the cells are drawn as they are, markup included."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    table = Table("Drawn", ("name",))
    table.add("[bold]kept")
    table.print()
    assert "[bold]kept" in terminal.getvalue()


@pytest.mark.parametrize("columns", [20, 40, 60])
def test_nothing_is_cut_off_on_a_narrow_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table whose words do not fit beside each other is plain lines, as into a pipe."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    table = Table("Narrow", ("segment", "owner", "open in"))
    table.add("/dev/shm/shmreduce-0-26401-c71a84a0c639b424c07d39fdae85b320", 26401, "9038, 26401")
    table.print()
    assert terminal.getvalue() == f"{table.plain()}\n"


def test_a_table_is_drawn_where_its_words_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long sentences are wrapped inside their cells."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    table = Table("Wrapped", ("check", "found"))
    table.add("kernel", "word " * 30)
    table.print()
    rows = [line for line in terminal.getvalue().splitlines() if line.startswith("│")]
    assert {len(row) for row in rows} == {40}
    assert terminal.getvalue().count("word") == 30


def test_a_table_on_a_terminal_without_rich_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich is not needed for a table."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    for name in ("rich", "rich.console", "rich.table", "rich.text"):
        monkeypatch.setitem(sys.modules, name, None)
    Table("Plain", ("name",)).print()
    assert terminal.getvalue() == "Plain\nname\n"
