"""The command line: ``shmreduce`` and ``python -m shmreduce``.

The highest layer, together with ``bench`` and ``demo``, which do not import it. This module
selects the command. Each command has its own module, which imports what it needs when it
runs. May import :mod:`shmreduce`, errors and the commands; each of these may import
everything below the command line.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import shmreduce
from shmreduce.cli import bench, build_helper, demo, doctor, gc, ls, plugins
from shmreduce.errors import ShmreduceError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_STANDARD_ERROR = 2
"""The descriptor of standard error."""
EXIT_ERROR = 2
"""Exit status when a command could not do its work; argparse uses the same."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status.

    Parameters
    ----------
    arguments : sequence of str, optional
        The command and its options; ``sys.argv[1:]`` by default.

    Returns
    -------
    int
        0: done, without a problem. 1: done, and a problem was found. 2: a wrong option, or a
        :class:`ShmreduceError` or OSError, which is printed on standard error. 130:
        interrupted.

    Examples
    --------
    >>> main(["--version"])
    Traceback (most recent call last):
        ...
    SystemExit: 0
    """
    _mend_streams()
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader, such as `head`, has exited. Redirected, since Python would fail again
        # when it flushes at exit; see the note at the end of the docs of signal.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ShmreduceError, OSError) as error:
        print(f"shmreduce {options.command}: {error}", file=sys.stderr)
        return EXIT_ERROR
    return status


def _mend_streams() -> None:
    """Make sure that printing never fails, even if the standard streams are closed."""
    # Open what the caller has closed. Otherwise a segment could get the number, and some
    # library would write its messages into it.
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stdout is None:
        sys.stdout = _nowhere()
    if sys.stderr is None:
        sys.stderr = _nowhere()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A file name may not be valid text, and the terminal may not have all characters.
        sys.stdout.reconfigure(errors="backslashreplace")


def _nowhere() -> io.TextIOWrapper:
    return Path(os.devnull).open("w", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shmreduce", description="Arrays travel through multiprocessing by shared memory."
    )
    parser.add_argument(
        "--version", action="version", version=f"shmreduce {shmreduce.__version__}"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (demo, plugins, ls, gc, doctor, bench, build_helper):
        module.add_command(commands)
    return parser
