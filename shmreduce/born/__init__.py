"""Arrays born shared: memory for arrays that an array library allocates by itself.

May import errors, contracts, settings, discovery, strategies and
:mod:`shmreduce.memory`. From the bottom: ``building`` compiles the allocator,
``library`` loads it, ``heap`` lends it memory, ``moving`` lets arrays travel
without a copy, ``allocations`` is what users call. ``build_hook`` is for the
builder of wheels and is not imported here.
"""
