"""What is measured, one module for each workload.

``base`` says what a workload with turns is; :mod:`shmreduce.bench.turns` gives
them to systems. ``live_arrays``, ``burst``, ``killed``, ``stages`` and
``import_time`` are measured in ways of their own. This module imports nothing.
"""
