"""Adds the compiled libraries to wheels and editable installations.

May import hatchling, ``building``, ``compiled`` and errors. Hatchling runs it:
``[tool.hatch.build.hooks.custom]`` in ``pyproject.toml`` names this file. Libraries that
cannot be compiled are left out. A wheel without any fits every platform.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

__all__ = ["CompilingHook"]

_STABLE = "cp311-abi3"
"""The wheel tag for Python 3.11's stable ABI (PEP 384), which the modules use."""


class CompilingHook(BuildHookInterface[Any]):
    """Compiles the parts that are written in C, unless ``SHMREDUCE_BUILD_HELPER`` is 0."""

    PLUGIN_NAME = "custom"
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add libraries to a wheel; for an editable one, put them into the source folder."""
        if self.target_name != "wheel" or os.environ.get("SHMREDUCE_BUILD_HELPER") == "0":
            return
        # The package that is being built is neither installed nor on the path.
        sys.path.insert(0, self.root)
        try:
            from shmreduce.building import build
            from shmreduce.compiled import FOLDER, PARTS
            from shmreduce.errors import CompilationError
        finally:
            sys.path.remove(self.root)
        self._folder = tempfile.TemporaryDirectory(prefix="shmreduce-")
        made = []
        for part in PARTS:
            target = Path(part.library)
            place = None if version == "editable" else Path(self._folder.name, target.name)
            try:
                library = build(part, place)
            except CompilationError as error:
                self.app.display_warning(f"{error}. Going on without it")
                continue
            if place is not None:
                inside = Path("shmreduce", target.relative_to(FOLDER))
                build_data["force_include"][str(library)] = str(inside)
                made.append(part)
        if made:
            build_data["pure_python"] = False
            # A plain C library works with any Python, a module needs the stable ABI.
            python = _STABLE if any(part.module for part in made) else "py3-none"
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"{python}-{platform}"

    def finalize(self, *_build: Any) -> None:
        """Remove the files that have been added to the wheel."""
        if self._folder is not None:
            self._folder.cleanup()
