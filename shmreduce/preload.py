"""Imports what children need of shmreduce, for a fork server to do so once for all of them.

May import ``children``, ``context``, ``discovery``, ``pool``, ``queues`` and ``spawn_child``.

    multiprocessing.set_forkserver_preload(["numpy", "shmreduce.preload"])

It imports modules and does nothing else: plugins are loaded in each child, by its
parent's settings.
"""

from shmreduce import children, context, discovery, pool, queues, spawn_child

__all__ = ["children", "context", "discovery", "pool", "queues", "spawn_child"]
