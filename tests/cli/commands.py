"""Runs the command line as a user does, and brings about what it looks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

__all__ = ["PATIENCE", "read_json", "run", "start_python"]

PATIENCE = 60.0
"""Seconds that a test waits for a process before it fails."""


def run(*arguments: str, status: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m shmreduce`` and check its exit status."""
    done = subprocess.run(
        [sys.executable, "-m", "shmreduce", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == status, f"{done.stdout}\n{done.stderr}"
    return done


def read_json(*arguments: str, status: int = 0, **environment: str) -> Any:
    """Run a command with ``--json`` and return what it says."""
    return json.loads(run(*arguments, "--json", status=status, **environment).stdout)


def start_python(program: str) -> subprocess.Popen[str]:
    """Start a program and return when it has printed its first line, which is taken off."""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline(), "the program ended before it was ready"
    return process
