"""Tests of shared memory: who holds what, when it is reused, what deaths do."""
