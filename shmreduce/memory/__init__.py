"""Shared memory: segments, blocks, leases, and what happens when processes die.

Which module has which job, lowest first, stands in docs/explanation/architecture.md.
Each may import only those below it, and says so; tests/architecture checks it.
"""
