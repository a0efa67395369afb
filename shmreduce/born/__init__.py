"""Arrays born shared: shared memory for arrays that an array library allocates itself.

May import errors, contracts, settings, process_registry, strategies and
:mod:`shmreduce.memory`. From the bottom: ``library`` loads the compiled
allocator, ``heap`` lends it memory, ``moving`` lets arrays travel without a
copy, and ``allocations`` has the function for users.
"""
