"""Finding plugins, loading them, and telling what became of each."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from importlib import metadata
from importlib.metadata import EntryPoint, distributions
from typing import TYPE_CHECKING, Any

import pytest

import shmreduce
from shmreduce import (
    PluginError,
    Reducer,
    ReducerConflictError,
    ReducerError,
    SegmentError,
    Settings,
    ShmreduceWarning,
    StrategyConflictError,
    register_reducer,
    unregister_reducer,
)
from shmreduce.discovery import Plugins
from shmreduce.entry_points import (
    Told,
    ToldEntryPoint,
    installed_entry_points,
    name_and_version,
    search_path,
    tell,
)
from shmreduce.process_registry import (
    get_memory_handlers,
    get_plugins,
    get_registry,
    plugin_report,
    registered_by_hand,
    take_over_reducers,
)
from shmreduce.registry import Registry
from shmreduce.settings import get_settings, set_settings
from tests.conftest import PATIENCE
from tests.faults.injection import no_descriptors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from shmreduce.plugin import PluginReport
    from tests.conftest import Children

REDUCER = """
    from shmreduce import Reducer, hookimpl

    class TheReducer(Reducer):
        types = ("{claimed}",)

        def reduce(self, obj, message):
            return NotImplemented

    @hookimpl
    def shmreduce_reducers():
        return [TheReducer()]
"""
FACTORY = """
    from shmreduce import hookimpl

    class Factory:
        def empty(self):
            return {made!r}

        zeros = ones = full = array = empty

    @hookimpl
    def shmreduce_array_factory():
        return Factory()
"""
STRATEGY = """
    from shmreduce import SharingStrategy, hookimpl

    class TheStrategy(SharingStrategy):
        name = "{name}"

        def unusable_reason(self):
            return "it is for tests"

        def create(self, size, token):
            raise NotImplementedError

        locator = open = create

    @hookimpl
    def shmreduce_strategies():
        return [TheStrategy()]
"""


class Installer:
    """Writes distributions with plugins into a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: list[str] = []

    def install(
        self, name: str, source: str, *, distribution: str | None = None, module: str | None = None
    ) -> None:
        """Install one distribution with one plugin."""
        module = module or f"plugin_module_{name}"
        distribution = distribution or f"dist-of-{name}"
        self.modules.append(module)
        (self.folder / f"{module}.py").write_text(textwrap.dedent(source))
        metadata = self.folder / f"{distribution.replace('-', '_')}-1.5.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.5\n"
        )
        (metadata / "entry_points.txt").write_text(f"[shmreduce]\n{name} = {module}\n")

    def install_damaged(self, distribution: str, file: str, content: bytes) -> None:
        """Install a distribution with a plugin, one of whose files has this content."""
        self.install("damaged", REDUCER.format(claimed="example.X"), distribution=distribution)
        (self.folder / f"{distribution}-1.5.dist-info" / file).write_bytes(content)

    def found(self) -> list[EntryPoint]:
        """Return the entry points that are installed in the folder."""
        return [
            entry_point
            for distribution in distributions(path=[str(self.folder)])
            for entry_point in distribution.entry_points
        ]

    def plugins(self, *, twice: bool = False) -> Plugins:
        """Return the plugins that are installed in the folder."""
        found = self.found()
        return Plugins(Registry(), found * 2 if twice else found)


@pytest.fixture
def installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installer]:
    """An empty folder to install plugins into."""
    monkeypatch.syspath_prepend(tmp_path)
    installer = Installer(tmp_path)
    yield installer
    for module in installer.modules:
        sys.modules.pop(module, None)


def synchronise(plugins: Plugins, settings: Settings) -> None:
    """Load the plugins that the settings ask for, and drop the others, in one thread."""
    for imported in plugins.import_wanted(settings):
        plugins.take(imported)
    plugins.register_wanted(settings)


def report_of(plugins: Plugins, name: str) -> PluginReport:
    """Return the report on one plugin."""
    [report] = [each for each in plugins.reports() if each.name == name]
    return report


def made_by(plugins: Plugins) -> Any:
    """Return what the array factory of the plugins makes."""
    factory: Any = plugins.array_factory()
    return factory.empty()


def test_shipped_plugins_are_found() -> None:
    """The five shipped plugins come in through entry points and are loaded."""
    status = {report.name: report.status for report in plugin_report()}
    shipped = ("cuda", "file_descriptor", "file_system", "memoryview", "numpy")
    assert {name: status.get(name) for name in shipped} == dict.fromkeys(shipped, "loaded")


def test_report_tells_where_a_plugin_came_from(installer: Installer) -> None:
    """The report names distribution, version, file and what is provided."""
    installer.install("one", REDUCER.format(claimed="decimal.Decimal"))
    plugins = installer.plugins()
    synchronise(plugins, Settings())
    report = report_of(plugins, "one")
    assert (report.distribution, report.version) == ("dist-of-one", "1.5")
    assert report.path == str(installer.folder / "plugin_module_one.py")
    assert report.reducers == ("decimal.Decimal",)
    assert (report.status, report.reason) == ("loaded", "")


def test_report_tells_which_reducers_do_not_work_here(installer: Installer) -> None:
    """Reducers are asked for their reasons where the caller wants to know, and not else;
    one that raises is told, too.
    """
    source = REDUCER.format(claimed="decimal.Decimal")
    for name, answer in (("one", 'return "there is no decimal point"'), ("two", "1 / 0")):
        method = f"\n        def unusable_reason(self):\n            {answer}\n"
        claimed = source.replace("return NotImplemented\n", f"return NotImplemented\n{method}")
        installer.install(name, claimed.replace("decimal.Decimal", f"decimal.Decimal{name}"))
    plugins = installer.plugins()
    synchronise(plugins, Settings())
    assert all(not report.unusable for report in plugins.reports())
    one, two = plugins.reports(ask=True)
    assert one.unusable == ("TheReducer: there is no decimal point",)
    assert two.unusable == ("TheReducer: ZeroDivisionError: division by zero",)
    assert (one.status, two.status) == ("loaded", "loaded")


def test_plugins_come_sorted_and_once(installer: Installer) -> None:
    """An entry point that is found twice counts once, and the order is that of the names."""
    for name in ("zulu", "alpha", "mike"):
        installer.install(name, REDUCER.format(claimed=f"package.{name}"))
    plugins = installer.plugins(twice=True)
    synchronise(plugins, Settings())
    assert [report.name for report in plugins.reports()] == ["alpha", "mike", "zulu"]
    assert {report.status for report in plugins.reports()} == {"loaded"}


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("class Panic(BaseException): ...\nraise Panic('in Rust')", "Panic: in Rust"),
        ("raise RuntimeError('no luck')", "RuntimeError: no luck"),
        ("import a_module_that_is_not_there", "ModuleNotFoundError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        (
            "from shmreduce import hookimpl\n@hookimpl\ndef shmreduce_reducer():\n    return []",
            "unknown hook 'shmreduce_reducer'",
        ),
        (
            "from shmreduce import hookimpl\n@hookimpl\ndef shmreduce_reducers(x):\n    return []",
            "Argument(s) {'x'}",
        ),
        (
            "from shmreduce import hookimpl\n@hookimpl\ndef shmreduce_reducers():\n    return [3]",
            "3 is not a Reducer",
        ),
        (
            "from shmreduce import hookimpl\n@hookimpl\ndef shmreduce_reducers():\n    return 3",
            "TypeError",
        ),
        ("def shmreduce_strategies():\n    return []", "shmreduce_strategies() is not marked"),
        (
            "from shmreduce import hookimpl\n@hookimpl\ndef shmreduce_reducers():\n    pass",
            "shmreduce_reducers() returned None",
        ),
        (
            "from shmreduce import hookimpl\n@hookimpl\ndef shmreduce_strategies():\n  return [3]",
            "3 is not a SharingStrategy",
        ),
        (
            "from shmreduce import hookimpl\n@hookimpl\ndef shmreduce_array_factory():\n  1 / 0",
            "ZeroDivisionError",
        ),
        (
            "from shmreduce import hookimpl\n@hookimpl\ndef shmreduce_array_factory():\n return 5",
            "returned 5: it must return an object with the methods of ArrayFactory",
        ),
    ],
)
def test_broken_plugin_takes_nobody_down(installer: Installer, source: str, reason: str) -> None:
    """A broken plugin is reported with its distribution and reason; the others work."""
    installer.install("broken", source)
    installer.install("after", REDUCER.format(claimed="package.after"))
    installer.install("zulu", REDUCER.format(claimed="package.zulu"))
    plugins = installer.plugins()
    with pytest.warns(ShmreduceWarning, match="'broken' of distribution dist-of-broken 1.5"):
        synchronise(plugins, Settings())
    report = report_of(plugins, "broken")
    assert report.status == "broken"
    assert reason in report.reason
    assert len(plugins.registry.reducers()) == 2


def test_broken_plugin_is_warned_about_once(installer: Installer) -> None:
    """Later synchronisations, with other settings too, are silent."""
    installer.install("broken", "raise RuntimeError('no luck')")
    plugins = installer.plugins()
    with pytest.warns(ShmreduceWarning):
        synchronise(plugins, Settings())
    synchronise(plugins, Settings())
    synchronise(plugins, Settings(blocked=("other",)))
    assert plugins.warned() == ("broken",)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"[shmreduce]\ndamaged\n", id="no value"),
        pytest.param(b"[shmreduce]\ndamaged = caf\xe9\n", id="no text"),
        pytest.param(b"[shmreduce]\ndamaged = not a module!\n", id="no module"),
    ],
)
def test_damaged_entry_points_take_nobody_down(installer: Installer, content: bytes) -> None:
    """A distribution whose entry points cannot be read is reported, the others are used."""
    installer.install_damaged("damaged", "entry_points.txt", content)
    installer.install("fine", REDUCER.format(claimed="example.Z"))
    plugins = Plugins(Registry())
    with pytest.warns(ShmreduceWarning, match="works without plugin 'damaged' of distribution"):
        synchronise(plugins, Settings())
    report = report_of(plugins, "damaged")
    assert (report.status, report.distribution) == ("broken", "damaged")
    assert {report_of(plugins, name).status for name in ("fine", "numpy")} == {"loaded"}
    synchronise(plugins, Settings(blocked=("damaged",)))
    assert report_of(plugins, "damaged").status == "blocked"


def test_damaged_entry_points_of_others_are_nobodys_business(installer: Installer) -> None:
    """What has no plugins is not looked at, damaged or not."""
    installer.install_damaged("damaged", "entry_points.txt", b"[console_scripts]\ndamaged\n")
    plugins = Plugins(Registry())
    synchronise(plugins, Settings())
    assert "damaged" not in [report.name for report in plugins.reports()]


@pytest.mark.parametrize("content", [b"Metadata-Version: 2.1\n", b"Name: caf\xe9\n"])
def test_damaged_metadata(installer: Installer, content: bytes) -> None:
    """A plugin of a distribution without a readable name is used like any other."""
    installer.install_damaged("damaged", "METADATA", content)
    plugins = installer.plugins()
    synchronise(plugins, Settings())
    report = report_of(plugins, "damaged")
    assert (report.status, report.distribution, report.version) == ("loaded", "unknown", "unknown")


def test_one_module_by_two_names(installer: Installer) -> None:
    """The second name of a plugin is refused; what the first provides stays whole."""
    source = FACTORY.format(made="the array")
    installer.install("zz", source)
    installer.install("aa", source, module="plugin_module_zz")
    plugins = installer.plugins()
    with pytest.warns(ShmreduceWarning, match="it is the same object as plugin 'zz'"):
        synchronise(plugins, Settings())
    assert [report.status for report in plugins.reports()] == ["broken", "loaded"]
    assert made_by(plugins) == "the array"
    synchronise(plugins, Settings(blocked=("zz",)))
    assert [report.status for report in plugins.reports()] == ["loaded", "blocked"]
    assert made_by(plugins) == "the array"


def test_objects_that_are_equal_are_told_apart(installer: Installer) -> None:
    """One of them is refused, and the other stays whole."""
    source = (
        FACTORY.format(made="the array")
        + """
    class Equal:
        def __hash__(self):
            return 1

        def __eq__(self, other):
            return True

        shmreduce_array_factory = staticmethod(shmreduce_array_factory)

    one, two = Equal(), Equal()
"""
    )
    installer.install("zz", source)
    module = importlib.import_module("plugin_module_zz")
    points = [
        EntryPoint(name, f"{module.__name__}:{name}", "shmreduce") for name in ("one", "two")
    ]
    plugins = Plugins(Registry(), points)
    with pytest.warns(ShmreduceWarning, match="its object equals that of plugin"):
        synchronise(plugins, Settings())
    assert sorted(report.status for report in plugins.reports()) == ["broken", "loaded"]
    assert made_by(plugins) == "the array"


def test_an_entry_point_that_names_none_is_broken(installer: Installer) -> None:
    """It is not imported again with each message."""
    installer.install("zz", "plugin = None")
    plugins = Plugins(Registry(), [EntryPoint("none", "plugin_module_zz:plugin", "shmreduce")])
    with pytest.warns(ShmreduceWarning, match="the entry point names None"):
        synchronise(plugins, Settings())
    assert report_of(plugins, "none").status == "broken"
    assert list(plugins.import_wanted(Settings())) == []


def test_a_plugin_is_not_broken_for_lack_of_descriptors(installer: Installer) -> None:
    """It is imported when some are free: the caller gets an error that may pass."""
    installer.install(
        "zz",
        "import os\nos.close(os.open(os.devnull, os.O_RDONLY))\n"
        + FACTORY.format(made="the array").replace("\n    ", "\n"),
    )
    plugins = installer.plugins()
    importlib.invalidate_caches()
    with no_descriptors(), pytest.raises(SegmentError, match="no descriptor is free to import"):
        synchronise(plugins, Settings())
    synchronise(plugins, Settings())
    assert report_of(plugins, "zz").status == "loaded"


def test_a_conflict_of_a_plugin_that_gives_more_is_told(installer: Installer) -> None:
    """What else it gives was not checked then, and need not have a name."""
    source = REDUCER.format(claimed="example.X")
    installer.install("aa", source)
    nameless = STRATEGY.format(name="x").replace('name = "x"', "pass")
    installer.install("bb", source + nameless)
    plugins = installer.plugins()
    with pytest.raises(ReducerConflictError):
        synchronise(plugins, Settings())
    assert {report.status for report in plugins.reports()} == {"loaded", "conflict"}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("5", "returned 5: it must return an object with the methods of MemoryHandlers"),
    ],
)
def test_broken_memory_handlers_take_nobody_down(
    installer: Installer, answer: str, reason: str
) -> None:
    """A plugin that has none when it is asked for them is passed over, and told of."""
    hook = """
        from shmreduce import hookimpl

        class Handlers:
            def get(self):
                return "the handler"

            make = set = get

        @hookimpl
        def shmreduce_memory_handlers():
            return {answer}
    """
    installer.install("broken", hook.format(answer=answer))
    installer.install("other", hook.format(answer="Handlers()"))
    plugins = installer.plugins()
    synchronise(plugins, Settings())
    with pytest.warns(ShmreduceWarning, match="'broken' of distribution dist-of-broken 1.5"):
        handlers = plugins.memory_handlers()
    assert handlers is not None
    assert handlers.get() == "the handler"
    assert report_of(plugins, "broken").status == "broken"
    assert reason in report_of(plugins, "broken").reason
    handlers = plugins.memory_handlers()
    assert handlers is not None
    assert handlers.get() == "the handler"


def test_half_broken_plugin_leaves_nothing(installer: Installer) -> None:
    """If one of a plugin's reducers is bad, none of them stays registered."""
    source = REDUCER.format(claimed="package.Good")
    installer.install("half", source.replace("[TheReducer()]", "[TheReducer(), 3]"))
    plugins = installer.plugins()
    with pytest.warns(ShmreduceWarning):
        synchronise(plugins, Settings())
    assert plugins.registry.reducers() == []


def test_blocking_takes_out_and_brings_back(installer: Installer) -> None:
    """A plugin that is blocked later loses its claims; unblocked it has them again."""
    installer.install("one", REDUCER.format(claimed="decimal.Decimal"))
    installer.install("two", STRATEGY.format(name="two"))
    plugins = installer.plugins()
    synchronise(plugins, Settings())
    [claim] = plugins.registry.reducers()
    synchronise(plugins, Settings(blocked=("one", "two")))
    assert plugins.registry.reducers() == []
    assert not plugins.registry.strategies()
    assert report_of(plugins, "one").status == "blocked"
    assert "SHMREDUCE_BLOCK" in report_of(plugins, "one").reason
    synchronise(plugins, Settings())
    assert plugins.registry.reducers()[0].reducer is claim.reducer


def test_blocked_plugin_is_not_imported(installer: Installer) -> None:
    """Blocking keeps a plugin's code from running at all."""
    installer.install("one", "raise RuntimeError('it ran')")
    plugins = installer.plugins()
    synchronise(plugins, Settings(blocked=("one",)))
    assert "plugin_module_one" not in sys.modules


def test_autoload_can_be_switched_off(installer: Installer) -> None:
    """With autoload off only the plugins that are named are loaded."""
    installer.install("one", REDUCER.format(claimed="package.One"))
    installer.install("two", REDUCER.format(claimed="package.Two"))
    plugins = installer.plugins()
    synchronise(plugins, Settings(autoload=False, plugins=("two",)))
    assert report_of(plugins, "one").status == "not loaded"
    assert report_of(plugins, "two").status == "loaded"
    assert "plugin_module_one" not in sys.modules


def test_naming_a_plugin_that_is_not_there_is_an_error(installer: Installer) -> None:
    """A misspelt plugin name is an error that lists the installed ones."""
    installer.install("one", REDUCER.format(claimed="package.One"))
    with pytest.raises(PluginError, match=r"no plugin 'oen'; installed are \['one'\]"):
        synchronise(installer.plugins(), Settings(plugins=("oen",)))


def test_conflict_names_both_plugins(installer: Installer) -> None:
    """Two plugins that claim one type are an error naming both distributions."""
    installer.install("one", REDUCER.format(claimed="package.Same"))
    installer.install("two", REDUCER.format(claimed="package.Same"))
    installer.install("third", REDUCER.format(claimed="package.Other"))
    plugins = installer.plugins()
    for _ in range(2):
        with pytest.raises(ReducerConflictError, match=r"package\.Same") as caught:
            synchronise(plugins, Settings())
        assert "dist-of-one 1.5" in str(caught.value)
        assert "dist-of-two 1.5" in str(caught.value)
    # The first by name has it.
    found = [report_of(plugins, name).status for name in ("one", "third", "two")]
    assert found == ["loaded", "loaded", "conflict"]
    synchronise(plugins, Settings(blocked=("one",)))
    assert report_of(plugins, "two").status == "loaded"


def test_strategy_conflict_names_both_plugins(installer: Installer) -> None:
    """Two plugins with a strategy of one name are an error naming both distributions."""
    installer.install("one", STRATEGY.format(name="same"))
    installer.install("two", STRATEGY.format(name="same"))
    with pytest.raises(StrategyConflictError, match="'same'") as caught:
        synchronise(installer.plugins(), Settings())
    assert "dist-of-one 1.5" in str(caught.value)
    assert "dist-of-two 1.5" in str(caught.value)


def test_one_plugin_name_for_two_distributions(installer: Installer) -> None:
    """Of two plugins of one name the second is reported, with the first's distribution."""
    installer.install("same", REDUCER.format(claimed="package.A"), module="module_a")
    installer.install(
        "same", REDUCER.format(claimed="package.B"), module="module_b", distribution="other-dist"
    )
    plugins = installer.plugins()
    with pytest.warns(ShmreduceWarning, match="its name is taken by plugin 'same'") as caught:
        synchronise(plugins, Settings())
    # To block the name would block both.
    assert "SHMREDUCE_BLOCK" not in str(caught[0].message)
    assert sorted(report.status for report in plugins.reports()) == ["broken", "loaded"]


def test_array_factory_of_the_first_name(installer: Installer) -> None:
    """Among several array factories that of the first plugin name is taken."""
    for name in ("beta", "alpha"):
        installer.install(name, FACTORY.format(made=name))
    plugins = installer.plugins()
    synchronise(plugins, Settings())
    assert made_by(plugins) == "alpha"
    assert report_of(plugins, "beta").array_factory


class Signal:
    """A type of the tests' own."""


class SignalReducer(Reducer):
    types: Any = (Signal,)

    def reduce(self, obj: Any, message: Any) -> Any:
        return NotImplemented


@pytest.fixture
def by_hand() -> Iterator[Callable[[Reducer], None]]:
    """Registers reducers and unregisters what is left at the end."""
    before = registered_by_hand()
    yield register_reducer
    for reducer in registered_by_hand():
        if reducer not in before:
            unregister_reducer(reducer)


def test_registration_by_hand(by_hand: Callable[[Reducer], None]) -> None:
    """A reducer can be registered without a plugin, and its origin is the calling line."""
    reducer = SignalReducer()
    by_hand(reducer)
    by_hand(reducer)
    claim = get_registry().find(Signal)
    assert claim is not None
    assert claim.reducer is reducer
    assert claim.origin.startswith(f"registered in {__file__}, line ")
    unregister_reducer(reducer)
    assert get_registry().find(Signal) is None
    with pytest.raises(ReducerError):
        unregister_reducer(reducer)


def test_registering_a_second_instance_is_a_conflict(by_hand: Callable[[Reducer], None]) -> None:
    """Another reducer for the same type is an error, although of the same class."""
    by_hand(SignalReducer())
    with pytest.raises(ReducerConflictError):
        by_hand(SignalReducer())


def test_reducers_of_the_parent_make_way(by_hand: Callable[[Reducer], None]) -> None:
    """What the parent handed down and what the child registers itself are one registration."""
    first, second = SignalReducer(), SignalReducer()
    take_over_reducers([first])
    by_hand(second)
    take_over_reducers([SignalReducer()])
    claim = get_registry().find(Signal)
    assert claim is not None
    assert claim.reducer is second


def report_and_sources() -> tuple[list[PluginReport], set[type]]:
    plugins = get_plugins()
    return plugins.reports(), {type(each.entry_point) for each in plugins._plugins}


def test_children_are_told_which_plugins_there_are(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They look through no distribution, and say of each plugin what their parent says."""
    # Tests before this one may have had others on the path when they were looked for.
    monkeypatch.setattr(get_plugins(), "_searched", search_path())
    with shmreduce.install():
        reports, sources = children.call(report_and_sources)
    assert reports == plugin_report()
    assert {report.status for report in reports} == {"loaded"}
    assert sources == {EntryPoint if children.method == "fork" else ToldEntryPoint}


def told() -> Told:
    answer = tell(search_path(), installed_entry_points())
    assert answer is not None
    return answer


def names(found: list[Any]) -> set[str]:
    return {each.name for each in found}


def test_who_looks_elsewhere_finds_what_is_there(
    installer: Installer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a parent has found is taken for granted where imports look in the same places."""
    before = told()
    installer.install("late", REDUCER.format(claimed="example.Late"))
    assert "late" not in names(installed_entry_points(before))
    # As in a child whose main module puts there what it has put there in the parent.
    monkeypatch.setattr(sys, "path", [sys.path[0], *sys.path])
    assert "late" not in names(installed_entry_points(before))
    monkeypatch.setattr(sys, "path", [*sys.path, str(installer.folder / "elsewhere")])
    assert {"late", "numpy"} <= names(installed_entry_points(before))
    assert tell(before[0], []) is None


def test_what_was_told_is_loaded_as_what_was_found(installer: Installer) -> None:
    """A module, or what is in it, by a path of attributes."""
    module = b"plugin_module_damaged"
    content = b"[shmreduce]\nwhole = %b\npart = %b:TheReducer.types [extra]\n" % (module, module)
    installer.install_damaged("fine", "entry_points.txt", content)
    found = {each.name: each for each in installed_entry_points()}
    again = {each.name: each for each in installed_entry_points(told())}
    assert all(isinstance(each, ToldEntryPoint) for each in again.values())
    assert found["whole"].load() is again["whole"].load() is sys.modules["plugin_module_damaged"]
    assert found["part"].load() == again["part"].load() == ("example.X",)
    # And told on, by a child to its own.
    assert tell(search_path(), again.values()) == told()


LOOKS_IN_VAIN = """
import importlib.metadata
import os
import resource

# What has been imported needs no descriptor: only the search does.
import shmreduce
from shmreduce import discovery, entry_points, process_registry

soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
taken = [os.open(os.devnull, os.O_RDONLY)]
resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1, hard))
try:
    process_registry.get_plugins()
except shmreduce.SegmentError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print([each.name for each in process_registry.plugin_report()].count("numpy"))
"""


def test_plugins_are_not_lost_for_want_of_a_descriptor() -> None:
    """The search fails, and is made anew when one is free: that there are none is not found."""
    done = subprocess.run(
        [sys.executable, "-c", LOOKS_IN_VAIN],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert done.stdout.startswith("no descriptor is free to look for plugins: Too many open files")
    assert done.stdout.endswith("and try again\n1\n")


@pytest.mark.parametrize("content", [b"[shmreduce]\ndamaged\n", b"[shmreduce]\na = not one!\n"])
def test_what_is_damaged_is_looked_at_by_everybody(installer: Installer, content: bytes) -> None:
    """So that everybody says the same of it."""
    installer.install_damaged("damaged", "entry_points.txt", content)
    assert tell(search_path(), installed_entry_points()) is None


@pytest.mark.parametrize(
    ("owner", "step", "call"),
    [
        (metadata, "entry_points", installed_entry_points),
        (
            metadata.PathDistribution,
            "read_text",
            lambda: name_and_version(next(iter(distributions()))),
        ),
        (metadata.PathDistribution, "locate_file", told),
    ],
    ids=["looking", "reading", "telling"],
)
def test_what_a_signal_handler_raises_is_no_damage(
    monkeypatch: pytest.MonkeyPatch, owner: Any, step: str, call: Callable[[], object]
) -> None:
    """One that gives up after some time comes into the middle of it."""

    def give_up(*_: object) -> None:
        raise TimeoutError

    def interrupted(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, give_up)
    try:
        monkeypatch.setattr(owner, step, interrupted)
        with pytest.raises(TimeoutError):
            call()
    finally:
        signal.signal(signal.SIGALRM, before)


USER = """
    import shmreduce
    from shmreduce.process_registry import get_plugins

    MODES = shmreduce.get_all_sharing_strategies()
    OTHERS = {each.name for each in get_plugins().reports() if each.reducers or each.strategies}
"""


def follow_up(installer: Installer, monkeypatch: pytest.MonkeyPatch) -> Plugins:
    """Have the plugins of the folder be those of the process, beside the installed ones."""
    plugins = Plugins(Registry(), [*metadata.entry_points(group="shmreduce"), *installer.found()])
    monkeypatch.setattr("shmreduce.process_registry._process.plugins", plugins)
    return plugins


def test_a_plugin_that_uses_shmreduce_as_it_is_imported(
    installer: Installer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees what the others bring, and they it."""
    installer.install("a_user", USER + REDUCER.format(claimed="example.A"))
    installer.install("z_user", USER + REDUCER.format(claimed="example.Z"))
    installer.install("broken", "raise RuntimeError('on purpose')")
    plugins = follow_up(installer, monkeypatch)
    with pytest.warns(ShmreduceWarning, match="on purpose"):
        assert get_plugins() is plugins
    reports = {each.name: each for each in plugins.reports()}
    assert reports.pop("broken").status == "broken"
    assert {each.status for each in reports.values()} == {"loaded"}
    assert reports["a_user"].reducers == ("example.A",)
    modes, others = (
        getattr(sys.modules["plugin_module_z_user"], name) for name in ("MODES", "OTHERS")
    )
    assert {"file_descriptor", "file_system"} <= modes
    assert {"numpy", "memoryview"} <= others


def test_a_plugin_that_the_program_imports_uses_shmreduce(
    installer: Installer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hooks are asked for when its module has been executed, though the plugins were
    needed before that.
    """
    installer.install("user", USER + REDUCER.format(claimed="example.A"))
    plugins = follow_up(installer, monkeypatch)
    module = importlib.import_module("plugin_module_user")
    assert {"numpy", "memoryview"} <= module.OTHERS
    assert get_plugins() is plugins
    assert report_of(plugins, "user").reducers == ("example.A",)


def test_what_install_blocks_is_not_imported_for_another_plugin(
    installer: Installer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a plugin uses shmreduce as ``install`` imports it, it sees those that are not blocked."""
    installer.install("a_user", USER)
    installer.install("z_blocked", REDUCER.format(claimed="example.Z"))
    follow_up(installer, monkeypatch)
    with shmreduce.install(blocked=("z_blocked",)):
        assert "numpy" in sys.modules["plugin_module_a_user"].OTHERS
        assert report_of(get_plugins(), "z_blocked").status == "blocked"
        assert "plugin_module_z_blocked" not in sys.modules


def noting(log: Path, what: str) -> str:
    """Return a line of a plugin that notes in a file that it has been executed."""
    return f"with open({str(log)!r}, 'a') as log: log.write('{what} ')\n"


def test_a_broken_plugin_is_executed_once(
    installer: Installer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if plugins before and after it use shmreduce as they are imported; and again for
    other settings.
    """
    log = installer.folder / "log"
    for name in ("a_user", "z_user"):
        installer.install(name, USER)
    installer.install("broken", noting(log, "executed") + "1 / 0")
    plugins = follow_up(installer, monkeypatch)
    with pytest.warns(ShmreduceWarning, match="division by zero"):
        get_plugins()
    get_plugins()
    assert log.read_text() == "executed "
    synchronise(plugins, Settings(blocked=("nobody",)))
    assert log.read_text() == "executed executed "


def test_a_plugin_that_fails_again_is_broken_again(
    installer: Installer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again for other settings, and uses shmreduce each time before it fails."""
    installer.install("user", textwrap.dedent(USER) + "1 / 0")
    plugins = follow_up(installer, monkeypatch)
    with pytest.warns(ShmreduceWarning, match="division by zero"):
        get_plugins()
    assert report_of(plugins, "user").status == "broken"
    before = get_settings()
    set_settings(before.changed(blocked=("nobody",)))
    try:
        assert report_of(get_plugins(), "user").status == "broken"
    finally:
        set_settings(before)


def test_threads_that_load_at_the_same_time(
    installer: Installer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin is executed once, its hook asked once, and each thread has what it brings."""
    log = installer.folder / "log"
    source = textwrap.dedent(REDUCER.format(claimed="example.A"))
    hook = "def shmreduce_reducers():\n"
    asked = source.replace(hook, f"{hook}    {noting(log, 'asked')}")
    installer.install("one", noting(log, "executed") + asked)
    follow_up(installer, monkeypatch)
    together = threading.Barrier(8)
    answers: list[tuple[str, ...]] = []

    def load() -> None:
        together.wait(PATIENCE)
        answers.append(report_of(get_plugins(), "one").reducers)

    threads = [threading.Thread(target=load, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert answers == [("example.A",)] * 8
    assert log.read_text() == "executed asked "


PACKAGE = """
    import events

    events.package_begins.set()
    assert events.plugin_begins.wait({patience})

    import shmreduce
    {use}
"""
PLUGIN_OF_PACKAGE = """
    import events

    events.plugin_begins.set()

    import package
"""
BOTH_THREADS = """
    import os
    import sys
    import threading

    import events
    import shmreduce

    def load():
        {use}

    importing = threading.Thread(target=__import__, args=("package",), daemon=True)
    importing.start()
    assert events.package_begins.wait({patience})
    loading = threading.Thread(target=load, daemon=True)
    loading.start()
    for thread in (importing, loading):
        thread.join({patience})
        if thread.is_alive():
            print("a thread waits for ever", flush=True)
            # An orderly end would wait for the same locks.
            os._exit(1)
    {use}
    [report] = [each for each in get_plugins().reports() if each.name == "one"]
    print(report.status, *report.reducers)
"""


@pytest.mark.parametrize(
    "use",
    [
        "get_plugins()",
        "shmreduce.install()",
        "get_memory_handlers()",
    ],
)
def test_a_package_uses_shmreduce_while_its_plugin_is_loaded(
    installer: Installer, use: str
) -> None:
    """One thread imports a package, which uses shmreduce as it is imported; another loads the
    package's plugin, which imports the package. Neither waits for ever, and the plugin is
    loaded.
    """
    use = f"from shmreduce.process_registry import get_memory_handlers, get_plugins; {use}"
    bound = {"patience": PATIENCE / 3, "use": use}
    events = "import threading\npackage_begins, plugin_begins = (threading.Event() for _ in 'ab')"
    (installer.folder / "events.py").write_text(events)
    (installer.folder / "package.py").write_text(textwrap.dedent(PACKAGE.format(**bound)))
    source = textwrap.dedent(PLUGIN_OF_PACKAGE) + textwrap.dedent(REDUCER)
    installer.install("one", source.format(claimed="example.A"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installer.folder), *sys.path])}
    script = textwrap.dedent(BOTH_THREADS.format(**bound))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
    )
    assert (done.stdout, done.stderr) == ("loaded example.A\n", "")


@pytest.mark.parametrize(
    ("hook", "answer"),
    [
        ("shmreduce_reducers", "[]"),
        ("shmreduce_strategies", "[]"),
        ("shmreduce_array_factory", "None"),
    ],
)
def test_a_hook_that_uses_shmreduce(
    installer: Installer, monkeypatch: pytest.MonkeyPatch, hook: str, answer: str
) -> None:
    """Its plugin is broken, is told why, and the others go on."""
    installer.install(
        "user",
        f"""
        import shmreduce
        from shmreduce import hookimpl

        @hookimpl
        def {hook}():
            shmreduce.get_all_sharing_strategies()
            return {answer}
        """,
    )
    plugins = follow_up(installer, monkeypatch)
    with pytest.warns(ShmreduceWarning, match=rf"{hook}\(\) of plugin 'user'") as caught:
        assert get_plugins() is plugins
    assert len(caught) == 1
    reports = {each.name: each for each in plugins.reports()}
    assert reports.pop("user").status == "broken"
    assert {each.status for each in reports.values()} == {"loaded"}


def test_a_hook_for_memory_that_uses_it(
    installer: Installer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is asked for later."""
    installer.install(
        "user",
        """
        from shmreduce import hookimpl
        from shmreduce.process_registry import get_memory_handlers

        @hookimpl
        def shmreduce_memory_handlers():
            return get_memory_handlers()
        """,
    )
    follow_up(installer, monkeypatch)
    with pytest.warns(ShmreduceWarning, match="shmreduce_memory_handlers"):
        assert get_memory_handlers() is not None


def test_an_interrupted_load_is_done_anew(
    installer: Installer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the settings are by then what they were before it."""
    installer.install("first", REDUCER.format(claimed="example.A"))
    plugins = installer.plugins()
    usual, other = Settings(), Settings(blocked=("nobody",))
    synchronise(plugins, usual)

    def struck(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Plugins, "_register", struck)
        with pytest.raises(KeyboardInterrupt):
            synchronise(plugins, other)
    synchronise(plugins, usual)
    assert len(plugins.registry.reducers()) == 1
