"""Imports the modules that children need: a fork server does it once for all of them.

May import ``children``, ``context``, ``discovery``, ``pool``, ``queues`` and ``spawn_child``.

:mod:`shmreduce.children` names it to the fork server. If other code starts that first:

    multiprocessing.set_forkserver_preload(["numpy", "shmreduce.preload"])

It imports modules and does nothing else. Each child loads plugins itself, according to
its parent's settings.
"""

from shmreduce import children, context, discovery, pool, queues, spawn_child

__all__ = ["children", "context", "discovery", "pool", "queues", "spawn_child"]
