"""Figures of this machine, ours beside others', measured in one run.

May import everything below the command line. ``measurements`` holds the
results, ``systems`` what is compared, ``echo``, ``live_arrays``, ``burst`` and
``import_time`` one workload each, ``targets`` what we ask of the figures,
``suite`` runs it all.

Each system runs in processes of its own, started with ``spawn``, so that what
one installs cannot change another. Systems take turns, so that a busy moment
of the machine meets them all. Every wait is bounded.
"""
