"""Tests of shmreduce: real processes, bounded waits, warnings are errors."""
