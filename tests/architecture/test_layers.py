"""Who may import whom."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import shmreduce

if TYPE_CHECKING:
    from collections.abc import Iterator

CORE = Path(shmreduce.__file__).parent
PLUGINS = {
    name: Path(__import__(name).__file__ or "").parent
    for name in (
        "shmreduce_numpy",
        "shmreduce_memoryview",
        "shmreduce_cuda",
        "shmreduce_fd",
        "shmreduce_filesystem",
    )
}

LAYERS = [
    {"fork_hooks", "interpreter", "stack"},
    {
        "borrowed_socket",
        "compiled",
        "copy_trials",
        "descriptor",
        "importing",
        "pickled_calls",
        "processors",
        "signals",
        "thread_locks",
    },
    {"errors", "process_ends", "receive_buffer", "standard_names", "tracebacks"},
    {"contracts", "copying", "free_descriptors"},
    {"settings"},
    {"hookspecs", "registry"},
    {"entry_points"},
    {"plugin"},
    {"plugin_import"},
    {"discovery"},
    {"process_registry"},
    {"strategies"},
    {"memory"},
    {"born"},
    {"channel_support", "moving", "unpickling"},
    {
        "children",
        "remote",
        "arrays",
        "plain_objects",
        "presized_pickle",
        "short_waits",
        "standard_pools",
    },
    {"pickler"},
    {"handle_calls", "pickling"},
    {"forking"},
    {"extras", "launching", "managers", "packet_socket"},
    {"packets"},
    {"pool_backpressure", "pool_errors", "pool_results", "pool_self_pipe", "pool_task_ring"},
    {"connection", "interrupts", "prctl", "queue_feeder", "queue_locks"},
    {"pool_progress_bar", "pool_tasks", "pool_worker_progress"},
    {"parent_death", "pool_channel", "queues"},
    {"fresh_process", "pool_worker_handle", "pool_worker", "spawn_child"},
    {"pool_dispatch", "pool_worker_start", "process_context"},
    {"pool_arguments", "pool_supervisor"},
    {"channel_factories", "interpreter_shutdown", "pool_feeding"},
    {"context"},
    {"pool"},
    {"executor", "spawning"},
]
"""Lowest first. What is not named here stands above all of these."""
UPWARDS = {("channel_factories", "pool")}
"""Each of the two needs the other: the method of a context that makes a pool imports it then."""
MEMORY_LAYERS = [
    {"quick_blocks", "standard_streams"},
    {"anonymous", "locks", "mapping", "handle", "processes"},
    {"layout"},
    {"block_locks", "quick_slots", "segment_file", "size_classes"},
    {"lease_slots"},
    {"lease_transitions"},
    {"lease", "segment"},
    {"owned_segment"},
    {"ledger", "mailbox", "sweep"},
    {"family"},
    {"headroom"},
    {"reservation"},
    {"segment_creation"},
    {"heap"},
    {"attachments"},
    {"record"},
    {"visible_records"},
    {"blocks"},
    {"handover", "idle"},
    {"process_memory"},
    {"runtime", "filling", "borrowing", "mover"},
    {"allocation", "inheritance", "loading"},
    {"parts"},
    {"message"},
    {"inspection", "lending", "one_buffer"},
]
SAYS_MORE = re.compile(
    r"everything\s+below|every\s+module|other\s+modules|is\s+below|the\s+commands"
)
"""What stands in the docstring of a module for more modules than it could name."""


class Imports(ast.NodeVisitor):
    """Collects what a module imports when it runs, inside functions too."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.found: list[tuple[str, str | None]] = []

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for statement in node.orelse:
                self.visit(statement)
            return
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [(alias.name, None) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, "imports are absolute here"
        self.found += [(node.module or "", alias.name) for alias in node.names]


def modules(folder: Path, package: str) -> Iterator[tuple[str, Path]]:
    """Yield the dotted name and the file of every module of a package."""
    for path in sorted(folder.rglob("*.py")):
        parts = [package, *path.relative_to(folder).with_suffix("").parts]
        yield ".".join(parts).removesuffix(".__init__"), path


def imports_of(path: Path, package: str) -> list[tuple[str, str | None]]:
    """Return (module, name or None) of every import in a file."""
    visitor = Imports(package)
    visitor.visit(ast.parse(path.read_text()))
    return visitor.found


def submodules_imported(path: Path) -> set[str]:
    """Return the modules of shmreduce that a file imports, as ``memory.heap``."""
    found = set()
    known = {name for name, _ in modules(CORE, "shmreduce")}
    for module, name in imports_of(path, "shmreduce"):
        if module.split(".")[0] != "shmreduce":
            continue
        full = f"{module}.{name}" if name and f"{module}.{name}" in known else module
        found.add(full.removeprefix("shmreduce").removeprefix("."))
    return found


def layer_of(part: str, layers: list[set[str]]) -> int:
    """Return a module's layer; above all if it is not named."""
    for number, layer in enumerate(layers):
        if part in layer:
            return number
    return len(layers)


CORE_MODULES = dict(modules(CORE, "shmreduce"))


@pytest.mark.parametrize("module", CORE_MODULES)
def test_lower_layers_do_not_import_higher_ones(module: str) -> None:
    """A module imports only from layers below its own, or from its own package."""
    part = module.removeprefix("shmreduce").removeprefix(".").split(".")[0]
    if not part:
        assert submodules_imported(CORE_MODULES[module]) == {"importing"}
        return
    own = layer_of(part, LAYERS)
    for imported in submodules_imported(CORE_MODULES[module]):
        other = imported.split(".")[0]
        if other != part and own < len(LAYERS) and (part, other) not in UPWARDS:
            assert other, f"{module} imports shmreduce itself, not the module that it needs"
            assert layer_of(other, LAYERS) < own, f"{module} imports {imported}"


@pytest.mark.parametrize(
    "module", [each for each in CORE_MODULES if each.startswith("shmreduce.memory.")]
)
def test_memory_is_layered_too(module: str) -> None:
    """Inside the memory package, too, lower modules do not import higher ones."""
    own = layer_of(module.split(".")[2], MEMORY_LAYERS)
    assert own < len(MEMORY_LAYERS), f"{module} is in no layer"
    for imported in submodules_imported(CORE_MODULES[module]):
        if imported.startswith("memory."):
            other = layer_of(imported.split(".")[1], MEMORY_LAYERS)
            assert other < own, f"{module} imports {imported}"


def late_imports_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield function and module of each import in a function of which forks are not told."""
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    prepared = {
        named
        for function in functions
        for named in modules_named(function, "import_module")
        if function.name == "prepare"
    }
    for function in functions:
        told = prepared | modules_named(function, "import_late")
        visitor = Imports("")
        visitor.visit(function)
        for module, name in visitor.found:
            if not {module, f"{module}.{name}"} & told:
                yield function.name, f"{module}.{name}" if module == "shmreduce" else module


def modules_named(function: ast.FunctionDef, call: str) -> set[str]:
    """Return the modules that a function names in calls of another one."""
    return {
        node.args[0].value
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == call
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    }


NOT_TOLD = {
    # While plugins are loaded, forks wait.
    ("shmreduce.process_registry", "shmreduce.discovery"),
    ("shmreduce.entry_points", "importlib.metadata"),
    ("shmreduce.entry_points", "pathlib"),
    # What is there for sure, imported already by others.
    ("shmreduce.children", "multiprocessing"),
    ("shmreduce.pool_errors", "concurrent.futures.process"),
    ("shmreduce_numpy.factory", "numpy"),
    # Perhaps under a lock that a fork waits for: where there is no memfd_create(), and in
    # destructors.
    ("shmreduce.memory.anonymous", "tempfile"),
    ("shmreduce.memory.handle", "ctypes"),
    # Only doctor calls it.
    ("shmreduce.memory.headroom", "pathlib"),
}
"""Who may import what without telling forks."""


@pytest.mark.parametrize("package", ["shmreduce", *PLUGINS])
def test_forks_are_told_of_imports_in_functions(package: str) -> None:
    """A child that is forked while a thread imports a module could never import it."""
    folder = CORE if package == "shmreduce" else PLUGINS[package]
    untold = set()
    for module, path in modules(folder, package):
        part = module.split(".")[1:2]
        is_command = package == "shmreduce" and layer_of("".join(part), LAYERS) == len(LAYERS)
        if is_command or part == ["verify"]:
            continue
        for function, imported in late_imports_of(ast.parse(path.read_text())):
            # These hooks are called while plugins are loaded, or in the same way.
            if not function.startswith("shmreduce_"):
                untold.add((module, imported))
    assert untold == {each for each in NOT_TOLD if each[0].split(".")[0] == package}


@pytest.mark.parametrize("module", CORE_MODULES)
def test_core_knows_no_array_library_and_no_plugin(module: str) -> None:
    """The layers of the core import neither numpy nor any plugin."""
    part = module.removeprefix("shmreduce").removeprefix(".").split(".")[0]
    roots = {name.split(".")[0] for name, _ in imports_of(CORE_MODULES[module], "shmreduce")}
    assert not roots & set(PLUGINS)
    if not part or layer_of(part, LAYERS) < len(LAYERS):
        assert not roots & {"numpy", "torch", "pandas", "scipy"}


@pytest.mark.parametrize("module", CORE_MODULES)
def test_each_task_has_one_place(module: str) -> None:
    """Entry points are read in one module only, ForkingPickler is changed in forking only.

    pickler and plain_objects look what others have put into it, and two other modules call it.
    """
    tree = ast.parse(CORE_MODULES[module].read_text())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if module != "shmreduce.entry_points":
        assert "entry_points" not in names
    part = module.split(".")[1:2]
    users = {
        f"shmreduce.{name}"
        for name in (
            "forking",
            "pickler",
            "pickling",
            "plain_objects",
            "pool_channel",
            "spawn_child",
        )
    }
    if part and layer_of(part[0], LAYERS) < len(LAYERS) and module not in users:
        assert "ForkingPickler" not in names


@pytest.mark.parametrize("module", CORE_MODULES)
def test_each_module_says_what_it_may_import(module: str) -> None:
    """The docstring of a module has a word about imports."""
    documentation = ast.get_docstring(ast.parse(CORE_MODULES[module].read_text())) or ""
    assert re.search(r"\bmay\s+import\b|\bimports\b", documentation, re.IGNORECASE)


@pytest.mark.parametrize("module", CORE_MODULES)
def test_what_is_imported_is_what_the_docstring_says(module: str) -> None:
    """The docstring names each module that is imported, its package, or all that is below."""
    documentation = ast.get_docstring(ast.parse(CORE_MODULES[module].read_text())) or ""
    if SAYS_MORE.search(documentation):
        return
    said = set(re.findall(r"\w+", documentation))
    own = set(module.split(".")[1:2])
    for imported in submodules_imported(CORE_MODULES[module]):
        names = set((imported or "shmreduce").split(".")) - own
        assert names & said, f"{module} imports {imported}, which its docstring does not name"


@pytest.mark.parametrize("plugin", PLUGINS)
def test_plugins_use_public_names_only(plugin: str) -> None:
    """A shipped plugin imports nothing of shmreduce but names of ``__all__``."""
    for module, path in modules(PLUGINS[plugin], plugin):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                root = node.module.split(".")[0]
                if root == "shmreduce":
                    assert node.module == "shmreduce", f"{module} imports {node.module}"
                    names = {alias.name for alias in node.names}
                    assert names <= set(shmreduce.__all__), f"{module} imports {names}"
                elif root.startswith("shmreduce_"):
                    assert root == plugin, f"{module} imports another plugin"
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    assert not alias.name.startswith("shmreduce."), f"{module}: {alias.name}"
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "shmreduce"
            ):
                assert node.attr in shmreduce.__all__, f"{module} uses shmreduce.{node.attr}"
