"""Puts what is compiled into wheels and editable installations, as far as it can be compiled.

May import hatchling, ``building``, ``compiled`` and errors. It is run by
hatchling: ``[tool.hatch.build.hooks.custom]`` in ``pyproject.toml`` names this
file. Without a compiler the wheel is the same but for the libraries, and fits
any platform.
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
"""The stable interface of Python 3.11, which the modules are written in."""


class CompilingHook(BuildHookInterface[Any]):
    """Compiles what is written in C; ``SHMREDUCE_BUILD_HELPER=0`` makes it do nothing."""

    PLUGIN_NAME = "custom"
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add libraries to a wheel, or put them into the source folder for an editable one."""
        if self.target_name != "wheel" or os.environ.get("SHMREDUCE_BUILD_HELPER") == "0":
            return
        # What is being built is not installed, nor on the path.
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
            place = None if version == "editable" else Path(self._folder.name, part.library.name)
            try:
                library = build(part, place)
            except CompilationError as error:
                self.app.display_warning(f"{error}. Going on without it")
                continue
            if place is not None:
                inside = Path("shmreduce", part.library.relative_to(FOLDER))
                build_data["force_include"][str(library)] = str(inside)
                made.append(part)
        if made:
            build_data["pure_python"] = False
            # A C library is for any Python, a module for those of its interface.
            python = _STABLE if any(part.module for part in made) else "py3-none"
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"{python}-{platform}"

    def finalize(self, *_build: Any) -> None:
        """Remove what is in the wheel by now."""
        if self._folder is not None:
            self._folder.cleanup()
