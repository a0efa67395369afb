"""Shared memory: segments, blocks, leases, and what happens when processes die.

The modules, lowest first; each may import only those before it:

``anonymous``   files without a name
``locks``       byte locks of open file descriptions
``processes``   whether another process lives, or is just being ended
``mapping``     address ranges over a file, shared or private
``handle``      the bytes that name a block in a message
``layout``      what stands where in a segment's file
``block_locks`` the lock of each block
``segment``     one open segment: tables, lease transitions under block locks
``ledger``      which forked children may still see this process's memory
``sweep``       removes the names that killed owners left
``family``      the processes that share one budget and one mailbox
``headroom``    how much memory the system can still give
``heap``        the allocator over the segments that this process made
``attachments`` the segments of other processes, opened once
``blocks``      live blocks of this process and the death of their last view
``idle``        gives idle memory back
``runtime``     the one state of this process; fork, exit, idle return
``filling``     a block while the bytes of a message are written to it
``message``     what a message gives out: the sender's side
``loading``     what a message brings: the receiver's side
``allocation``  shared blocks born here, and blocks found by what lies in them
``inspection``  what is alive on this machine, for people
"""
