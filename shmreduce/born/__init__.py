"""Arrays born shared: memory for arrays that an array library allocates by itself.

May import errors, contracts, settings, process_registry, strategies and
:mod:`shmreduce.memory`. From the bottom: ``library`` loads the compiled
allocator, ``heap`` lends it memory, ``moving`` lets arrays travel without a
copy, ``allocations`` is what users call.
"""
