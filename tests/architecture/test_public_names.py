"""The public interface: complete, documented, and quick to import."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pluggy
import pytest

import shmreduce
from shmreduce import errors, hookspecs

FUNCTIONS = {
    "allocate",
    "array",
    "copy_bytes",
    "copy_in_parts",
    "empty",
    "find_block",
    "full",
    "get_all_sharing_strategies",
    "get_settings",
    "get_sharing_strategy",
    "get_thread_name",
    "import_block",
    "import_late",
    "install",
    "is_shared",
    "ones",
    "open_process_descriptor",
    "register_reducer",
    "set_sharing_strategy",
    "set_thread_name",
    "share",
    "shared_allocations",
    "spawn",
    "start_processes",
    "uninstall",
    "unregister_reducer",
    "zeros",
}
CLASSES = {
    "AllocatorFunctions",
    "ArrayFactory",
    "Block",
    "Installation",
    "MemoryHandlers",
    "Message",
    "ProcessContext",
    "ProcessPoolExecutor",
    "Reducer",
    "SegmentFile",
    "Settings",
    "SharingStrategy",
    "SpawnContext",
}
OTHERS = {"ENV_VAR_PARALLEL_START", "Mode", "__version__", "hookimpl"}
STANDARD = set(multiprocessing.__all__)
"""Those of the standard library, which documents them."""


def in_fresh_interpreter(program: str) -> str:
    """Return what a program prints that a new interpreter runs."""
    return subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    ).stdout


def test_public_names_are_exactly_these() -> None:
    """``__all__`` is sorted and holds the documented names and all errors."""
    assert sorted(shmreduce.__all__) == sorted(
        FUNCTIONS | CLASSES | OTHERS | STANDARD | set(errors.__all__)
    )
    assert len(set(shmreduce.__all__)) == len(shmreduce.__all__)


@pytest.mark.parametrize("name", shmreduce.__all__)
def test_each_public_name_can_be_had(name: str) -> None:
    """Every name of ``__all__`` is importable and listed by ``dir``."""
    assert getattr(shmreduce, name) is not None
    assert name in dir(shmreduce)


def test_type_checkers_see_the_same_names() -> None:
    """The imports for type checkers and the lazy ones name the same modules."""
    tree = ast.parse(Path(shmreduce.__file__).read_text())
    [block] = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    declared = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    lazy = dict.fromkeys(errors.__all__, "shmreduce.errors") | shmreduce._MODULE_OF
    modules = dict.fromkeys(shmreduce._OTHER_MODULES, "multiprocessing") | dict.fromkeys(
        shmreduce._SHARED_MODULES, "shmreduce"
    )
    assert declared == lazy | modules


@pytest.mark.parametrize("name", sorted(shmreduce._SHARED_MODULES))
def test_modules_export_what_the_standard_ones_do(name: str) -> None:
    """Type checkers and ``import *`` find the names of the standard module in ours."""
    ours = importlib.import_module(f"shmreduce.{name}")
    standard = importlib.import_module(f"multiprocessing.{name}")
    assert set(standard.__all__) <= set(getattr(ours, "__all__", ()))
    for exported in getattr(ours, "__all__", ()):
        assert getattr(ours, exported) is not None


@pytest.mark.parametrize(
    "name",
    [
        "connection",
        "context",
        "dummy",
        "managers",
        "pool",
        "process",
        "queues",
        "reduction",
        "shared_memory",
        "sharedctypes",
        "synchronize",
        "util",
    ],
)
def test_modules_that_programs_import_can_be_imported(name: str) -> None:
    """Import lines can be changed by replacing one word, and the attribute stays what it was."""
    before = getattr(shmreduce, name)
    imported = importlib.import_module(f"shmreduce.{name}")
    assert imported is before is getattr(shmreduce, name)
    if name in shmreduce._OTHER_MODULES:
        assert imported is importlib.import_module(f"multiprocessing.{name}")


def test_unknown_name_is_an_attribute_error() -> None:
    """A name that does not exist is an AttributeError, as for any module."""
    with pytest.raises(AttributeError, match="has no attribute 'instal'"):
        shmreduce.instal  # noqa: B018


def test_import_brings_nothing_along() -> None:
    """``import shmreduce`` imports next to no other modules."""
    new = in_fresh_interpreter(
        "import sys; before = set(sys.modules); import shmreduce; "
        "print(*sorted(set(sys.modules) - before))"
    )
    modules = {"shmreduce", "shmreduce.importing", "shmreduce.fork_hooks"}
    assert set(new.split()) <= {*modules, "__future__"}


@pytest.mark.parametrize("name", sorted(FUNCTIONS | CLASSES | {"hookimpl"}))
def test_no_public_name_imports_numpy(name: str) -> None:
    """To import a public name, and to install, numpy is not needed."""
    loaded = in_fresh_interpreter(f"import sys, shmreduce; shmreduce.{name}; print(*sys.modules)")
    assert "numpy" not in loaded.split()


@pytest.mark.parametrize("name", sorted(FUNCTIONS | CLASSES | set(errors.__all__)))
def test_each_public_name_is_documented(name: str) -> None:
    """Every public function and class has a docstring of its own."""
    documentation = getattr(shmreduce, name).__doc__
    assert documentation
    assert len(documentation.splitlines()[0]) > 15


@pytest.mark.parametrize("name", sorted(FUNCTIONS - {"get_settings"}))
def test_each_function_has_an_example(name: str) -> None:
    """Every public function shows an example, which the tests execute."""
    documentation = getattr(shmreduce, name).__doc__
    assert doctest.DocTestParser().get_examples(documentation)


def hooks() -> list[str]:
    """Return the names of all hook specifications."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return [name for name in vars(manager.hook) if name.startswith("shmreduce_")]


def test_hooks_are_exactly_these() -> None:
    """There are four hooks."""
    assert sorted(hooks()) == [
        "shmreduce_array_factory",
        "shmreduce_memory_handlers",
        "shmreduce_reducers",
        "shmreduce_strategies",
    ]


@pytest.mark.parametrize("hook", hooks())
def test_each_hook_is_annotated_and_shows_an_example(hook: str) -> None:
    """Every hook says what it returns, in its annotation and by an example."""
    function = getattr(hookspecs, hook)
    assert inspect.signature(function).return_annotation is not inspect.Signature.empty
    assert "Returns\n" in function.__doc__
    assert any(
        "hookimpl" in example.source
        for example in doctest.DocTestParser().get_examples(function.__doc__)
    )
