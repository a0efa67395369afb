"""The settings: one frozen object, made from arguments and the environment.

May import :mod:`shmreduce.errors` only.
"""

from __future__ import annotations

import operator
import os
import sys
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from shmreduce.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "Settings",
    "get_settings",
    "inline_limit",
    "set_settings",
    "settings_from_environment",
]

KIBIBYTE = 1024
MEBIBYTE = 1024 * KIBIBYTE

# Up to this size, pickling is at least as fast as a block. From 85 KiB on it takes four times
# as long: the pickler allocates half as much again for its buffer, and from 128 KiB on
# (M_MMAP_THRESHOLD) malloc(3) gets the buffer from mmap(2) each time, and gives the memory
# beside it back to the kernel. With warm memory a block would be faster from 48 KiB on, but
# not much, and the first block of a process takes as long as some 25 such messages.
_INLINE_LIMIT = 80 * KIBIBYTE
# A pipe of the standard library holds 64 KiB (pipe(7)). A message that does not fit stops the
# writer until the reader has made room. By a block, tasks with arrays of 64 KiB take a sixth of
# the time or less, messages of a queue a third. From 48 KiB on, many tasks take less time by
# blocks as well, but a single one takes half as long again.
_INLINE_LIMIT_IN_PIPE = 60 * KIBIBYTE

_SIZE_SUFFIXES = {"K": KIBIBYTE, "M": MEBIBYTE, "G": 1024 * MEBIBYTE, "T": 1024 * 1024 * MEBIBYTE}


@dataclass(frozen=True)
class Settings:
    """How shmreduce behaves in this process and in the children it starts.

    Each field can be given to :func:`shmreduce.install` and has an environment
    variable, which is read when the settings are first needed.

    Parameters
    ----------
    strategy : str or None
        Name of the sharing strategy. None means the first usable one of
        ``file_descriptor`` and ``file_system``. ``SHMREDUCE_STRATEGY``.
    inline_limit : int or None
        By-value buffers of fewer bytes are pickled in the ordinary way, unless a message
        has many of them (see docs/explanation/memory.md). None means 80 KiB in a channel of
        shmreduce, and 60 KiB in the standard library's. ``SHMREDUCE_INLINE_LIMIT``.
    budget : int or None
        Bytes of shared memory that the whole family of processes may use. None means
        80 % of what is available when the family begins. ``SHMREDUCE_BUDGET``.
    idle_seconds : float
        Memory that nothing has used for this many seconds goes back to the
        operating system. ``SHMREDUCE_IDLE_SECONDS``.
    idle_keep : int
        Bytes of idle memory that a process keeps nevertheless: this many for by-value
        arrays, as many again for shared arrays, and as many in segments of other processes
        that it has open. ``SHMREDUCE_IDLE_KEEP``.
    message_timeout : float or None
        Seconds after which the memory of a message that nobody has read is freed. None
        means never. ``SHMREDUCE_MESSAGE_TIMEOUT``.
    short_wait : float
        Seconds for which a reader polls for a message before it sleeps: in channels of
        shmreduce and, after :func:`shmreduce.install`, in those of multiprocessing. It
        polls only while no thread waits for its processor and, after 0.3 ms, while none
        waits for any. 0 means that it never polls. ``SHMREDUCE_SHORT_WAIT``.
    on_exhausted : {"raise", "pickle"}
        What happens to an array for which no shared memory is left: an error is raised,
        or the array is pickled in the ordinary way. ``SHMREDUCE_ON_EXHAUSTED``.
    autoload : bool
        Whether installed plugins are loaded without being named. The
        environment variable switches it off: ``SHMREDUCE_DISABLE_AUTOLOAD=1``.
    plugins : tuple of str
        Names of plugins to load even with ``autoload`` off.
        ``SHMREDUCE_PLUGINS``, separated by commas.
    blocked : tuple of str
        Names of plugins never to load; overrides ``plugins``.
        ``SHMREDUCE_BLOCK``, separated by commas.

    Raises
    ------
    ConfigurationError
        If a value is impossible. The message names the setting and what is possible.

    Notes
    -----
    Sizes in environment variables may end in K, M, G or T (powers of 1024).

    Examples
    --------
    >>> Settings(inline_limit=0).inline_limit
    0
    >>> Settings(on_exhausted="wait")
    Traceback (most recent call last):
        ...
    shmreduce.errors.ConfigurationError: on_exhausted='wait': must be 'raise' or 'pickle'
    """

    strategy: str | None = None
    inline_limit: int | None = None
    budget: int | None = None
    idle_seconds: float = 5.0
    idle_keep: int = 128 * MEBIBYTE
    message_timeout: float | None = None
    short_wait: float = 0.001
    on_exhausted: Literal["raise", "pickle"] = "raise"
    autoload: bool = True
    plugins: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.strategy is not None and not (isinstance(self.strategy, str) and self.strategy):
            _reject("strategy", self.strategy, "must be a strategy's name, or None")
        if self.inline_limit is not None:
            self._make_whole("inline_limit", minimum=0)
        if self.budget is not None:
            self._make_whole("budget", minimum=1)
        self._make_whole("idle_keep", minimum=0)
        _check_seconds("idle_seconds", self.idle_seconds, minimum_allowed=True)
        if self.message_timeout is not None:
            _check_seconds("message_timeout", self.message_timeout, minimum_allowed=False)
        _check_seconds("short_wait", self.short_wait, minimum_allowed=True)
        if self.on_exhausted not in ("raise", "pickle"):
            _reject("on_exhausted", self.on_exhausted, "must be 'raise' or 'pickle'")
        if not isinstance(self.autoload, bool):
            _reject("autoload", self.autoload, "must be True or False")
        for setting in ("plugins", "blocked"):
            # Lists are accepted, but stored as tuples: settings are hashed and compared.
            object.__setattr__(self, setting, _name_tuple(setting, getattr(self, setting)))

    def changed(self, **changes: Any) -> Settings:
        """Return settings with some fields changed; these stay as they are.

        Parameters
        ----------
        **changes
            Fields and their new values.

        Returns
        -------
        Settings

        Raises
        ------
        ConfigurationError
            If there is no setting of that name, or its value is impossible.

        Examples
        --------
        >>> Settings().changed(budget=2**30).budget
        1073741824
        """
        known = {field.name for field in fields(self)}
        for name, value in changes.items():
            if name not in known:
                _reject(name, value, f"there is no such setting; there are {sorted(known)}")
        return replace(self, **changes)

    def _make_whole(self, setting: str, *, minimum: int) -> None:
        number = _whole_bytes(setting, getattr(self, setting), minimum)
        object.__setattr__(self, setting, number)


def _reject(setting: str, value: object, rule: str) -> NoReturn:
    raise ConfigurationError(f"{setting}={value!r}: {rule}", setting=setting, value=value)


def _whole_bytes(setting: str, value: Any, minimum: int) -> int:
    """Return a size as a plain int; one computed from an array's shape may be a NumPy integer."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < minimum:
        _reject(setting, value, f"must be a whole number of bytes, at least {minimum}")
    return number


def _check_seconds(setting: str, value: Any, *, minimum_allowed: bool) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # A huge int cannot be added to the float that a clock returns.
    fits = isinstance(value, float) or (is_number and value <= sys.float_info.max)
    # NaN fails both comparisons.
    if is_number and fits and (value > 0 or (minimum_allowed and value == 0)):
        return
    rule = "zero or more" if minimum_allowed else "more than zero"
    _reject(setting, value, f"must be a number of seconds, {rule}")


def _name_tuple(setting: str, value: object) -> tuple[str, ...]:
    if isinstance(value, list | tuple | set | frozenset) and all(
        isinstance(name, str) and name for name in value
    ):
        return tuple(sorted(set(value)))
    _reject(setting, value, "must be a tuple of plugin names")


def _parse_bytes(text: str) -> int:
    suffix = text[-1:].upper()
    if suffix in _SIZE_SUFFIXES:
        return int(float(text[:-1]) * _SIZE_SUFFIXES[suffix])
    return int(text)


def _parse_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _parse_switch_off(text: str) -> bool:
    """Return the value of ``autoload`` that ``SHMREDUCE_DISABLE_AUTOLOAD`` asks for.

    Raises
    ------
    KeyError
        If the text is none of the accepted words.
    """
    disabled = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    return not disabled[text.lower()]


_SIZE_REMEDY = "give a number of bytes, such as 32768, 32K or 1.5G"
_SECONDS_REMEDY = "give a number of seconds, such as 2.5"
_NAMES_REMEDY = "give plugin names separated by commas"

_VARIABLES: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "SHMREDUCE_STRATEGY": ("strategy", str, "give the name of a sharing strategy"),
    "SHMREDUCE_INLINE_LIMIT": ("inline_limit", _parse_bytes, _SIZE_REMEDY),
    "SHMREDUCE_BUDGET": ("budget", _parse_bytes, _SIZE_REMEDY),
    "SHMREDUCE_IDLE_SECONDS": ("idle_seconds", float, _SECONDS_REMEDY),
    "SHMREDUCE_IDLE_KEEP": ("idle_keep", _parse_bytes, _SIZE_REMEDY),
    "SHMREDUCE_MESSAGE_TIMEOUT": ("message_timeout", float, _SECONDS_REMEDY),
    "SHMREDUCE_SHORT_WAIT": ("short_wait", float, _SECONDS_REMEDY),
    "SHMREDUCE_ON_EXHAUSTED": ("on_exhausted", str, "give raise or pickle"),
    "SHMREDUCE_DISABLE_AUTOLOAD": ("autoload", _parse_switch_off, "give 1 or 0"),
    "SHMREDUCE_PLUGINS": ("plugins", _parse_names, _NAMES_REMEDY),
    "SHMREDUCE_BLOCK": ("blocked", _parse_names, _NAMES_REMEDY),
}


def settings_from_environment(environment: Mapping[str, str] | None = None) -> Settings:
    """Return the settings that the environment variables ask for.

    Parameters
    ----------
    environment : mapping of str to str, optional
        By default ``os.environ``. An empty variable counts as not set.

    Raises
    ------
    ConfigurationError
        If a variable cannot be understood. The message says what to set it to.

    Examples
    --------
    >>> settings_from_environment({"SHMREDUCE_BUDGET": "2G"}).budget
    2147483648
    >>> settings_from_environment({"SHMREDUCE_BUDGET": "lots"})
    Traceback (most recent call last):
        ...
    shmreduce.errors.ConfigurationError: environment variable SHMREDUCE_BUDGET='lots': \
give a number of bytes, such as 32768, 32K or 1.5G
    """
    if environment is None:
        environment = os.environ
    settings = Settings()
    for variable, (setting, parse, remedy) in _VARIABLES.items():
        text = environment.get(variable, "").strip()
        if not text:
            continue
        try:
            settings = settings.changed(**{setting: parse(text)})
        except (ValueError, KeyError, OverflowError) as error:
            # ConfigurationError is a ValueError: the check in Settings failed.
            detail = f" ({error})" if isinstance(error, ConfigurationError) else ""
            raise ConfigurationError(
                f"environment variable {variable}={text!r}: {remedy}{detail}",
                setting=setting,
                value=text,
                variable=variable,
            ) from error
    return settings


_current: Settings | None = None


def get_settings() -> Settings:
    """Return the settings in force in this process.

    Until :func:`shmreduce.install` or :func:`shmreduce.set_sharing_strategy` changes
    them, they come from the environment.

    Returns
    -------
    Settings
        Frozen. All threads of the process have the same settings.

    Raises
    ------
    ConfigurationError
        If an environment variable cannot be understood. The field ``variable`` of the
        error names it.

    Examples
    --------
    >>> get_settings().on_exhausted
    'raise'
    """
    global _current
    if _current is None:
        _current = settings_from_environment()
    return _current


def inline_limit(in_pipe: bool = False) -> int:
    """Return the inline limit in force, in bytes.

    Parameters
    ----------
    in_pipe : bool
        Whether it is that of a message of the standard library's channels.

    Examples
    --------
    >>> inline_limit(), inline_limit(in_pipe=True)
    (81920, 61440)
    """
    # Not through get_settings() in the usual case: every message asks two or three times.
    limit = (_current or get_settings()).inline_limit
    if limit is None:
        return _INLINE_LIMIT_IN_PIPE if in_pipe else _INLINE_LIMIT
    return limit


def set_settings(settings: Settings) -> None:
    """Replace the settings in force; only for :func:`shmreduce.install` and its like."""
    global _current
    _current = settings
