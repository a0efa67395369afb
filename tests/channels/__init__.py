"""Tests of the channels of shmreduce: Pipe, queues, contexts."""
