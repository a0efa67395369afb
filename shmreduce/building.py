"""Compiles the parts of shmreduce that are written in C.

May import errors and ``compiled``, and the standard library: it runs while a
wheel is built, before anything is installed. Nothing is compiled unless
somebody asks for it: the builder of a wheel, an editable installation, or
``shmreduce build-helper``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from shmreduce.errors import CompilationError

if TYPE_CHECKING:
    from shmreduce.compiled import Part

__all__ = ["build", "compile_command"]

_OPTIONS = (
    *("-std=c11", "-O2", "-fPIC", "-shared", "-pthread"),
    *("-fvisibility=hidden", "-Wall", "-Wextra"),
)
_PATIENCE = 120
"""Seconds to wait for the compiler."""


def build(part: Part, target: Path | None = None) -> Path:
    """Compile a part, move the library to its place in one step, and return its path.

    Parameters
    ----------
    part : Part
        What to compile.
    target : Path, optional
        The file to make; by default the part's ``library``. This user must be able to
        write to its folder. Nobody else should be, since the file is loaded into every
        process.

    Raises
    ------
    CompilationError
        If there is no C compiler, if a part needs Python's header and it is missing, if
        the compiler fails, or if the folder is not writable. An existing library is kept.

    Notes
    -----
    The compiler is the first of ``$CC``, ``cc``, ``gcc`` and ``clang``.
    """
    target = target or Path(part.library)
    command = compile_command(part)
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as folder:
            made = Path(folder) / target.name
            command += ["-o", str(made)]
            done = subprocess.run(  # noqa: S603
                command, capture_output=True, timeout=_PATIENCE, check=False
            )
            if done.returncode:
                raise _failure(
                    part,
                    f"{shlex.join(command)} ended with status {done.returncode}:\n"
                    # The compiler may use any encoding.
                    f"{done.stderr.decode(errors='replace').strip()}",
                )
            # The umask may let others write to it, and then it would not be loaded.
            made.chmod(0o755)
            made.replace(target)
    except OSError as error:
        raise _failure(part, f"{error.filename or target.parent}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise _failure(part, f"the compiler took more than {_PATIENCE} s") from error
    return target


def compile_command(part: Part) -> list[str]:
    """Return the command that compiles a part, without the output file.

    Raises
    ------
    CompilationError
        If the compiler or the header of Python is missing.
    """
    command = [*_compiler(part), *_OPTIONS, *part.sources]
    if part.module is not None:
        include = sysconfig.get_path("include")
        if not Path(include, "Python.h").exists():
            raise _failure(part, f"there is no Python.h in {include} (python3-dev has it)")
        command.append(f"-I{include}")
    return command


def _compiler(part: Part) -> list[str]:
    try:
        chosen = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise _failure(part, f"CC={os.environ['CC']!r} cannot be taken apart: {error}") from error
    for words in (chosen, ["cc"], ["gcc"], ["clang"]):
        if words and shutil.which(words[0]):
            return words
    raise _failure(part, "there is no C compiler: none of $CC, cc, gcc and clang is found")


def _failure(part: Part, reason: str) -> CompilationError:
    return CompilationError(
        f"{Path(part.sources[0]).name} ({part.title}) could not be compiled: {reason}. Install "
        "what is missing, or run `shmreduce build-helper` as a user who may write to the "
        "package's folder",
        path=part.library,
        reason=reason,
    )
