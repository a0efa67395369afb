"""The parts written in C: how they are made, and what there is without them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

import shmreduce
from shmreduce import building, compiled
from shmreduce.build_hook import CompilingHook
from shmreduce.building import build, compile_command
from shmreduce.cli import main
from shmreduce.compiled import ALLOCATOR, MODULES, PARTS, SLOTS, Part, find_module
from tests.compiler import needs_compiler, needs_headers, needs_module

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(params=PARTS, ids=lambda part: part.title)
def part(request: pytest.FixtureRequest) -> Part:
    """Each of them, where it can be compiled."""
    found: Part = request.param
    needs_headers() if found.module else needs_compiler()
    return found


def test_the_sources_compile_without_a_warning(part: Part, tmp_path: Path) -> None:
    """Of those that the usual options ask for."""
    done = subprocess.run(
        [*compile_command(part), "-Werror", "-o", str(tmp_path / "a.so")],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_the_command_builds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``shmreduce build-helper`` puts each where it is looked for, and nobody else may write."""
    needs_headers()
    elsewhere = [part._replace(library=str(tmp_path / Path(part.library).name)) for part in PARTS]
    monkeypatch.setattr(compiled, "PARTS", tuple(elsewhere))
    assert main(["build-helper"]) == 0
    assert capsys.readouterr().out == "".join(f"built {part.library}\n" for part in elsewhere)
    for each in elsewhere:
        assert not Path(each.library).stat().st_mode & 0o022


def test_the_command_makes_what_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without Python's headers there is the allocator, and the status, the text and the JSON
    say what is not.
    """
    needs_compiler()
    elsewhere = [part._replace(library=str(tmp_path / Path(part.library).name)) for part in PARTS]
    monkeypatch.setattr(compiled, "PARTS", tuple(elsewhere))
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path))
    assert main(["build-helper"]) == 1
    told = capsys.readouterr()
    assert told.out == f"built {elsewhere[0].library}\n"
    assert told.err.count("there is no Python.h") == len(MODULES)
    assert [path.name for path in tmp_path.iterdir()] == [Path(ALLOCATOR.library).name]
    assert main(["build-helper", "--json"]) == 1
    allocator, *modules = json.loads(capsys.readouterr().out)
    assert allocator == {
        "part": ALLOCATOR.title,
        "path": elsewhere[0].library,
        "built": True,
        "reason": None,
    }
    assert [each["built"] for each in modules] == [False] * len(MODULES)
    assert all("there is no Python.h" in each["reason"] for each in modules)


@pytest.mark.parametrize("compiler", ["/bin/false", "cc -no-such-option"])
def test_a_compiler_that_fails_is_told_of(
    compiler: str, part: Part, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The error has what the compiler said; what was there before stays."""
    monkeypatch.setenv("CC", compiler)
    target = tmp_path / Path(part.library).name
    target.write_text("before")
    with pytest.raises(shmreduce.CompilationError, match="ended with status") as caught:
        build(part, target)
    assert caught.value.path == part.library
    assert target.read_text() == "before"
    assert list(tmp_path.iterdir()) == [target]


def test_what_a_compiler_says_may_be_in_any_encoding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It harms nothing where it compiles, and is told of where it fails."""
    needs_compiler()
    works = shlex.join(building._compiler(ALLOCATOR))
    compiler = tmp_path / "compiler"
    for last in (f'{works} "$@"', "false"):
        compiler.write_text(f"#!/bin/sh\nprintf 'a \\374ber' >&2\nexec {last}\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("CC", str(compiler))
        if last == "false":
            with pytest.raises(shmreduce.CompilationError, match="a \ufffdber"):
                build(ALLOCATOR, tmp_path / "allocator.so")
        else:
            assert build(ALLOCATOR, tmp_path / "allocator.so").exists()


def test_a_compiler_that_cannot_be_read_is_told_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As any other reason why there is no library: a wheel is built without it."""
    monkeypatch.setenv("CC", "cc -DX='unclosed")
    with pytest.raises(shmreduce.CompilationError, match="No closing quotation"):
        build(ALLOCATOR, tmp_path / "allocator.so")


def test_no_compiler_is_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where there is none the error says what was looked for."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(shmreduce.CompilationError, match="no C compiler"):
        build(ALLOCATOR, tmp_path / "allocator.so")


def test_a_compiler_that_hangs_is_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is not waited for without end."""
    needs_compiler()
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nexec sleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(building, "_PATIENCE", 0.1)
    with pytest.raises(shmreduce.CompilationError, match=r"took more than 0\.1 s"):
        build(ALLOCATOR, tmp_path / "allocator.so")


def test_a_folder_that_is_not_there_is_told_of(part: Part, tmp_path: Path) -> None:
    """As one that this user may not write to: the error names it."""
    with pytest.raises(shmreduce.CompilationError, match="missing"):
        build(part, tmp_path / "missing" / "library.so")


class Application:
    """What a builder of wheels offers its hooks."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, text: str) -> None:
        self.warnings.append(text)


def hooked() -> tuple[dict[str, Any], list[str]]:
    """Return what the hook asks of the builder of a wheel, and what it warns of."""
    application: Any = Application()
    nobody: Any = None
    hook = CompilingHook(str(ROOT), {}, nobody, nobody, str(ROOT), "wheel", application)
    data: dict[str, Any] = {"force_include": {}, "pure_python": True}
    hook.initialize("standard", data)
    assert all(Path(made).exists() for made in data["force_include"])
    hook.finalize("standard", data, "")
    assert not any(Path(made).exists() for made in data["force_include"])
    return data, application.warnings


def test_a_wheel_has_them_all_and_is_for_python_from_3_11_on() -> None:
    """On this platform, and says so in its name."""
    needs_headers()
    data, warnings = hooked()
    inside = {os.path.relpath(part.library, Path(compiled.FOLDER).parent) for part in PARTS}
    assert set(data["force_include"].values()) == inside
    assert data["tag"].startswith("cp311-abi3-linux")
    assert not data["pure_python"]
    assert warnings == []


def test_a_wheel_without_the_modules_is_for_any_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The allocator is on this platform only."""
    needs_compiler()
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path))
    data, warnings = hooked()
    assert list(data["force_include"].values()) == ["shmreduce/born/allocator.so"]
    assert data["tag"].startswith("py3-none-linux")
    assert len(warnings) == len(MODULES)


def test_a_wheel_without_anything_compiled_is_for_any_platform(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where there is no compiler, which is told, and where it is not to be used."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    pure = {"force_include": {}, "pure_python": True}
    data, warnings = hooked()
    assert (data, len(warnings)) == (pure, len(PARTS))
    monkeypatch.setenv("SHMREDUCE_BUILD_HELPER", "0")
    assert hooked() == (pure, [])


@pytest.mark.parametrize("part", MODULES, ids=lambda part: part.title)
def test_modules_are_of_the_version_that_is_asked_for(part: Part) -> None:
    """Sources and package have the same number."""
    version = f"#define SHMREDUCE_VERSION {compiled.MODULE_VERSION}\n"
    assert version in Path(part.sources[0]).read_text()


def test_a_module_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be left from before the sources were changed."""
    needs_module(SLOTS)
    monkeypatch.setattr(compiled, "MODULE_VERSION", 1000)
    module, reason = find_module(SLOTS)
    assert module is None
    assert "this is version 1000" in reason


@pytest.mark.parametrize("part", MODULES, ids=lambda part: part.title)
def test_no_module_is_loaded_without_the_interpreter_lock(
    part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A free-threaded Python looks for files with their suffix, and crashes when it loads one."""
    monkeypatch.setattr(sys, "abiflags", "t")
    assert find_module(part)[0] is None


def test_a_module_that_is_damaged_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason says what the loader said; nothing is raised."""
    monkeypatch.delenv("SHMREDUCE_COMPILED", raising=False)
    (tmp_path / "damaged.abi3.so").write_bytes(b"no library")
    part = Part("damaged", (), str(tmp_path / "damaged.abi3.so"), "damaged")
    sys.path.insert(0, str(tmp_path))
    try:
        module, reason = find_module(part)
    finally:
        sys.path.remove(str(tmp_path))
    assert module is None
    assert "file too short" in reason or "invalid ELF header" in reason


WITHOUT = """
import numpy as np
import shmreduce
from shmreduce.memory import quick_slots, runtime
from shmreduce.packet_socket import PacketSocket, PlainPacketSocket
assert PacketSocket is PlainPacketSocket
here, there = shmreduce.Pipe()
here.send(np.arange(100_000))
assert there.recv()[-1] == 99_999
for segment in runtime.current().directory.values():
    assert type(segment._quick) is quick_slots.LongWay
"""


def test_without_them_all_works() -> None:
    """``SHMREDUCE_COMPILED=0`` leaves the modules alone, and arrays travel as ever."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "SHMREDUCE_COMPILED": "0"},
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_doctor_says_whether_they_are_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no fault if they are not."""
    monkeypatch.setenv("SHMREDUCE_COMPILED", "0")
    main(["doctor", "--json"])
    assert "messages take longer: SHMREDUCE_COMPILED is 0" in capsys.readouterr().out
