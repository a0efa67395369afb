"""Settings: from arguments and from the environment."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from shmreduce import ConfigurationError, Settings, get_settings
from shmreduce.settings import set_settings, settings_from_environment

GOOD_VARIABLES = {
    "SHMREDUCE_STRATEGY": ("file_system", "strategy", "file_system"),
    "SHMREDUCE_INLINE_LIMIT": ("16K", "inline_limit", 16 * 1024),
    "SHMREDUCE_BUDGET": ("1.5g", "budget", 3 * 2**29),
    "SHMREDUCE_IDLE_SECONDS": ("2.5", "idle_seconds", 2.5),
    "SHMREDUCE_IDLE_KEEP": ("0", "idle_keep", 0),
    "SHMREDUCE_MESSAGE_TIMEOUT": ("60", "message_timeout", 60.0),
    "SHMREDUCE_SHORT_WAIT": ("0.00005", "short_wait", 0.00005),
    "SHMREDUCE_ON_EXHAUSTED": ("pickle", "on_exhausted", "pickle"),
    "SHMREDUCE_DISABLE_AUTOLOAD": ("1", "autoload", False),
    "SHMREDUCE_PLUGINS": ("numpy, memoryview", "plugins", ("memoryview", "numpy")),
    "SHMREDUCE_BLOCK": ("numpy,", "blocked", ("numpy",)),
}
BAD_VARIABLES = {
    "SHMREDUCE_INLINE_LIMIT": "-1",
    "SHMREDUCE_BUDGET": "0",
    "SHMREDUCE_IDLE_SECONDS": "nan",
    "SHMREDUCE_IDLE_KEEP": "12X",
    "SHMREDUCE_MESSAGE_TIMEOUT": "0",
    "SHMREDUCE_ON_EXHAUSTED": "wait",
    "SHMREDUCE_DISABLE_AUTOLOAD": "maybe",
}


@pytest.mark.parametrize("variable", GOOD_VARIABLES)
def test_each_variable_sets_its_setting(variable: str) -> None:
    """Every documented environment variable reaches its field."""
    text, setting, value = GOOD_VARIABLES[variable]
    assert getattr(settings_from_environment({variable: text}), setting) == value


@pytest.mark.parametrize("variable", BAD_VARIABLES)
def test_bad_variable_is_named(variable: str) -> None:
    """A value that cannot be understood is an error naming variable, value and remedy."""
    text = BAD_VARIABLES[variable]
    with pytest.raises(ConfigurationError, match=f"{variable}='{text}': give") as caught:
        settings_from_environment({variable: text})
    assert caught.value.variable == variable


def test_each_setting_has_a_variable() -> None:
    """No setting is without an environment variable."""
    names = {setting for _, setting, _ in GOOD_VARIABLES.values()}
    assert names == {field.name for field in dataclasses.fields(Settings)}


def test_empty_variable_counts_as_unset() -> None:
    """``SHMREDUCE_BUDGET=`` is no error and changes nothing."""
    assert settings_from_environment({"SHMREDUCE_BUDGET": ""}) == Settings()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("strategy", ""),
        ("strategy", 1),
        ("inline_limit", 1.5),
        ("inline_limit", True),
        ("budget", -5),
        ("idle_seconds", "5"),
        ("idle_seconds", float("nan")),
        ("idle_seconds", 10**400),
        ("idle_keep", None),
        ("message_timeout", 0),
        ("short_wait", -0.1),
        ("on_exhausted", None),
        ("autoload", "no"),
        ("plugins", "numpy"),
        ("blocked", [1]),
    ],
)
def test_impossible_value_is_an_error(setting: str, value: Any) -> None:
    """An impossible value is refused at once, with the setting's name."""
    with pytest.raises(ConfigurationError) as caught:
        Settings(**{setting: value})
    assert caught.value.setting == setting
    # The same object: not-a-number equals nothing.
    assert caught.value.fields["value"] is value


@pytest.mark.parametrize("setting", ["inline_limit", "budget", "idle_keep"])
def test_sizes_may_be_whole_numbers_of_other_types(setting: str) -> None:
    """Such as NumPy's, which are reckoned from shapes; the setting is a plain int."""
    given: Any = {setting: np.int64(5)}
    size = getattr(Settings(**given), setting)
    assert (size, type(size)) == (5, int)


def test_unknown_setting_lists_those_there_are() -> None:
    """A misspelt setting is an error that lists the right names."""
    with pytest.raises(ConfigurationError, match="inline_limit"):
        Settings().changed(inline_limits=3)


def test_settings_travel() -> None:
    """Settings survive pickling, since children are handed their parent's."""
    settings = Settings(blocked=("b", "a"), budget=5)
    assert pickle.loads(pickle.dumps(settings)) == settings


def test_settings_in_force_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is read when the settings are first needed, and once."""
    before = get_settings()
    monkeypatch.setattr("shmreduce.settings._current", None)
    monkeypatch.setenv("SHMREDUCE_INLINE_LIMIT", "5")
    assert get_settings().inline_limit == 5
    monkeypatch.setenv("SHMREDUCE_INLINE_LIMIT", "6")
    assert get_settings().inline_limit == 5
    set_settings(before)
