"""What tests share that compile, or use what was compiled."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shmreduce.building import build, compile_command
from shmreduce.compiled import ALLOCATOR, SLOTS, find_module
from shmreduce.errors import CompilationError

if TYPE_CHECKING:
    from types import ModuleType

    from shmreduce.compiled import Part

__all__ = ["changed_library", "changed_module", "needs_compiler", "needs_headers", "needs_module"]


def needs_compiler() -> None:
    """Skip the test where there is no C compiler."""
    _needs(ALLOCATOR)


def needs_headers() -> None:
    """Skip the test where modules of Python cannot be compiled."""
    _needs(SLOTS)


def needs_module(part: Part) -> ModuleType:
    """Return a module; skip the test where it is not used, as where there was no compiler."""
    module, reason = find_module(part)
    if module is None:
        pytest.skip(f"{part.title}: {reason}")
    return module


def changed_library(part: Part, folder: Path, *changes: tuple[str, str]) -> Path:
    """Compile a part with other text in some places; return where it is."""
    headers = Path(part.sources[0]).parent.glob("*.h")
    texts = {path.name: path.read_text() for path in (*map(Path, part.sources), *headers)}
    for found, instead in changes:
        assert sum(text.count(found) for text in texts.values()) == 1
        texts = {name: text.replace(found, instead) for name, text in texts.items()}
    for name, text in texts.items():
        (folder / name).write_text(text)
    sources = tuple(str(folder / Path(source).name) for source in part.sources)
    return build(part._replace(sources=sources), folder / Path(part.library).name)


def changed_module(part: Part, folder: Path, *changes: tuple[str, str]) -> ModuleType:
    """Compile a module with other text in some places, and load it."""
    needs_headers()
    library = changed_library(part, folder, *changes)
    spec = spec_from_file_location(part.module or "", library)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _needs(part: Part) -> None:
    try:
        compile_command(part)
    except CompilationError as error:
        pytest.skip(str(error))
