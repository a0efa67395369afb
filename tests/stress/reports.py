"""Reads what the processes of a run tell, lines of JSON in one pipe, and tells the outcome."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Reports", "leave"]


def leave(report: dict[str, Any]) -> int:
    """Print the report of a run as one JSON object; return 0 unless anything in it is bad."""
    json.dump(report, sys.stdout)
    sys.stdout.write("\n")
    if report["bad"]:
        # Threads and processes in disorder may never end by themselves.
        sys.stdout.flush()
        for process in multiprocessing.active_children():
            process.kill()
        os._exit(1)
    return 0


class Reports:
    """The reading end.

    Parameters
    ----------
    descriptor : int
        Of the pipe; the caller's. It does not block from now on.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        os.set_blocking(descriptor, False)

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield what has been told since the last call."""
        while True:
            try:
                data = os.read(self._descriptor, 65536)
            except BlockingIOError:
                break
            if not data:
                break
            self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            yield json.loads(line)
