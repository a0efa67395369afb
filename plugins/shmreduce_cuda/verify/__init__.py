"""The verification: `python -m shmreduce_cuda.verify`."""
