"""Picking a command, exit statuses, and errors in one line."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import shmreduce
from shmreduce import MissingExtraError, ShmreduceError
from shmreduce.cli import main, plugins
from shmreduce.extras import import_extra
from tests.cli.commands import PATIENCE, read_json, run


def test_version_is_that_of_the_package() -> None:
    """``--version`` prints the package's version and ends well."""
    assert run("--version").stdout == f"shmreduce {shmreduce.__version__}\n"


def test_no_command_is_an_error_that_lists_the_commands() -> None:
    """Without a command the usage, with every command, goes to standard error."""
    told = run(status=2).stderr
    for command in ("demo", "plugins", "ls", "gc", "doctor", "bench", "build-helper"):
        assert command in run("--help").stdout
    assert "COMMAND" in told


def test_an_error_of_ours_is_told_without_a_traceback() -> None:
    """An error of the ShmreduceError family is one line on standard error and status 2."""
    done = run("demo", "--strategy", "no-such-strategy", status=2)
    assert done.stderr.startswith("shmreduce demo: there is no sharing strategy")
    assert "file_descriptor" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_of_the_system_is_told_without_a_traceback() -> None:
    """An OSError, such as a full disk under the output, is status 2, too."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "shmreduce", "plugins"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.startswith("shmreduce plugins: ")
    assert "Traceback" not in done.stderr


def test_a_strategy_that_does_not_work_here_is_passed_over(tmp_path: Path) -> None:
    """Other strategies' segments are listed when the directory of one is missing."""
    done = run("ls", SHMREDUCE_DIRECTORY=str(tmp_path / "missing"))
    assert done.stderr == ""


def test_an_interrupt_ends_with_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends a command without a traceback."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plugins, "find_plugins", interrupt)
    assert main(["plugins"]) == 130


def test_a_reader_that_leaves_is_no_error() -> None:
    """Output into a pipe that nobody reads any more gives no traceback."""
    process = subprocess.Popen(
        [sys.executable, "-m", "shmreduce", "plugins"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    told = process.stderr.read()
    process.stderr.close()
    assert process.wait(PATIENCE) == 141
    assert told == ""


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", ["ls", "gc", "doctor", "plugins --json"])
def test_streams_that_are_closed_are_no_error(command: str, closed: str) -> None:
    """A program that has closed standard streams, as some daemons do, can run each command."""
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m shmreduce {command} {closed}', sys.executable],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr == ""


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii:strict"])
@pytest.mark.parametrize("command", ["ls", "gc --dry-run", "doctor", "gc"])
def test_names_that_are_no_text_are_printed(command: str, encoding: str, tmp_path: Path) -> None:
    """What cannot be encoded in the names of files is escaped."""
    directory = tmp_path / os.fsdecode(b"caf\xe9")
    directory.mkdir()
    old = directory / f"shmreduce-{os.geteuid()}-1-{'0' * 32}"
    old.touch(0o600)
    os.utime(old, (0, 0))
    done = run(*command.split(), SHMREDUCE_DIRECTORY=str(directory), PYTHONIOENCODING=encoding)
    assert done.stderr == ""
    assert command == "ls" or "caf\\udce9" in done.stdout


def test_a_missing_package_is_told_with_the_extra_that_installs_it() -> None:
    """What is not installed is named, with the pip command that brings it."""
    with pytest.raises(MissingExtraError) as caught:
        import_extra("no_such_package.part", extra="cli")
    assert (caught.value.package, caught.value.extra) == ("no_such_package", "cli")
    assert "pip install 'shmreduce[cli]'" in str(caught.value)
    assert isinstance(caught.value, ShmreduceError)
    assert isinstance(caught.value, ImportError)
    assert pickle.loads(pickle.dumps(caught.value)).fields == caught.value.fields


def test_plugins_lists_the_shipped_ones() -> None:
    """``plugins`` tells name, distribution and what each provides."""
    reports = {report["name"]: report for report in read_json("plugins")}
    assert {"file_descriptor", "file_system", "memoryview", "numpy"} <= set(reports)
    assert reports["numpy"]["reducers"] == ["numpy.ndarray"]
    assert reports["numpy"]["array_factory"]
    assert reports["file_system"]["strategies"] == ["file_system"]
    assert all(report["distribution"] == "shmreduce" for report in reports.values())
    assert "shmreduce_fd" in run("plugins").stdout


def test_plugins_tells_of_a_blocked_one() -> None:
    """A plugin that is blocked by name is listed with that reason, and is no problem."""
    reports = read_json("plugins", SHMREDUCE_BLOCK="numpy")
    blocked = next(report for report in reports if report["name"] == "numpy")
    assert blocked["status"] == "blocked"
    assert "SHMREDUCE_BLOCK" in blocked["reason"]


@pytest.fixture
def broken_plugin(tmp_path: Path) -> Path:
    """A folder with an installed distribution whose plugin cannot be imported."""
    information = tmp_path / "broken_signal-1.5.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: broken-signal\nVersion: 1.5\n"
    )
    (information / "entry_points.txt").write_text("[shmreduce]\nsignal = broken_signal\n")
    (tmp_path / "broken_signal.py").write_text("raise RuntimeError('no licence for signals')\n")
    return tmp_path


def test_plugins_tells_of_a_broken_one(broken_plugin: Path) -> None:
    """A plugin that fails to import is listed with its distribution and the reason; status 1."""
    done = run("plugins", status=1, PYTHONPATH=str(broken_plugin))
    assert "signal: broken: RuntimeError: no licence for signals" in done.stdout
    assert "broken-signal 1.5" in done.stdout
    assert done.stderr == ""


def test_doctor_tells_of_a_broken_plugin(broken_plugin: Path) -> None:
    """The doctor calls it a problem and says how to block it."""
    findings = read_json("doctor", status=1, PYTHONPATH=str(broken_plugin))
    plugin = next(finding for finding in findings if finding["name"] == "plugins")
    assert plugin["verdict"] == "problem"
    assert "SHMREDUCE_BLOCK=signal" in plugin["remedy"]


def test_doctor_does_not_choose_between_plugins_in_conflict(broken_plugin: Path) -> None:
    """It names both, and leaves it to the user which one to block: the shipped one
    may be the one that came second.
    """
    (broken_plugin / "broken_signal.py").write_text(
        "import shmreduce\n"
        "class Other(shmreduce.Reducer):\n"
        "    types = ('numpy.ndarray',)\n"
        "    def reduce(self, obj, message):\n"
        "        return NotImplemented\n"
        "@shmreduce.hookimpl\n"
        "def shmreduce_reducers():\n"
        "    return [Other()]\n"
    )
    findings = read_json("doctor", status=1, PYTHONPATH=str(broken_plugin))
    plugin = next(finding for finding in findings if finding["name"] == "plugins")
    assert plugin["verdict"] == "problem"
    assert "plugin 'numpy'" in plugin["value"]
    assert "plugin 'signal'" in plugin["value"]
    assert "SHMREDUCE_BLOCK=NAME" in plugin["remedy"]
    assert "SHMREDUCE_BLOCK=numpy" not in plugin["remedy"]


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--results=missing/results.json", "no folder missing"),
        ("--report=missing/page.md", "no folder missing"),
        ("--plot=missing/plot.png", "no folder missing"),
        ("--report=.", "it is a folder"),
        ("--results=.", "it is a folder"),
        ("--plot=plot.txt", "must end in .png or .svg"),
    ],
)
def test_what_bench_cannot_write_is_told_before_it_measures(option: str, reason: str) -> None:
    """Hours of measuring are not lost to a name that is wrong."""
    told = run("bench", "--quick", "--only=import", option, status=2).stderr
    assert reason in told
    assert "import ..." not in told
