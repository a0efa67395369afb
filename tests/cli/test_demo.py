"""The demo: same results, honest counts, nothing left."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shmreduce import ConfigurationError
from shmreduce.cli import main
from shmreduce.demo import comparison
from shmreduce.demo.filters import FILTERS, apply_filter
from shmreduce.demo.images import IMAGE_NAMES, load_file, load_images
from shmreduce.fresh_process import FreshProcess
from shmreduce.memory import inspection
from tests.cli.commands import read_json, run

if TYPE_CHECKING:
    from pathlib import Path

IMAGES = 3
SIDE = 512
IMAGE_BYTES = SIDE * SIDE * 4


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    """A file with a stack of images, each too large to go through a pipe."""
    path = tmp_path / "stack.npy"
    random = np.random.default_rng(20240229)
    np.save(path, random.random((IMAGES, SIDE, SIDE), dtype=np.float32))
    return path


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_the_demo_compares_and_leaves_nothing(method: str, strategy: str, stack: Path) -> None:
    """The three systems give equal results; counts are those of the arrays; nothing is left."""
    told = read_json(
        "demo",
        f"--input={stack}",
        f"--start-method={method}",
        f"--strategy={strategy}",
        "--workers=2",
        "--repeat=2",
    )
    assert (told["images"], told["image_bytes"]) == (IMAGES, IMAGES * IMAGE_BYTES)
    assert (told["strategy"], told["start_method"]) == (strategy, method)
    assert told["results_equal"]
    assert told["left"] == {"processes": 0, "segments": 0, "leases": 0}
    systems = {system["system"]: system for system in told["systems"]}
    assert list(systems) == ["plain", "by value", "shared"]
    assert all(len(system["seconds"]) == 2 for system in systems.values())
    both_ways = 2 * 2 * IMAGES * IMAGE_BYTES
    assert {system["travelled"] for system in systems.values()} == {both_ways}
    assert systems["plain"]["copied"] == 0
    assert systems["by value"]["copied"] == both_ways
    assert systems["shared"]["copied"] == both_ways // 2
    assert systems["plain"]["piped"] > both_ways
    assert systems["by value"]["piped"] < both_ways / 4


def test_the_demo_prints_a_table_and_draws_progress(stack: Path) -> None:
    """For people there is a table, what is left, and a bar on standard error."""
    done = run("demo", f"--input={stack}", "--repeat=1", "--filter=sobel")
    for row in ("bytes that travelled", "through pipes", "copied into shared memory", "time"):
        assert row in done.stdout
    assert "Left behind: 0 processes, 0 segments, 0 leases." in done.stdout
    assert "filtering" in done.stderr


def test_an_error_is_told_in_one_line(stack: Path) -> None:
    """No complaint about semaphores follows: the demo's process ended by itself."""
    told = run("demo", f"--input={stack}", "--repeat=1", status=2, SHMREDUCE_BUDGET="1").stderr
    assert told.splitlines()[-1].startswith("shmreduce demo: ")


def test_the_demo_tells_what_is_left(
    stack: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that survives, or a segment of the demo's, is counted and is exit status 1."""
    segment = inspection.SegmentState(
        token="0" * 32,
        strategy="file_system",
        name="/dev/shm/kept",
        shared=True,
        owner=0,
        owner_alive=False,
        age=1.0,
        size=4096,
        reserved=4096,
        blocks=1,
        messages=2,
        holds=3,
    )

    def left_by(process: FreshProcess) -> list[inspection.SegmentState]:
        stranger = dataclasses.replace(segment, owner=os.getpid())
        return [stranger, dataclasses.replace(segment, owner=process.pid)]

    def processes_left(process: FreshProcess) -> int:
        monkeypatch.setattr(inspection, "list_segments", lambda: left_by(process))
        return 1

    monkeypatch.setattr(FreshProcess, "processes_left", processes_left)
    assert main(["demo", f"--input={stack}", "--repeat=1", "--workers=1"]) == 1
    assert "Left behind: 1 processes, 1 segments, 5 leases." in capsys.readouterr().out


@pytest.mark.parametrize("number", ["0", "-1", "x", "1.5", ""])
def test_what_is_no_number_is_told(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The message says what was given and what is wanted, in words of the user."""
    with pytest.raises(SystemExit) as caught:
        main(["demo", f"--workers={number}"])
    assert caught.value.code == 2
    assert f"--workers: {number!r} is not a whole number of 1 or more" in capsys.readouterr().err


def test_the_demo_filters_the_images_of_scikit_image() -> None:
    """Without ``--input`` the input is what scikit-image's wheel holds, enlarged."""
    pytest.importorskip("skimage")
    told = read_json("demo", "--side=100", "--repeat=1", "--workers=1")
    assert told["images"] == len(IMAGE_NAMES)
    assert told["image_bytes"] == len(IMAGE_NAMES) * 100 * 100 * 3 * 4


def test_images_are_enlarged_without_rescaling_values() -> None:
    """Grey images get three channels; values are between 0 and 1; larger than the original."""
    pytest.importorskip("skimage")
    colour, grey = load_images(700, ["astronaut", "camera"])
    for image in (colour, grey):
        assert image.shape == (700, 700, 3)
        assert image.dtype == np.float32
        assert 0 <= image.min() < image.max() <= 1
    assert np.array_equal(grey[:100, :100], grey[512:612, 512:612])


def test_small_images_count_as_sent_through_pipes(tmp_path: Path) -> None:
    """What is below the inline limit is not counted as copied into shared memory."""
    np.save(tmp_path / "small.npy", np.ones((2, 8, 8)))
    told = read_json("demo", f"--input={tmp_path / 'small.npy'}", "--repeat=1", "--workers=1")
    assert [system["copied"] for system in told["systems"]] == [0, 0, 0]


@pytest.mark.parametrize("name", sorted(FILTERS))
def test_filters_keep_shape_and_do_something(name: str) -> None:
    """Each filter returns another image of the same shape, for grey and colour images."""
    random = np.random.default_rng(5)
    for shape in ((16, 20), (16, 20, 3)):
        image = random.random(shape, dtype=np.float32)
        number, filtered, seconds = apply_filter((name, 4, image))
        assert number == 4
        assert filtered.shape == shape
        assert not np.array_equal(filtered, image)
        assert seconds >= 0


def test_one_image_in_a_file_is_one_image(tmp_path: Path) -> None:
    """An array of two dimensions is taken as one image."""
    np.save(tmp_path / "one.npy", np.eye(5))
    (image,) = load_file(tmp_path / "one.npy")
    assert image.shape == (5, 5)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (np.array([{"any": "object"}]), "allow_pickle"),
        (np.array([["text"]]), "dtype is <U4"),
        (np.arange(4), "shape is (4,)"),
        (np.empty((0, 4, 4)), "shape is (0, 4, 4)"),
    ],
)
def test_a_file_that_holds_no_images_is_refused(content: Any, reason: str, tmp_path: Path) -> None:
    """The error names the file and what is wrong with it; pickles in it are not loaded."""
    path = tmp_path / "bad.npy"
    np.save(path, content, allow_pickle=True)
    with pytest.raises(ConfigurationError) as caught:
        load_file(path)
    assert reason in str(caught.value)
    assert caught.value.value == str(path)


def test_a_file_that_is_no_array_is_refused(tmp_path: Path) -> None:
    """Any other file is refused with the reason, before processes are started."""
    path = tmp_path / "text.npy"
    path.write_text("no array")
    assert "cannot use" in run("demo", f"--input={path}", status=2).stderr
    told = run("demo", f"--input={tmp_path / 'missing.npy'}", status=2).stderr
    assert "there is no such file" in told
    told = run("demo", "--input", str(tmp_path), status=2).stderr
    assert "it is not a regular file" in told


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    """Whatever NumPy raises for a header without end, a shape without end or a bad archive."""
    damaged = {
        "header": _npy(b"{'descr': '<f8', 'fortran_order': (((((("),
        "shape": _npy(b"{'descr': '<f8', 'fortran_order': False, 'shape': (9999999999999, 9, 9)}"),
        "archive": b"PK\x03\x04 is how they begin",
    }
    for name, content in damaged.items():
        path = tmp_path / f"{name}.npy"
        path.write_bytes(content)
        with pytest.raises(ConfigurationError, match="cannot use"):
            load_file(path)


def _npy(header: bytes) -> bytes:
    """Return a file of version 1.0 with a header of 118 bytes, and no data."""
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + header.ljust(117) + b"\n"


@pytest.mark.parametrize("dtype", ["float16", "longdouble", ">f2"])
@pytest.mark.parametrize("name", sorted(FILTERS))
def test_precisions_that_filters_lack_are_converted(name: str, dtype: str, tmp_path: Path) -> None:
    """Stacks of half and of extended precision are filtered, too."""
    np.save(tmp_path / "stack.npy", np.ones((1, 9, 9), dtype))
    (image,) = load_file(tmp_path / "stack.npy")
    _, filtered, _ = apply_filter((name, 0, image))
    assert filtered.shape == (9, 9)


def test_pixels_without_a_value_are_equal(stack: Path) -> None:
    """NaN in the input is NaN in all three results, which is no difference."""
    images = np.load(stack)
    images[:, :9] = np.nan
    np.save(stack, images)
    assert read_json("demo", f"--input={stack}", "--repeat=1", "--workers=1")["results_equal"]


def test_a_result_that_differs_is_an_error() -> None:
    """The comparison really compares: one other pixel is noticed."""
    expected = [np.zeros((4, 4)), np.zeros((4, 4))]
    wrong = [np.zeros((4, 4)), np.eye(4)]
    comparison._check("shared", expected, expected)
    with pytest.raises(comparison.WrongResultError) as caught:
        comparison._check("shared", wrong, expected)
    assert (caught.value.system, caught.value.image) == ("shared", 1)


def test_images_that_have_no_room(capfd: pytest.CaptureFixture[str]) -> None:
    """One line says so."""
    assert main(["demo", "--side", "100000000", "--workers", "1", "--repeat", "1"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "100000000 x 100000000 pixels" in line


@pytest.mark.parametrize("number", ["0", "1001", "9" * 30, "-1", "x"])
def test_numbers_of_workers_that_are_none(number: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A wrong option, before anything is started."""
    with pytest.raises(SystemExit) as caught:
        main(["demo", f"--workers={number}"])
    assert caught.value.code == 2
    assert "--workers" in capfd.readouterr().err
