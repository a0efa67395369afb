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
        for part in PARTS:
            place = None if version == "editable" else Path(self._folder.name, part.library.name)
            try:
                made = build(part, place)
            except CompilationError as error:
                self.app.display_warning(f"{error}. Going on without it")
                continue
            if place is not None:
                inside = Path("shmreduce", part.library.relative_to(FOLDER))
                build_data["force_include"][str(made)] = str(inside)
                self._note(build_data, of_python=part.module is not None)

    def _note(self, build_data: dict[str, Any], *, of_python: bool) -> None:
        """Say for whom the wheel is: a C library is for any Python, modules for 3.11 on."""
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        before = build_data.get("tag") or ""
        if of_python or before.startswith(_STABLE):
            build_data["tag"] = f"{_STABLE}-{platform}"
        else:
            build_data["tag"] = f"py3-none-{platform}"
