"""Why a figure is not met, where that is known, and what would be needed.

May import the standard library only.
"""

from __future__ import annotations

from fnmatch import fnmatch

__all__ = ["REASONS", "reason_for"]

REASONS: dict[str, str] = {
    "shared * SharedMemory by hand": (
        "By hand, nothing but a name is sent: no receiver is counted, so nobody may ever free "
        "or reuse the memory. A lease is taken and ended here for each message."
    ),
    "born * SharedMemory by hand": (
        "By hand, the segment is made before and the same name is sent again and again. "
        "Here each message is a new array, and its memory comes back."
    ),
    "fresh 8 MiB: shmreduce / one copy": (
        "Beside the copy stand the work for two messages, 0.05 ms with full caches, which the "
        "copy has emptied; and what caches hold of 8 MiB is copied quicker when nothing else is "
        "done. One thread copies: the reader, who looks for the message, has the other processor. "
        "Needed: all of that work in C."
    ),
    "born *: shmreduce born shared / ten bytes": (
        "Ten bytes are sent in a tight loop, this by an interpreter whose caches the making of "
        "the array has emptied. With a copy of 64 MiB made before each, an array that was shared "
        "already took 1.2 ms, this 1.3 to 1.4, and ten bytes five to seven times as long. Where "
        "the pipe's two processes come to one processor ten bytes take a third: see its spread. "
        "Needed: all the work of a message compiled, so that it touches less code and data."
    ),
    "fresh 1 MiB: *torch*": (
        "A copy and the round trip of a shared array alone take an eighth of torch's time. The "
        "rest is the interpreter's work with caches that the copy has emptied. What concerns "
        "blocks, leases and packets is compiled, and an array alone is sent without a pickler. "
        "Needed: all the work of a message in C."
    ),
    "fresh *: *torch*": (
        "Where one copy alone takes more than a tenth of torch's whole time it cannot be met; "
        "else see the spread. From 64 MiB on ours takes 0.5 to 1.25 times one copy by one thread."
    ),
    "exchange *: a message among 16 / among 2": (
        "Two processes on two processors answer without sleeping, sixteen cannot. Until readers "
        "looked before they slept, a message among 2 took longer than one among 16."
    ),
    "exchange 64 KiB among 16 *": (
        "All processors are busy, so what counts is work; of that a queue in C has the least."
    ),
    "exchange 10 B among 16 *": "Within the spread of both.",
    "objects DataFrame with text 1 MiB *": "Within the spread of both.",
    "small-arrays 10000 x 10 KB: best of torch*": (
        "100 MB each way, in blocks that they share; each side reduces 10,000 arrays, one by one, "
        "and rebuilds as many. Needed: a reducer that takes many at once."
    ),
    "small-arrays 10000 x 100 KB: best of torch*": (
        "A GB each way. What is idle for 5 s goes back to the system, and the turns of the others "
        "take longer: so memory was cold each time. In a tight loop it was 0.67 s, and 3.7 in "
        "torch. In a twentieth of that nobody copies it twice."
    ),
    "fan-out 64 KiB to 4 *": (
        "Five processes on two processors: nobody waits awake, what counts is work, and of that "
        "a queue in C has the least."
    ),
    "first-use *": (
        "What counts is how quickly the machine gives pages, huge ones of ours. Measured one "
        "after the other on one machine 64 MiB took 21 ms where the kernel had them at hand and "
        "36 to 47 where it had not, 51 to 59 in torch; 256 MiB 52 to 165 ms, 700 in torch. Below "
        "that it is also what a process does once: to join its family, to make a segment."
    ),
    "fresh *: shmreduce install / multiprocessing": (
        "Both pickle, and send the pickle through a pipe: within the spread of both."
    ),
    "shared: slowest / quickest size *": (
        "No work grows with the size. Where the other systems of that row took longer as "
        "well, the machine was slower."
    ),
    "shared *: shmreduce / ten bytes": (
        "Where the bare pipe's two processes come to one processor a wake-up costs a third or "
        "less: its spread says whether they did."
    ),
    "results 64 MiB: shared memory / arrays alive": (
        "The peak of many calls. Memory of dropped results is lent to the worker that makes the "
        "next one, but not while it is looked at, nor where less than twice as much is free."
    ),
    "shared *: best of torch / shmreduce": "Within the spread of ours.",
    "results 64 MiB filled: multiprocessing*": (
        "The workers write 64 MiB each, which takes as long for both; `bare` is without that."
    ),
    "results 256 MiB filled: multiprocessing*": (
        "The workers write 256 MiB each, and their pages come from the system first: that takes "
        "as long for both."
    ),
    "results 64 MiB filled: best of torch*": (
        "The workers write 64 MiB each before anything is sent, which takes as long for both. "
        "In Pool(shared_allocations=True) they are written where they are going to travel."
    ),
}
"""Patterns of what is told beside the figure: workload, row and quickest peer, or the
title of a target. The first that fits counts."""


def reason_for(*words: str) -> str:
    """Return the reason that fits, or an empty string.

    Examples
    --------
    >>> reason_for("shared", "1 MiB", "SharedMemory by hand").split(":")[0]
    'By hand, nothing but a name is sent'
    >>> reason_for("shared", "1 MiB", "torch")
    ''
    """
    text = " ".join(words)
    return next((reason for pattern, reason in REASONS.items() if fnmatch(text, pattern)), "")
