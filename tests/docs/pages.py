"""Reads the pages of the documentation.

How examples are written
------------------------
All fenced blocks of a page that open with ```python are one program: they are
run in order, from one file. A block that opens with ```python no-run is only
looked at by people. Blocks that open with ```output are, together and in
order, what the program prints; a page without them may print what it likes.
As in doctest, ``...`` stands for any text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Block", "Page", "pages"]

ROOT = Path(__file__).parent.parent.parent
_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<info>[^`]*)$")
_HEADING = re.compile(r"^(#{1,6}) +(.*?) *$")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block: what stands after the opening ticks, its text, its first line's number."""

    info: str
    text: str
    line: int


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    path: Path
    blocks: tuple[Block, ...]
    prose: tuple[str, ...]
    """The lines outside of blocks; those inside are empty here."""

    @property
    def name(self) -> str:
        """The path as seen from the root of the project."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def program(self) -> str:
        """The page's examples as one source text, each on the lines that it has in the page."""
        lines: list[str] = []
        for block in self.blocks:
            if block.info == "python":
                lines += [""] * (block.line - 1 - len(lines))
                lines += block.text.splitlines()
        return "\n".join(lines) + "\n" if lines else ""

    @property
    def output(self) -> str | None:
        """What the program prints according to the page; None if the page does not say."""
        shown = [block.text for block in self.blocks if block.info == "output"]
        return "".join(shown) if shown else None

    def headings(self) -> list[tuple[int, str]]:
        """Return level and text of each heading."""
        found = [_HEADING.match(line) for line in self.prose]
        return [(len(match[1]), match[2]) for match in found if match]

    def anchors(self) -> set[str]:
        """Return the names by which links lead to headings, made as GitHub makes them."""
        return {_anchor(text) for _, text in self.headings()}

    def links(self) -> list[str]:
        """Return the targets of all links."""
        return [target for line in self.prose for target in _LINK.findall(line)]

    def section(self, title: str) -> str | None:
        """Return the text below the heading whose first code span is ``title``."""
        wanted = re.compile(rf"^(#+) +`{re.escape(title)}[`(]")
        for start, line in enumerate(self.prose):
            match = wanted.match(line)
            if match is None:
                continue
            end = next(
                (
                    index
                    for index in range(start + 1, len(self.prose))
                    if (other := _HEADING.match(self.prose[index]))
                    and len(other[1]) <= len(match[1])
                ),
                len(self.prose),
            )
            return "\n".join(self.path.read_text().splitlines()[start:end])
        return None


def pages() -> list[Page]:
    """Return README.md and every page below ``docs/``, those of example projects included."""
    return [_read(path) for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]]


def _read(path: Path) -> Page:
    blocks: list[Block] = []
    prose: list[str] = []
    opening: re.Match[str] | None = None
    inside: list[str] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        fence = _FENCE.match(line)
        if opening is None and fence is not None:
            opening, inside = fence, []
            prose.append("")
        elif opening is not None:
            prose.append("")
            if fence is not None and not fence["info"] and fence["ticks"] == opening["ticks"]:
                text = "".join(each.removeprefix(opening["indent"]) + "\n" for each in inside)
                blocks.append(Block(opening["info"].strip(), text, number - len(inside)))
                opening = None
            else:
                inside.append(line)
        else:
            prose.append(line)
    if opening is not None:
        raise ValueError(f"{path}: a fenced block is not closed")
    return Page(path, tuple(blocks), tuple(prose))


def _anchor(heading: str) -> str:
    kept = re.sub(r"[^\w\- ]", "", heading.lower())
    return kept.replace(" ", "-")
