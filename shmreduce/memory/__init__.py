"""Shared memory: segments, blocks, leases, and what happens when processes die.

docs/explanation/architecture.md lists the modules, lowest first, with the job of each.
A module may import only modules below it, and its docstring names them; tests/architecture
checks this.
"""
