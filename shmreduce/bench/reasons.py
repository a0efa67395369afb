"""Why a figure is not met, where that is known, and what would be needed.

May import the standard library only.
"""

from __future__ import annotations

from fnmatch import fnmatch

__all__ = ["REASONS", "reason_for"]

REASONS: dict[str, str] = {
    "shared * SharedMemory by hand": (
        "By hand, only a name is sent. Nobody counts receivers, so the memory can never be freed "
        "or reused safely. shmreduce takes and ends a lease for each message."
    ),
    "born * SharedMemory by hand": (
        "By hand, only a name is sent, and both sides know who unlinks the segment: if one of "
        "them dies, it stays. Making and unlinking it takes longer than the message, and is not "
        "timed. With shmreduce the memory of a message is reused afterwards."
    ),
    "fresh 8 MiB: shmreduce / one copy": (
        "Besides the copy there is the work for two messages: 0.05 ms with warm caches, which the "
        "copy has emptied. Also, a cache that holds the 8 MiB makes the bare copy faster. Two "
        "threads copy, but the reader that waits for the message uses one of two processors, too. "
        "Needed: all of that work in C."
    ),
    "born *: shmreduce born shared / ten bytes*": (
        "Ten bytes are sent in a tight loop, but this array by an interpreter whose caches were "
        "emptied when the array was made. Over a queue of shmreduce, after a copy of 64 MiB, an "
        "array that was shared already takes 7 times as long, and ten bytes 13 times. Also, ten "
        "bytes take a third of the time or less if both of their processes run on one processor: "
        "see the spread, and other sizes. Needed: all the work of a message compiled, so that it "
        "touches less memory."
    ),
    "fresh 1 MiB: *torch*": (
        "One copy and the round trip of a shared array already take an eighth to a sixth of "
        "torch's time. The rest is the interpreter's work, with caches that the copy has emptied. "
        "The steps for blocks, leases and packets are compiled, and an array alone needs no "
        "pickler. Needed: all the work of a message in C."
    ),
    "fresh *: *torch*": (
        "This cannot be met if one copy takes more than a tenth of torch's time; otherwise see "
        "the spread. From 8 MiB on, shmreduce takes 0.16 to 1.25 times as long as one copy by one "
        "thread, depending on the processors."
    ),
    "exchange *: a message among 16 / among 2": (
        "On two processors, two processes can answer each other without sleeping, and sixteen "
        "cannot. So this compares a message that wakes nobody with one that does."
    ),
    "exchange 64 KiB among 16 *": (
        "All processors are busy, so the system with the least work per message wins: a queue "
        "that is written in C."
    ),
    "stream * joblib": (
        "joblib gathers small tasks in batches, of which each is one message. A queue sends each "
        "message at once, as its users expect; Pool.map gathers, too (chunksize)."
    ),
    "exchange 10 B among 16 *": "The difference is within the spread of both.",
    "exchange 1 MiB among 16 *": "The difference is within the spread of both.",
    "objects DataFrame with text 1 MiB *": "The difference is within the spread of both.",
    "small-arrays 10000 x 10 KB: best of torch*": (
        "100 MB each way: copying them twice takes half of the time."
    ),
    "small-arrays 10000 x 100 KB: best of torch*": (
        "1 GB each way. Memory that is idle for 5 s is given back to the system, and the other "
        "systems' turns take longer than that, so the memory was cold each time. In a tight loop "
        "it took 0.67 s, and 3.7 s in torch. A twentieth of that is less than two copies take."
    ),
    "fan-out 64 KiB to 4 *": (
        "Five processes on two processors: no process can wait without sleeping, so the system "
        "with the least work per message wins, a queue that is written in C."
    ),
    "first-use * MiB*": (
        "The first array of 1 MiB takes its sender 2 to 3 ms, the second 0.9 to 1.2 ms, most of "
        "which is the kernel's work for the pages of a new block. The rest is a new segment, and "
        "code that runs for the first time; torch does this work in C++. "
        "From 64 MiB on, the kernel's pages decide: where it has huge pages at hand 64 MiB take "
        "18 to 25 ms (torch 26 to 32), and 33 to 40 ms where a virtual machine gets the first one "
        "from its host, which alone takes 5 to 12 ms."
    ),
    "first-use 64 KiB*": (
        "The array is pickled, as multiprocessing does it, but more Python code runs that is "
        "new to the process."
    ),
    "objects 1000 records *": (
        "Records have no arrays, so all systems pickle them: the difference is within the spread."
    ),
    "start forkserver *": (
        "Most of it is the child's import of NumPy: the difference is about as large as the "
        "spread."
    ),
    "start fork*": (
        "A forked child gets a state of its own for shared memory, so that it frees none of its "
        "parent's, and touches some 200 pages of Python's objects for that. The kernel copies "
        "each of them, which takes 3.4 us."
    ),
    "start spawn *": (
        "The child imports some 60 modules of shmreduce before its arguments, which takes 20 to "
        "40 ms."
    ),
    "fresh *: shmreduce install / multiprocessing": (
        "Both pickle the array and send it through a pipe: the difference is within the spread."
    ),
    "shared: slowest / quickest size *": (
        "No step depends on the size. If the other systems of that row took longer as well, the "
        "machine was slower at that time."
    ),
    "shared *: shmreduce / ten bytes*": (
        "If both processes that send ten bytes run on one processor, waking one up takes a third "
        "of the time or less: the spread shows whether they did."
    ),
    "results 64 MiB: shared memory / arrays alive": (
        "This is the peak of many calls. The memory of a dropped result is lent to the worker "
        "that makes the next one, but for a short time, and systems take turns. Then it goes "
        "back to the worker that made it, which may keep 128 MiB. So if a worker makes three of "
        "four results where it made two before, one more block is needed."
    ),
    "shared *: best of torch / shmreduce": "The difference is within our spread.",
    "results 64 MiB filled: multiprocessing*": (
        "The workers write 64 MiB each, which takes as long for both; `bare` is without that."
    ),
    "results 256 MiB filled: multiprocessing*": (
        "The workers write 256 MiB each, which takes as long for both, and is nearly all of the "
        "time of shmreduce: two workers need 34 ms for one array each."
    ),
    "results 64 MiB filled: best of torch*": (
        "The workers write 64 MiB each before anything is sent, which takes as long for both. "
        "With Pool(shared_allocations=True) they write where the array is going to travel."
    ),
}
"""Reasons by pattern, which is matched with workload, row and quickest peer, or with the title
of a target. The first pattern that fits counts."""


def reason_for(*words: str) -> str:
    """Return the reason that fits, or an empty string.

    Examples
    --------
    >>> reason_for("shared", "1 MiB", "SharedMemory by hand").split(".")[0]
    'By hand, only a name is sent'
    >>> reason_for("shared", "1 MiB", "torch")
    ''
    """
    text = " ".join(words)
    return next((reason for pattern, reason in REASONS.items() if fnmatch(text, pattern)), "")
