"""``shmreduce demo``: filters images in pools, compares them, and checks for leftovers.

May import ``text`` of this package, errors, extras, ``processors``, :mod:`shmreduce.demo`,
:mod:`shmreduce.fresh_process` and :mod:`shmreduce.memory.inspection`.
"""

from __future__ import annotations

import argparse
import multiprocessing
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from shmreduce.cli.text import Table, print_json, size_text, time_text
from shmreduce.errors import ConfigurationError
from shmreduce.processors import usable_processors

if TYPE_CHECKING:
    from shmreduce.demo.comparison import Finished, Outcome, Plan, Started
    from shmreduce.fresh_process import FreshProcess

__all__ = ["add_command"]

_MOST_WORKERS = 1000
"""Each worker is a process, and there are not enough images for more."""
_SYSTEM_TITLES = {
    "plain": "plain multiprocessing",
    "by value": "shmreduce",
    "shared": "shmreduce, shared images",
}


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command and its options to the parser."""
    parser = commands.add_parser(
        "demo",
        help="filter images in a pool of processes, beside plain multiprocessing",
        description=(
            "Filter images in a pool of processes: with plain multiprocessing, after "
            "shmreduce.install(), and with images that were shared before. The three take "
            "turns and must give the same results."
        ),
    )
    parser.add_argument(
        "--input",
        type=Path,
        metavar="FILE.npy",
        help="a stack of images, or one image (default: photographs in scikit-image)",
    )
    parser.add_argument(
        "--filter",
        choices=("gaussian", "median", "sobel"),
        default="gaussian",
        help="the filter, of SciPy (default: %(default)s)",
    )
    parser.add_argument(
        "--side",
        type=_positive,
        default=1536,
        metavar="PIXELS",
        help="size to which scikit-image's images are enlarged (default: %(default)s)",
    )
    parser.add_argument(
        "--workers", type=_workers, default=usable_processors(), help="default: %(default)s"
    )
    parser.add_argument(
        "--repeat", type=_positive, default=3, help="rounds of each (default: %(default)s)"
    )
    parser.add_argument(
        "--start-method",
        choices=multiprocessing.get_all_start_methods(),
        default="spawn",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--strategy",
        metavar="NAME",
        help=(
            "sharing strategy: file_descriptor, file_system or that of a plugin (default: "
            "SHMREDUCE_STRATEGY, else the first of these two that works here)"
        ),
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from shmreduce.demo.comparison import Plan, serve
    from shmreduce.fresh_process import FreshProcess
    from shmreduce.memory import inspection

    plan = Plan(
        filter_name=options.filter,
        workers=options.workers,
        repeat=options.repeat,
        side=options.side,
        input_file=_existing(options.input),
        start_method=options.start_method,
        strategy=options.strategy,
    )
    with FreshProcess("demo", serve, plan) as process:
        started: Started = process.receive()
        if not options.json:
            print(_introduction(started, plan), flush=True)
        finished = _follow(process, started, plan)
        process.finish()
        processes_left = process.processes_left()
        # Only the demo's: other programs on this machine may use shmreduce.
        segments_left = [
            each for each in inspection.list_segments() if each.owner in finished.processes
        ]
    left = {
        "processes": processes_left,
        "segments": len(segments_left),
        "leases": sum(each.messages + each.holds for each in segments_left),
    }
    if options.json:
        print_json(_as_json(started, finished.outcomes, left))
    else:
        _print(finished.outcomes, left)
    return 1 if any(left.values()) else 0


def _follow(process: FreshProcess, started: Started, plan: Plan) -> Finished:
    """Draw the progress bar until the outcomes arrive."""
    from shmreduce.demo.comparison import SYSTEMS, Step
    from shmreduce.extras import import_extra

    tqdm = import_extra("tqdm", extra="cli").tqdm
    total = started.images * plan.repeat * len(SYSTEMS)
    with tqdm(total=total, unit="image", desc="filtering", leave=False) as bar:
        while isinstance(message := process.receive(), Step):
            bar.update()
    finished: Finished = message
    return finished


def _introduction(started: Started, plan: Plan) -> str:
    source = (
        f"from {plan.input_file}"
        if plan.input_file
        else f"of scikit-image, enlarged by tiling to {plan.side} x {plan.side} pixels of "
        "float32 in three channels, so that moving them takes time"
    )
    return (
        f"{started.images} images {source}: {size_text(started.image_bytes)}.\n"
        f"{plan.filter_name} filter, {plan.workers} workers ({started.start_method}), strategy "
        f"{started.strategy}, {plan.repeat} {'round' if plan.repeat == 1 else 'rounds'} in turn "
        "with plain multiprocessing."
    )


def _print(outcomes: list[Outcome], left: dict[str, int]) -> None:
    plain = next(outcome for outcome in outcomes if outcome.system == "plain")
    rounds = len(plain.seconds)
    table = Table(
        f"One round (median of {rounds})",
        ("", *(_SYSTEM_TITLES[each.system] for each in outcomes)),
    )
    table.add("bytes that travelled", *(size_text(each.travelled / rounds) for each in outcomes))
    table.add("through pipes", *(_size_or_unknown(each.piped, rounds) for each in outcomes))
    table.add("copied into shared memory", *(size_text(each.copied / rounds) for each in outcomes))
    table.add("time", *(time_text(median(each.seconds)) for each in outcomes))
    table.add("of it, not filtering", *(time_text(_transport_seconds(each)) for each in outcomes))
    table.add(
        "times faster",
        *(f"{median(plain.seconds) / median(each.seconds):.2f}" for each in outcomes),
    )
    table.print()
    print("All results are equal to those of plain multiprocessing.")
    print("Left behind: " + ", ".join(f"{count} {what}" for what, count in left.items()) + ".")


def _transport_seconds(outcome: Outcome) -> float:
    """Median time of a round beyond what the filter alone takes on all processors."""
    parallel = min(outcome.workers, usable_processors())
    return median(
        max(0.0, whole - filtering / parallel)
        for whole, filtering in zip(outcome.seconds, outcome.filter_seconds, strict=True)
    )


def _size_or_unknown(total: int | None, rounds: int) -> str:
    return "unknown" if total is None else size_text(total / rounds)


def _as_json(started: Started, outcomes: list[Outcome], left: dict[str, int]) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        **asdict(started),
        "systems": [asdict(outcome) for outcome in outcomes],
        "results_equal": True,
        "left": left,
    }


def _positive(text: str) -> int:
    # Not a ValueError, for which argparse would print the name of this function.
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _workers(text: str) -> int:
    number = _positive(text)
    if number > _MOST_WORKERS:
        raise argparse.ArgumentTypeError(f"{text} are more than {_MOST_WORKERS}")
    return number


def _existing(path: Path | None) -> Path | None:
    if path is not None and not path.is_file():
        reason = "it is not a regular file" if path.exists() else "there is no such file"
        raise ConfigurationError(
            f"cannot use {path} as the demo's input: {reason}",
            setting="--input",
            value=str(path),
        )
    return path
