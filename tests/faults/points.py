"""Named points of the protocol at which a process can be struck.

A point is a function of the product, by ``module:qualified.name``. A strike
waits until the process has executed so many bytecode instructions inside that
function, and then kills or stops the process in front of the next one: every
step of a lease transition has a place in front of it and one behind it. The
interpreter's own tracing does that (``sys.settrace`` with ``f_trace_opcodes``),
so the product has no hooks for it.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import CodeType, FrameType

    from tests.faults.plan import Strike
    from tests.faults.tally import Tally

__all__ = ["GROUPS", "arm", "code_of"]

_MEMORY = "shmreduce.memory"

GROUPS: dict[str, tuple[str, ...]] = {
    "lease": (
        f"{_MEMORY}.segment:Segment._link",
        f"{_MEMORY}.segment:Segment._unlink",
        f"{_MEMORY}.segment:Segment.claim",
        f"{_MEMORY}.segment:Segment.start_message",
        f"{_MEMORY}.segment:Segment.add_message",
        f"{_MEMORY}.segment:Segment.consume",
        f"{_MEMORY}.segment:Segment.unclaim",
        f"{_MEMORY}.segment:Segment.try_release",
        f"{_MEMORY}.segment:Segment.try_lock_block",
        f"{_MEMORY}.segment:Segment.unlock_block",
        f"{_MEMORY}.segment:Segment._take_slot",
        f"{_MEMORY}.segment:Segment._register",
        f"{_MEMORY}.owned_segment:OwnedSegment.try_free",
    ),
    "send": (
        "shmreduce.connection:Connection._write",
        "shmreduce.packets:_pack_one_buffer",
        "shmreduce.packets:_make",
        "shmreduce.packets:Packet.descriptors",
        "shmreduce.pickler:Run.dump",
        f"{_MEMORY}.one_buffer:give_out",
        "shmreduce.moving:give_born",
        f"{_MEMORY}.message:Message.allocate",
        f"{_MEMORY}.message:Message.refer",
        f"{_MEMORY}.message:Message.commit",
        "multiprocessing.connection:Connection._send",
    ),
    "receive": (
        "shmreduce.connection:Connection._read",
        "shmreduce.connection:Connection._watch",
        "shmreduce.packets:Arrival.load",
        "shmreduce.packets:CallArrival.load",
        "shmreduce.unpickling:load_message",
        f"{_MEMORY}.loading:import_block",
        f"{_MEMORY}.loading:_claim",
        f"{_MEMORY}.loading:_record_of",
        f"{_MEMORY}.attachments:Attachments._open",
        f"{_MEMORY}.attachments:Attachments._publish",
        f"{_MEMORY}.segment:Segment.adopt",
        f"{_MEMORY}.blocks:LiveBlocks.expose",
        f"{_MEMORY}.blocks:LiveBlocks._end",
        "multiprocessing.connection:Connection._recv",
    ),
    "heap": (
        f"{_MEMORY}.heap:Heap.allocate",
        f"{_MEMORY}.heap:Heap._carve",
        f"{_MEMORY}.reservation:_write",
        f"{_MEMORY}.segment_creation:create_segment",
        f"{_MEMORY}.segment_creation:_create_file",
        f"{_MEMORY}.segment_creation:_open_new",
        f"{_MEMORY}.heap:Heap._grow",
        f"{_MEMORY}.heap:Heap._drop_empty",
        f"{_MEMORY}.heap:Heap._cool_block",
        f"{_MEMORY}.heap:Heap.reap",
        f"{_MEMORY}.owned_segment:OwnedSegment.carve",
        f"{_MEMORY}.owned_segment:OwnedSegment.uncarve",
        f"{_MEMORY}.family:Family.reserve",
        f"{_MEMORY}.mapping:Mapping.cover",
        f"{_MEMORY}.mapping:Mapping.make_huge",
    ),
    "fork": (
        f"{_MEMORY}.blocks:LiveBlocks.before_fork",
        f"{_MEMORY}.blocks:LiveBlocks.make_private",
        f"{_MEMORY}.ledger:ForkLedger.before_fork",
        f"{_MEMORY}.ledger:ForkLedger.after_fork_in_parent",
        f"{_MEMORY}.ledger:ForkLedger.after_fork_in_child",
        f"{_MEMORY}.runtime:_after_fork_in_child",
        f"{_MEMORY}.family:Family.rejoined",
        f"{_MEMORY}.family:Family._join",
    ),
    "end": (
        f"{_MEMORY}.process_memory:Runtime.leave",
        f"{_MEMORY}.handover:Handover._post",
        f"{_MEMORY}.handover:Handover._put_into_mailbox",
        f"{_MEMORY}.heap:Heap.leave",
        f"{_MEMORY}.family:Family.post",
        f"{_MEMORY}.family:Family.tidy",
        f"{_MEMORY}.sweep:sweep",
    ),
    "pool": (
        "shmreduce.pool_worker:work",
        "shmreduce.pool_worker:_do_tasks",
        "shmreduce.pool_task_ring:TaskRing.claim",
        "shmreduce.connection:Connection._write",
        "shmreduce.connection:Connection._read",
        f"{_MEMORY}.segment:Segment.claim",
        f"{_MEMORY}.segment:Segment._unlink",
    ),
}


def code_of(point: str) -> CodeType:
    """Return the code of the function that a point names."""
    module, _, name = point.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    found = getattr(found, "__wrapped__", found)
    code: CodeType = getattr(found, "__func__", found).__code__
    return code


class _Tracer:
    """Counts instructions in some functions and acts when enough were executed."""

    def __init__(self, wanted: dict[CodeType, list[tuple[int, Callable[[], None]]]]) -> None:
        self._wanted = wanted
        self._counts = dict.fromkeys(wanted, 0)

    def enter(self, frame: FrameType, event: str, _: object) -> Any:
        """Trace the frames of wanted functions, and no others."""
        if frame.f_code not in self._wanted:
            return None
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        return self.step

    def step(self, frame: FrameType, event: str, _: object) -> Any:
        """Count one instruction."""
        if event == "opcode":
            code = frame.f_code
            self._counts[code] += 1
            for after, act in self._wanted[code]:
                if after == self._counts[code]:
                    act()
        return self.step


def arm(strikes: Iterable[Strike], actor: int, tally: Tally) -> None:
    """Have this process struck as planned, in this thread and those to come."""
    wanted: dict[CodeType, list[tuple[int, Callable[[], None]]]] = {}
    for strike in strikes:
        if strike.point:
            act = _action(strike, actor, tally)
            wanted.setdefault(code_of(strike.point), []).append((int(strike.after), act))
    if wanted:
        tracer = _Tracer(wanted)
        threading.settrace(tracer.enter)
        sys.settrace(tracer.enter)


def _action(strike: Strike, actor: int, tally: Tally) -> Callable[[], None]:
    def act() -> None:
        tally.faults[actor] += 1
        if strike.act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif strike.act == "kill group":
            os.killpg(0, signal.SIGKILL)
        else:
            # Whoever watches the run lets it go on.
            tally.seconds[actor] = strike.seconds
            tally.stopped[actor] = os.getpid()
            os.kill(os.getpid(), signal.SIGSTOP)

    return act
