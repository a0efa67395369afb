"""The workloads that are measured.

``base`` defines a workload for which systems take turns; :mod:`shmreduce.bench.turns`
runs them. ``live_arrays``, ``burst``, ``killed``, ``stages`` and ``import_time`` run
themselves. This module imports nothing.
"""
