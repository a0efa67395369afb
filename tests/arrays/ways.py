"""The ways in which an object is pickled for a channel, without the channel."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest

import shmreduce
from shmreduce import LeaseTimeoutError, OutOfLeasesError, SegmentError, pickling, unpickling
from shmreduce.memory import runtime
from shmreduce.memory.layout import BY_VALUE
from shmreduce.packets import INLINE_BODY
from shmreduce.pool_channel import channel_class

__all__ = [
    "LACKS",
    "PICKLES",
    "WAYS",
    "Unpicklable",
    "dumps",
    "pickled_task",
    "sizes_out",
    "standard_pickle",
    "transfer",
]


def dumps(obj: Any) -> pickling.Pickled:
    """Pickle as the channels of shmreduce do."""
    return pickling.dumps(obj, INLINE_BODY)


def transfer(obj: Any) -> Any:
    """Send to this very process."""
    data, message = dumps(obj)
    pickled = bytes(data)
    if message is not None:
        # It may be in a block itself, which nobody would read.
        message.take_back(data)
        message.commit()
    return unpickling.loads(pickled)


def standard_pickle(obj: Any) -> bytes:
    """Pickle as the channels of multiprocessing do once shmreduce is installed."""
    with shmreduce.install():
        return bytes(ForkingPickler.dumps(obj))


def pickled_task(obj: Any) -> bytes:
    """Pickle as the pools of shmreduce do."""
    return bytes(channel_class(shmreduce.get_context()).dumps(obj))


PICKLES = pytest.mark.parametrize("dumps_short", [standard_pickle, pickled_task])
WAYS = pytest.mark.parametrize(
    "way",
    [
        transfer,
        lambda obj: unpickling.loads(standard_pickle(obj)),
        lambda obj: unpickling.loads(pickled_task(obj)),
    ],
    ids=["channel", "pipe", "pool"],
)


def sizes_out() -> list[int]:
    """The sizes of the blocks that this process gave out and that are in use."""
    heap = runtime.current().heap(BY_VALUE)
    heap.collect()
    return [segment.capacities[block] for segment in heap.segments for block in segment.out]


LACKS = [
    SegmentError("no descriptor is free", operation="open", errno=24, segment=None),
    OutOfLeasesError("all are in use", segment="", slots=1),
    LeaseTimeoutError("somebody is stopped", segment="", block=0, waited=30.0),
]
"""Errors for want of which no block is made."""


class Unpicklable:
    def __reduce__(self) -> Any:
        raise ZeroDivisionError
