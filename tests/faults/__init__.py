"""Seeded runs in which processes are killed, stopped and starved, and what was lost by it.

``python -m tests.faults.run --runs 2000 --seed 1`` plays them,
``python -m tests.faults.soak`` looks for what grows over time. The page
``docs/reliability.md`` has the figures and says how to read them.
"""
