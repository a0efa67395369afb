"""The example project of a plugin: installed by pip, tested by itself, used by a program."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parent.parent.parent / "docs" / "examples" / "signals"
PATIENCE = 200.0

PROGRAM = """
import multiprocessing
import shmreduce


def amplify(queue, answers):
    signal = queue.get()
    assert "signals" in type(signal).__module__
    signal.amplify(2.0)
    answers.put((signal, shmreduce.get_sharing_strategy()))
    queue.get()


if __name__ == "__main__":
    from signals import Signal

    context = multiprocessing.get_context("spawn")
    with shmreduce.install(strategy="runtime_directory"):
        queue, answers = context.SimpleQueue(), context.SimpleQueue()
        process = context.Process(target=amplify, args=(queue, answers))
        process.start()
        shared = shmreduce.share(Signal(range(100_000), rate=1.0))
        queue.put(shared)
        returned, strategy = answers.get()
        returned.samples[0] = 7.0
        print("strategy there:", strategy)
        print("written there:", shared.samples[3])
        print("written here:", shared.samples[0])
        print("shared:", shmreduce.is_shared(returned))
        queue.put(None)
        process.join(30)
        print("exit code:", process.exitcode)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project, installed from a copy into a folder of its own, without a network."""
    folder = tmp_path_factory.mktemp("signals")
    shutil.copytree(PROJECT, folder / "project")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input"]
    command += ["--no-index", "--no-build-isolation", "--no-deps", "--no-compile"]
    command += ["--disable-pip-version-check", "--root-user-action", "ignore"]
    command += ["--target", str(folder / "site"), str(folder / "project")]
    subprocess.run(command, check=True, timeout=PATIENCE)
    return folder / "site"


def run(site: Path, folder: Path, *arguments: str) -> str:
    """Run Python with the project installed, in a folder where its sources are not."""
    paths = [str(site), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "XDG_RUNTIME_DIR": str(folder),
    }
    answer = subprocess.run(
        [sys.executable, *arguments],
        check=False,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def test_the_plugin_is_found(site: Path, tmp_path: Path) -> None:
    """The installed plugin is listed with what it provides and where it is from."""
    lines = run(
        site,
        tmp_path,
        "-c",
        "from shmreduce.process_registry import plugin_report\n"
        "for each in plugin_report():\n"
        "    if each.name == 'signals': print(each)",
    )
    assert "status='loaded'" in lines
    assert "distribution='signals', version='1.0.0'" in lines
    assert "reducers=('signals.Signal',)" in lines
    assert "strategies=('runtime_directory',)" in lines
    assert str(site) in lines


def test_its_own_tests_pass(site: Path, tmp_path: Path) -> None:
    """The project's tests, which derive the contract suites, pass against what is installed."""
    shutil.copytree(PROJECT / "tests", tmp_path / "tests")
    shutil.copy(PROJECT / "pyproject.toml", tmp_path)
    output = run(site, tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert " passed" in output
    assert "failed" not in output
    assert "skipped" not in output


def test_a_program_uses_it(site: Path, tmp_path: Path) -> None:
    """Its type and its strategy work between a parent and a spawned child."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    output = run(site, tmp_path, str(program))
    assert output.splitlines() == [
        "strategy there: runtime_directory",
        "written there: 6.0",
        "written here: 7.0",
        "shared: True",
        "exit code: 0",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]
