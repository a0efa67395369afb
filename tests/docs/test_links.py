"""Links between pages lead somewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.docs.pages import ROOT, Page, pages

if TYPE_CHECKING:
    from pathlib import Path

BY_PATH = {page.path.resolve(): page for page in pages()}


def test_every_internal_link_leads_to_a_file_and_a_heading() -> None:
    """A link without a scheme names a file of the project, and its fragment a heading there."""
    broken = [
        f"{page.name}: {target}"
        for page in BY_PATH.values()
        for target in page.links()
        if not _is_external(target) and not _resolves(page, target)
    ]
    assert not broken


def test_every_page_is_linked_from_the_index_or_a_page_it_leads_to() -> None:
    """Somebody who starts at docs/index.md finds each page by following links."""
    seen: set[Path] = set()
    waiting = [(ROOT / "docs" / "index.md").resolve()]
    while waiting:
        path = waiting.pop()
        if path in seen or path not in BY_PATH:
            continue
        seen.add(path)
        page = BY_PATH[path]
        waiting += [
            (path.parent / target.partition("#")[0]).resolve()
            for target in page.links()
            if not _is_external(target)
        ]
    below = (ROOT / "docs").resolve()
    lost = [page.name for path, page in BY_PATH.items() if below in path.parents]
    assert not [name for name in lost if (ROOT / name).resolve() not in seen]


def _is_external(target: str) -> bool:
    return target.startswith(("http://", "https://", "mailto:"))


def _resolves(page: Page, target: str) -> bool:
    file, _, fragment = target.partition("#")
    path = (page.path.parent / file).resolve() if file else page.path.resolve()
    if not path.exists():
        return False
    return not fragment or (path in BY_PATH and fragment in BY_PATH[path].anchors())
