"""Shared memory: segments, blocks, leases, and what happens when processes die.

The modules, lowest first; each may import only those before it:

``locks``       byte locks of open file descriptions
``mapping``     address ranges over a file, shared or private
``layout``      what stands where in a segment's file
``segment``     one open segment: tables, lease transitions under block locks
``ledger``      which forked children may still see this process's memory
``sweep``       removes the names that killed owners left
``family``      the processes that share one budget and one mailbox
``headroom``    how much memory the system can still give
``heap``        the allocator over the segments that this process made
``attachments`` the segments of other processes, opened once
``blocks``      live blocks of this process and the death of their last view
``idle``        gives idle memory back
``message``     leases on behalf of one pickled message; handles
``runtime``     the one state of this process; fork, exit, idle return
``inspection``  what is alive on this machine, for people
"""
