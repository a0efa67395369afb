"""The reference says what the code says."""

from __future__ import annotations

import inspect
import multiprocessing.process
import re
from concurrent.futures import Executor
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import shmreduce
from shmreduce import errors, hookspecs, settings, testing
from shmreduce.testing import pytest_plugin
from tests.architecture.test_layers import MEMORY_LAYERS, layer_of
from tests.docs.pages import ROOT, Page, pages

REFERENCE = [page for page in pages() if page.name.startswith("docs/reference/")]
BY_NAME = {Path(page.name).name: page for page in REFERENCE}


def section_of(name: str) -> str | None:
    """Return what the reference has under the heading of a public name."""
    found = [section for page in REFERENCE if (section := page.section(name)) is not None]
    assert len(found) <= 1, f"{name} has {len(found)} sections"
    return found[0] if found else None


@pytest.mark.parametrize("name", shmreduce.__all__)
def test_every_public_name_has_a_section(name: str) -> None:
    """Each name of ``shmreduce.__all__`` heads a section of one page of the reference."""
    assert section_of(name) is not None


def functions() -> list[Any]:
    """Return the public functions, and the methods of contexts with such a heading."""
    found = [getattr(shmreduce, name) for name in shmreduce.__all__]
    methods = [
        each
        for each in found
        if inspect.ismethod(each) and "(" in (section_of(each.__name__) or "").splitlines()[0]
    ]
    assert shmreduce.Pool in methods
    return [each for each in found if inspect.isfunction(each)] + methods


@pytest.mark.parametrize("function", functions(), ids=lambda function: function.__name__)
def test_headings_give_the_signatures_of_functions(function: Any) -> None:
    """The heading of a function is its signature, without types."""
    signature = inspect.signature(function)
    bare = signature.replace(
        parameters=[
            parameter.replace(annotation=inspect.Parameter.empty)
            for parameter in signature.parameters.values()
        ],
        return_annotation=inspect.Signature.empty,
    )
    section = section_of(function.__name__)
    assert section is not None
    assert section.splitlines()[0].lstrip("# ") == f"`{function.__name__}{bare}`"


def classes() -> list[type]:
    """Return the public classes of shmreduce itself but for errors, each under its own name."""
    found = dict.fromkeys(getattr(shmreduce, name) for name in shmreduce.__all__)
    return [
        each
        for each in found
        if inspect.isclass(each)
        and each.__module__.startswith("shmreduce.")
        and not issubclass(each, BaseException)
    ]


@pytest.mark.parametrize("cls", classes(), ids=lambda cls: cls.__name__)
def test_sections_of_classes_name_their_attributes(cls: type) -> None:
    """What a public class has under a public name stands in its section, or among the settings."""
    section = section_of(cls.__name__) or ""
    if cls is settings.Settings:
        section = BY_NAME["settings.md"].path.read_text()
    if issubclass(cls, multiprocessing.process.BaseProcess | Executor):
        # Their interface is the standard library's.
        return
    names = [name for name in vars(cls) if not name.startswith("_")]
    assert [name for name in names if f"`{name}" not in section] == []


@pytest.mark.parametrize("name", sorted(set(errors.__all__) & set(shmreduce.__all__)))
def test_every_error_says_its_fields_and_what_to_do(name: str) -> None:
    """An error's section names the fields that its docstring names, and a remedy."""
    section = section_of(name)
    assert section is not None
    description = inspect.getdoc(getattr(errors, name)) or ""
    documented = re.search(r"^Fields: (.*?)\.$", description, re.MULTILINE | re.DOTALL)
    wanted = re.findall(r"``(\w+)``", documented[1]) if documented else []
    assert [field for field in wanted if f"`{field}`" not in section] == []
    assert "What to do:" in section


def test_every_setting_stands_in_the_table_with_variable_and_default() -> None:
    """The table of settings names each field, its environment variable and its default."""
    text = BY_NAME["settings.md"].path.read_text()
    rows = {line.split("|")[1].strip(" `"): line for line in text.splitlines() if "|" in line}
    variables = {setting: name for name, (setting, _, _) in settings._VARIABLES.items()}
    for field in fields(settings.Settings):
        row = rows[field.name]
        assert f"`{variables[field.name]}`" in row
        assert f"`{field.default!r}`" in row


def test_every_environment_variable_is_documented() -> None:
    """Each SHMREDUCE_ variable that the sources name stands on the page of settings."""
    text = BY_NAME["settings.md"].path.read_text()
    sources = [*(ROOT / "shmreduce").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]
    used = {
        variable
        for source in sources
        for variable in re.findall(r"\bSHMREDUCE_[A-Z_]+\b", source.read_text())
    }
    assert sorted(variable for variable in used if f"`{variable}`" not in text) == []


def test_contributors_are_told_of_the_variables_of_the_tests() -> None:
    """Each variable by which the tests can be made longer stands in CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    reads = re.compile(r"^.*environ\.get\(\s*\"(SHMREDUCE_\w+)\"", re.MULTILINE)
    sources = (ROOT / "tests").rglob("test_*.py")
    used = {name for source in sources for name in reads.findall(source.read_text())}
    assert len(used) > 5
    assert sorted(name for name in used if f"`{name}`" not in text) == []


@pytest.mark.parametrize(
    "hook", [name for name in hookspecs.__all__ if name.startswith("shmreduce_")]
)
def test_every_hook_has_a_section_with_an_example(hook: str) -> None:
    """A hook's section shows a plugin that implements it."""
    section = section_of(hook)
    assert section is not None
    assert f"def {hook}" in section


@pytest.mark.parametrize("name", [*testing.__all__, *pytest_plugin.__all__])
def test_every_name_of_the_testing_package_has_a_section(name: str) -> None:
    """What plugins' tests may use stands on the page of testing."""
    assert BY_NAME["testing.md"].section(name) is not None


@pytest.mark.parametrize("page", REFERENCE, ids=lambda page: page.name)
def test_sections_are_about_names_that_exist(page: Page) -> None:
    """A heading that begins with a name in code is about something public."""
    known = {*shmreduce.__all__, *hookspecs.__all__, *testing.__all__, *pytest_plugin.__all__}
    names = [match[1] for _, text in page.headings() if (match := re.match(r"`(\w+)[`(]", text))]
    if page.name != "docs/reference/command-line.md":
        assert sorted(set(names) - known) == []


def test_the_page_on_architecture_names_every_module() -> None:
    """The tables of modules hold all of the core, of its two packages, and all plugins."""
    text = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    core = ROOT / "shmreduce"
    names = {
        path.stem
        for folder in (core, core / "memory", core / "born", ROOT / "plugins")
        for path in folder.iterdir()
        if not path.name.startswith("_") and (path.is_dir() or path.suffix == ".py")
    }
    assert sorted(name for name in names if f"`{name}`" not in text) == []


def test_the_table_of_the_memory_package_begins_with_the_lowest() -> None:
    """Its modules stand in the order of their layers."""
    text = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    table = text.partition("The package `memory`, lowest first:")[2].partition("\n\nThe package")[
        0
    ]
    names = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    layers = [layer_of(name, MEMORY_LAYERS) for name in names]
    assert len(names) == sum(map(len, MEMORY_LAYERS))
    assert layers == sorted(layers)
