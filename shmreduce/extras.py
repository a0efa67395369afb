"""Packages of the optional extras, imported when they are used.

May import ``errors`` and ``importing``.
"""

from __future__ import annotations

from typing import Any

from shmreduce.errors import MissingExtraError
from shmreduce.importing import import_late

__all__ = ["import_extra"]


def import_extra(module: str, *, extra: str) -> Any:
    """Import ``module``; if it is missing, raise an error that says which extra installs it.

    Parameters
    ----------
    module : str
        Dotted name of the module.
    extra : str
        The extra of shmreduce that installs it.

    Raises
    ------
    MissingExtraError
        If the module, or something that it imports, is not installed.

    Examples
    --------
    >>> import_extra("no_such_package", extra="cli")
    Traceback (most recent call last):
        ...
    shmreduce.errors.MissingExtraError: no_such_package is not installed: ...
    """
    try:
        return import_late(module)
    except ModuleNotFoundError as error:
        package = error.name or module
        raise MissingExtraError(
            f"{package} is not installed: run `pip install 'shmreduce[{extra}]'`",
            package=package,
            extra=extra,
        ) from error
