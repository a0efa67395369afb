"""Runs a mixed load for long: ``python -m tests.faults.soak --minutes 30``.

A pool, a pipe of each kind and a queue are used all the time, one of two echo
processes is killed and replaced every few seconds. Each second: memory of this
process, shared memory, descriptors of all processes, and how long a round trip
took. Writes the samples (CSV), a plot (SVG, needs matplotlib) and prints a table.
"""

from __future__ import annotations

import argparse
import csv
import gc
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import shmreduce
from shmreduce.memory.inspection import process_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Sample", "main", "plot", "read_samples", "soak", "summary"]

_PATIENCE = 30.0
_WORDS = (1_000, 20_000, 150_000)
_KILL_EVERY = 5.0


@dataclass(frozen=True)
class Sample:
    """What was measured in one second."""

    seconds: float
    resident: int
    """Bytes of this process's own memory, shared pages left out."""
    shared: int
    """Bytes reserved by this process."""
    descriptors: int
    """Of this process."""
    held: int
    """Blocks in use, here or elsewhere."""
    round_trip: float
    """Median, in microseconds, of an array of 1.2 MB through a pipe and back."""
    rounds: int
    """How often everything has been used so far."""
    killed: int
    """How many processes have been killed so far."""


def _echo(connection: Any) -> None:
    while (array := connection.recv()) is not None:
        connection.send(array + 1)


def _work(array: Any) -> Any:
    return array * 2


class _Echoes:
    """Two processes that send back what they get; one of them dies now and then."""

    def __init__(self) -> None:
        self._own = shmreduce.get_context("fork")
        self._stock = multiprocessing.get_context("fork")
        self.killed = 0
        self._ends: list[Any] = [self._start(self._own), self._start(self._stock)]

    def _start(self, context: Any) -> tuple[Any, Any]:
        ours, theirs = context.Pipe()
        process = context.Process(target=_echo, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def round_trip(self, which: int, array: Any) -> Any:
        """Send an array there and back."""
        connection = self._ends[which][0]
        connection.send(array)
        if not connection.poll(_PATIENCE):
            raise TimeoutError(f"no answer within {_PATIENCE} s")
        return connection.recv()

    def kill(self, which: int) -> None:
        """Kill one while a message is under way to it, and start another."""
        connection, process = self._ends[which]
        connection.send(np.ones(_WORDS[1]))
        process.kill()
        process.join()
        process.close()
        connection.close()
        self.killed += 1
        self._ends[which] = self._start((self._own, self._stock)[which])

    def close(self) -> None:
        """End both."""
        for connection, process in self._ends:
            connection.send(None)
            process.join(_PATIENCE)
            process.close()
            connection.close()


def soak(seconds: float, every: float = 1.0) -> Iterator[Sample]:
    """Use everything for so long; yield a sample for each second or so.

    They are not kept here: it is this process whose memory is measured.
    """
    trips: list[float] = []
    # What killed processes have not read is given up.
    with shmreduce.install(inline_limit=4096, message_timeout=5.0):
        echoes = _Echoes()
        queue = shmreduce.get_context("fork").Queue()
        pool = shmreduce.get_context("fork").Pool(2)
        start = sampled = killed = time.monotonic()
        for rounds in itertools.count(1):
            for words in _WORDS:
                array = np.full(words, float(rounds))
                began = time.perf_counter()
                answer = echoes.round_trip(0, array)
                if words == _WORDS[-1]:
                    trips.append((time.perf_counter() - began) * 1e6)
                for each in (answer, echoes.round_trip(1, array)):
                    _check(each, rounds + 1)
                queue.put(shmreduce.share(array))
                _check(queue.get(timeout=_PATIENCE), rounds)
            for each in pool.map(_work, [np.full(words, float(rounds)) for words in _WORDS]):
                _check(each, 2 * rounds)
            now = time.monotonic()
            if now - killed > min(_KILL_EVERY, seconds / 4):
                killed = now
                echoes.kill(echoes.killed % 2)
            if now - sampled > every:
                sampled = now
                yield _sample(now - start, trips, rounds, echoes.killed)
                trips.clear()
            if now - start > seconds:
                break
        pool.terminate()
        pool.join()
        queue.close()
        queue.join_thread()
        echoes.close()
        _give_up_the_rest()


def _give_up_the_rest() -> None:
    """End the messages that killed processes have not read."""
    end = time.monotonic() + _PATIENCE
    with shmreduce.install(message_timeout=0.001):
        while process_state().out and time.monotonic() < end:
            time.sleep(0.01)


def _check(array: Any, value: float) -> None:
    if not (array == value).all():
        raise ValueError(f"an array of {value} has other numbers in it: {np.unique(array)[:5]}")


def _sample(seconds: float, trips: Sequence[float], rounds: int, killed: int) -> Sample:
    gc.collect()
    state = process_state()
    _, resident, of_files, *_ = Path("/proc/self/statm").read_text().split()
    page = os.sysconf("SC_PAGE_SIZE")
    return Sample(
        seconds=round(seconds, 1),
        resident=(int(resident) - int(of_files)) * page,
        shared=state.reserved,
        descriptors=len(list(Path("/proc/self/fd").iterdir())),
        held=state.out,
        round_trip=round(statistics.median(trips), 1) if trips else 0.0,
        rounds=rounds,
        killed=killed,
    )


def read_samples(path: Path) -> list[Sample]:
    """Return the samples that a soak has written."""
    with path.open(newline="") as file:
        return [Sample(**_numbers(row)) for row in csv.DictReader(file)]


def _numbers(row: dict[str, str]) -> dict[str, Any]:
    fractions = ("seconds", "round_trip")
    return {name: float(value) if name in fractions else int(value) for name, value in row.items()}


def plot(samples: Sequence[Sample], path: Path) -> bool:
    """Draw the samples; return False if matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    minutes = [each.seconds / 60 for each in samples]
    series = (
        ("own memory, MiB", [each.resident / (1 << 20) for each in samples]),
        ("shared memory, MiB", [each.shared / (1 << 20) for each in samples]),
        ("descriptors", [each.descriptors for each in samples]),
        ("round trip of 1.2 MB, us", [each.round_trip for each in samples]),
    )
    figure, axes = plt.subplots(len(series), 1, sharex=True, figsize=(8, 7))
    for axis, (name, values) in zip(axes, series, strict=True):
        axis.plot(minutes, values, linewidth=0.8)
        axis.set_ylabel(name, fontsize=8)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return True


def summary(samples: Sequence[Sample]) -> str:
    """Return a Markdown table of the first and the last tenth and the largest of all."""
    tenth = max(1, len(samples) // 10)
    # What is opened and grown at first use comes before.
    parts = (samples[tenth : 2 * tenth] or samples, samples[-tenth:])
    lines = ["| | second tenth | last tenth | largest |", "|---|---|---|---|"]
    rows = (
        ("own memory, MiB", "resident", 1 << 20),
        ("shared memory, MiB", "shared", 1 << 20),
        ("descriptors", "descriptors", 1),
        ("blocks in use", "held", 1),
        ("round trip of 1.2 MB, us", "round_trip", 1),
    )
    for name, attribute, unit in rows:
        medians = [
            statistics.median(getattr(each, attribute) for each in part) / unit for part in parts
        ]
        largest = max(getattr(each, attribute) for each in samples) / unit
        lines.append(
            "| " + " | ".join([name, *(f"{each:.1f}" for each in (*medians, largest))]) + " |"
        )
    last = samples[-1]
    lines += [
        "",
        f"{last.rounds} rounds, {last.killed} processes killed, {last.seconds / 60:.1f} minutes",
    ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Soak, and say what grew."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--samples", type=Path, default=Path("soak.csv"))
    parser.add_argument("--plot", type=Path, default=Path("soak.svg"))
    options = parser.parse_args(arguments)
    with options.samples.open("w", newline="") as file:
        writer = csv.DictWriter(file, [each.name for each in fields(Sample)])
        writer.writeheader()
        for each in soak(60 * options.minutes):
            writer.writerow(asdict(each))
            file.flush()
    samples = read_samples(options.samples)
    if not plot(samples, options.plot):
        sys.stderr.write("no plot: matplotlib is not installed\n")
    sys.stdout.write(summary(samples) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
