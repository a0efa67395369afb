"""Benchmarks: measures shmreduce and other systems on this machine, in one run.

May import everything below the command line. ``measurements`` has the results, ``plan``
how much is measured, ``payloads`` the objects that are sent, ``systems`` the systems that
are compared, and ``workloads`` what they do. ``turns`` lets systems take turns,
``survivors`` keeps those that have not failed where they do not, ``resources`` measures
what they use, and ``suite`` runs everything. ``targets`` and
``reasons`` have the limits for the figures, and ``plots`` draws them.

Each system runs in its own processes, started with ``spawn``, so that what one installs
cannot change another. Systems take turns, so that a busy moment of the machine affects
all of them. Every wait is bounded.
"""
