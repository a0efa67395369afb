"""Compiles the allocator, a C library without any part of Python in it.

May import :mod:`shmreduce.errors` and the standard library only: it runs while a
wheel is built, before anything is installed. Nothing is compiled unless
somebody asks for it: the builder of a wheel, an editable installation, or
``shmreduce build-helper``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from shmreduce.errors import AllocatorUnavailableError

__all__ = ["LIBRARY", "SOURCE", "build"]

SOURCE = Path(__file__).with_name("allocator.c")
LIBRARY = Path(__file__).with_name("allocator.so")
"""Where the library is looked for: beside this module, and nowhere else."""

_OPTIONS = ("-std=c11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")
_PATIENCE = 120


def build(target: Path = LIBRARY) -> Path:
    """Compile the allocator and put it in place in one step; return where it is.

    Parameters
    ----------
    target : Path
        The file to make. Its folder must be writable by this user; it should be
        by nobody else, since the file is loaded into every process.

    Raises
    ------
    AllocatorUnavailableError
        If there is no C compiler, it fails, or the folder is not writable.
        What was there before is there still.

    Notes
    -----
    The compiler is the first of ``$CC``, ``cc``, ``gcc`` and ``clang``.
    """
    compiler = _compiler()
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as folder:
            made = Path(folder) / target.name
            command = [*compiler, *_OPTIONS, "-o", str(made), str(SOURCE)]
            done = subprocess.run(  # noqa: S603
                command, capture_output=True, text=True, timeout=_PATIENCE, check=False
            )
            if done.returncode:
                raise _failure(
                    f"{shlex.join(command)} ended with status {done.returncode}:\n"
                    f"{done.stderr.strip()}"
                )
            # Whatever the umask: what others could write to would not be loaded.
            made.chmod(0o755)
            made.replace(target)
    except OSError as error:
        raise _failure(f"{error.filename or target.parent}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise _failure(f"the compiler took more than {_PATIENCE} s") from error
    return target


def _compiler() -> list[str]:
    for words in (shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]):
        if words and shutil.which(words[0]):
            return words
    raise _failure("there is no C compiler: none of $CC, cc, gcc and clang is found")


def _failure(reason: str) -> AllocatorUnavailableError:
    return AllocatorUnavailableError(
        f"The allocator of shmreduce could not be built: {reason}. Install a C compiler, or run "
        "`shmreduce build-helper` as a user who may write to the package's folder",
        path=str(LIBRARY),
        reason=reason,
    )
