"""Builds the allocator into wheels and editable installations, if it can be built.

May import hatchling, ``building`` and errors. It is run by hatchling:
``[tool.hatch.build.hooks.custom]`` in ``pyproject.toml`` names this file.
Without a compiler the wheel is the same but for the library, and fits any
platform.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

__all__ = ["AllocatorHook"]


class AllocatorHook(BuildHookInterface[Any]):
    """Compiles the allocator; ``SHMREDUCE_BUILD_HELPER=0`` makes it do nothing."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the library to a wheel, or put it into the source folder for an editable one."""
        if self.target_name != "wheel" or os.environ.get("SHMREDUCE_BUILD_HELPER") == "0":
            return
        # What is being built is not installed, nor on the path.
        sys.path.insert(0, self.root)
        try:
            from shmreduce.born.building import LIBRARY, build
            from shmreduce.errors import AllocatorUnavailableError
        finally:
            sys.path.remove(self.root)
        try:
            if version == "editable":
                build()
                return
            self._folder = tempfile.TemporaryDirectory(prefix="shmreduce-")
            made = build(Path(self._folder.name) / LIBRARY.name)
        except AllocatorUnavailableError as error:
            self.app.display_warning(f"{error}. Going on without it")
            return
        build_data["force_include"][str(made)] = f"shmreduce/born/{LIBRARY.name}"
        build_data["pure_python"] = False
        # A plain C library: any Python, this platform.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
