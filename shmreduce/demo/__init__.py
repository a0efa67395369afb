"""The demo: a pool of processes filters images.

May import everything below the command line. ``images`` loads the input, ``filters``
has the work, and ``comparison`` runs it on several systems in turn.
"""
