"""The doctor's verdicts, on this machine and on made-up ones."""

from __future__ import annotations

import errno
import os
import resource
from typing import TYPE_CHECKING, NoReturn

import pytest

from shmreduce import PlatformError
from shmreduce.cli import doctor
from shmreduce.cli.doctor import limits, system
from shmreduce.cli.doctor.findings import Finding
from shmreduce.memory import locks
from shmreduce.memory.headroom import Machine, headroom
from tests.cli.commands import read_json, run

if TYPE_CHECKING:
    from pathlib import Path


def machine_with(root: Path, **files: str) -> Machine:
    """Make a machine whose kernel tells this; ``__`` in names stands for ``/``."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Machine(root)


def test_every_check_has_a_verdict_here() -> None:
    """On this machine every check says something, and whatever is not ok has a remedy."""
    findings = [Finding(**finding) for finding in read_json("doctor")]
    assert len(findings) >= len(doctor.CHECKS)
    assert {finding.verdict for finding in findings} <= {"ok", "warning"}
    for finding in findings:
        assert finding.value
        assert (finding.verdict == "ok") == (finding.remedy == "")


def test_for_people_there_is_a_table_and_a_line_for_each_remedy() -> None:
    """A remedy stands on a line of its own, after the verdict and what it is about."""
    done = run("doctor", SHMREDUCE_DIRECTORY="/no/such/directory")
    assert "warning: strategy file_system: use file_descriptor meanwhile" in done.stdout
    assert "files of other processes" in done.stdout


def test_a_directory_that_is_none_is_noticed(tmp_path: Path) -> None:
    """By what looks at the directory, and by what looks at the strategy that needs it."""
    file = tmp_path / "file"
    file.touch()
    findings = read_json("doctor", SHMREDUCE_DIRECTORY=str(file))
    found = {each["name"]: each for each in findings}
    for name in ("directory of named segments", "strategy file_system"):
        assert found[name]["verdict"] == "warning"


def test_a_problem_is_exit_status_1() -> None:
    """A strategy that was asked for and does not exist is a problem."""
    findings = read_json("doctor", status=1, SHMREDUCE_STRATEGY="nonsense")
    chosen = next(each for each in findings if each["name"] == "chosen strategy")
    assert chosen["verdict"] == "problem"
    assert "nonsense" in chosen["value"]


def test_a_bad_setting_is_a_problem_named_once_in_full() -> None:
    """A variable that cannot be read is named; the other checks are made all the same."""
    findings = read_json("doctor", status=1, SHMREDUCE_BUDGET="plenty")
    settings = next(each for each in findings if each["name"] == "settings")
    assert settings["verdict"] == "problem"
    assert "SHMREDUCE_BUDGET" in settings["value"]
    assert any(each["name"] == "open files" for each in findings)


def test_a_check_that_fails_is_a_finding() -> None:
    """An error of one check is told under that check's name and spares the others."""

    def some_check(_machine: Machine) -> NoReturn:
        raise PlatformError("nobody knows", missing="knowledge")

    def another_check(_machine: Machine) -> NoReturn:
        raise OSError(errno.EIO, "no answer")

    def broken_check(_machine: Machine) -> NoReturn:
        raise ValueError("odd")

    for check in (some_check, another_check, broken_check):
        (finding,) = doctor._findings(check, Machine())
        assert finding.name == check.__name__.replace("_", " ")
        assert finding.verdict == "problem"


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc__self__cgroup": "nothing known\n0::\n1:memory\n"},
        {"proc__meminfo": "MemAvailable:\nMemTotal: many kB\n"},
        {
            "proc__self__cgroup": "0::/a\n",
            "sys__fs__cgroup__a__memory.max": "100",
            "sys__fs__cgroup__a__memory.current": "100",
            "sys__fs__cgroup__a__memory.stat": "inactive_file\n",
        },
        {"proc__mounts": "proc /proc\n\n", "proc__self__mountinfo": "\nodd\n"},
    ],
)
def test_machines_that_tell_odd_things(files: dict[str, str], tmp_path: Path) -> None:
    """What a kernel, or who emulates one, tells in another format is not known; no more."""
    machine = machine_with(tmp_path, **files)
    left = headroom(machine)
    assert left is None or left == 0
    assert len(doctor.examine(machine)) >= len(doctor.CHECKS)


@pytest.mark.parametrize(
    ("soft", "verdict"),
    [(resource.RLIM_INFINITY, "ok"), (1024, "ok"), (50, "warning"), (20, "problem")],
)
def test_few_open_files_are_noticed(
    soft: int, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is judged by what is left of it."""
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (soft, resource.RLIM_INFINITY))
    finding = limits.open_files(machine_with(tmp_path))
    assert finding.verdict == verdict


def test_few_mappings_are_noticed(tmp_path: Path) -> None:
    """A small vm.max_map_count is a warning that says how to raise it."""
    finding = limits.mappings(machine_with(tmp_path, proc__sys__vm__max_map_count="900\n"))
    assert finding.verdict == "warning"
    assert "sysctl" in finding.remedy


def test_a_missing_directory_of_named_segments_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without /dev/shm the file_system strategy cannot work: a warning."""
    monkeypatch.delenv("SHMREDUCE_DIRECTORY", raising=False)
    finding = limits.shared_memory_directory(machine_with(tmp_path))
    assert finding.verdict == "warning"
    assert "/dev/shm" in finding.value


def test_a_small_directory_of_named_segments_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB, as Docker gives, is a warning that names the option and the other strategy."""
    status = list(os.statvfs("/"))
    # Block size, fragment size, blocks, free blocks, blocks free to users.
    status[:5] = [4096, 4096, 16384, 16384, 16384]
    monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result(status))
    finding = limits.shared_memory_directory(Machine())
    assert finding.verdict == "warning"
    assert "--shm-size" in finding.remedy
    assert "file_descriptor" in finding.remedy


@pytest.mark.parametrize(("free", "verdict"), [(100_000, "warning"), (4_000_000, "ok")])
def test_little_memory_is_noticed(free: int, verdict: str, tmp_path: Path) -> None:
    """MemAvailable is judged."""
    machine = machine_with(
        tmp_path, proc__meminfo=f"MemTotal: 8000000 kB\nMemAvailable: {free} kB\n"
    )
    assert limits.available_memory(machine).verdict == verdict


def test_the_limit_of_a_cgroup_of_version_2_is_found(tmp_path: Path) -> None:
    """The tightest of the group and those above it counts; droppable pages are free."""
    machine = machine_with(
        tmp_path,
        proc__meminfo="MemTotal: 16000000 kB\n",
        proc__self__cgroup="0::/user/job\n",
    )
    folder = tmp_path / "sys/fs/cgroup/user"
    (folder / "job").mkdir(parents=True)
    for name, text in {
        "job/memory.max": "max",
        "job/memory.high": "max",
        "job/memory.current": "1000",
        "memory.max": str(1 << 30),
        "memory.current": str(900 << 20),
        "memory.stat": f"anon 5\ninactive_file {100 << 20}\n",
    }.items():
        (folder / name).write_text(text)
    finding = limits.cgroup_memory(machine)
    assert finding.verdict == "warning"
    assert finding.value == "1 GiB in /sys/fs/cgroup/user, 224 MiB left"
    assert "SHMREDUCE_BUDGET" in finding.remedy


def test_the_limit_above_which_a_cgroup_is_slowed_down_counts(tmp_path: Path) -> None:
    """``memory.high``: above it processes are as good as stopped, though no limit is reached."""
    machine = machine_with(
        tmp_path,
        proc__meminfo="MemTotal: 16000000 kB\n",
        proc__self__cgroup="0::/job\n",
    )
    folder = tmp_path / "sys/fs/cgroup/job"
    folder.mkdir(parents=True)
    for name, number in ("max", 2 << 30), ("high", 1 << 30), ("current", 900 << 20):
        (folder / f"memory.{name}").write_text(str(number))
    assert headroom(machine) == 124 << 20
    # The kernel lets files take all that there is below, and drops them first.
    (folder / "memory.stat").write_text(f"active_file {200 << 20}\ninactive_file {50 << 20}\n")
    assert headroom(machine) == 374 << 20


def test_the_limit_of_a_cgroup_of_version_1_is_found(tmp_path: Path) -> None:
    """The memory controller's own folder is looked at; its 'no limit' is none."""
    machine = machine_with(
        tmp_path,
        proc__meminfo="MemTotal: 16000000 kB\n",
        proc__self__cgroup="5:cpu:/other\n4:memory:/box\n0::/\n",
    )
    box = tmp_path / "sys/fs/cgroup/memory/box"
    box.mkdir(parents=True)
    (box / "memory.usage_in_bytes").write_text(str(1 << 20))
    (box / "memory.limit_in_bytes").write_text(str(9223372036854771712))
    assert limits.cgroup_memory(machine).value == "none"
    (box / "memory.limit_in_bytes").write_text(str(4 << 30))
    finding = limits.cgroup_memory(machine)
    assert finding.verdict == "ok"
    assert finding.value == "4 GiB in /sys/fs/cgroup/memory/box, 4 GiB left"


def test_a_limited_address_space_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RLIMIT_AS below twice the memory is a warning."""
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (1 << 30, 1 << 30))
    machine = machine_with(tmp_path, proc__meminfo="MemTotal: 16000000 kB\n")
    assert limits.address_space(machine).verdict == "warning"


@pytest.mark.parametrize(("mode", "verdict"), [("0", "ok"), ("1", "ok"), ("2", "warning")])
def test_strict_overcommit_is_noticed(mode: str, verdict: str, tmp_path: Path) -> None:
    """vm.overcommit_memory=2 is a warning."""
    machine = machine_with(tmp_path, proc__sys__vm__overcommit_memory=mode)
    assert limits.overcommit(machine).verdict == verdict


def test_a_system_without_memfd_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the call is missing or forbidden, the other strategy is named."""

    def forbidden(_name: str, _flags: int) -> NoReturn:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    finding = system.anonymous_files(Machine())
    assert finding.verdict == "warning"
    assert "Operation not permitted" in finding.value
    monkeypatch.delattr(os, "memfd_create")
    assert "file_system" in system.anonymous_files(Machine()).remedy


def test_a_system_without_byte_locks_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """No strategy works without them."""
    monkeypatch.setattr(locks, "supported", lambda: False)
    assert system.byte_locks(Machine()).verdict == "problem"


def test_a_missing_proc_is_noticed(tmp_path: Path) -> None:
    """Without /proc there is a warning with the command that mounts it."""
    machine = machine_with(tmp_path)
    assert "mount -t proc" in system.process_files(machine).remedy
    assert system.other_processes(machine).verdict == "warning"


def test_hidden_processes_are_told(tmp_path: Path) -> None:
    """The hidepid option of /proc is told, with what it means."""
    machine = machine_with(
        tmp_path, proc__mounts="proc /proc proc rw,nosuid,hidepid=invisible 0 0\n"
    )
    (tmp_path / "proc/self/fd").mkdir(parents=True)
    assert "hidepid=invisible" in system.process_files(machine).value


@pytest.mark.parametrize(
    ("files", "sign"),
    [
        ({".dockerenv": ""}, "/.dockerenv"),
        ({"run__.containerenv": ""}, "/run/.containerenv"),
        ({"proc__1__cgroup": "0::/kubepods/pod7\n"}, "/proc/1/cgroup"),
        (
            {"proc__self__mountinfo": "1 2 0:5 / / rw shared:1 - overlay overlay rw\n"},
            "overlay root",
        ),
    ],
)
def test_marks_of_containers_are_found(
    files: dict[str, str], sign: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mark alone is enough, and is named."""
    monkeypatch.delenv("container", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert system.container(machine_with(tmp_path / "bare")).value == "no signs of one"
    finding = system.container(machine_with(tmp_path / "box", **files))
    assert finding.value == f"yes: {sign}"


def test_another_pid_namespace_is_a_mark_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pid namespace that is not the first one is named."""
    monkeypatch.delenv("container", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026532000]")
    value = system.container(Machine(tmp_path)).value
    assert value == "yes: $KUBERNETES_SERVICE_HOST, pid namespace"


def test_a_user_namespace_is_told(tmp_path: Path) -> None:
    """A uid_map that is not the whole range means a user namespace of its own."""
    first = machine_with(tmp_path / "first", proc__self__uid_map="  0  0  4294967295\n")
    own = machine_with(tmp_path / "own", proc__self__uid_map="  0  1000  1\n")
    assert system.user_namespace(first).value == "the first one"
    assert "of its own" in system.user_namespace(own).value
