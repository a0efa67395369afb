"""The main job on real input: a pool of processes filters images.

May import everything below the command line. ``images`` finds the input,
``filters`` is the work, ``comparison`` runs it on several systems in turn.
"""
