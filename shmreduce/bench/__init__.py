"""Figures of this machine, ours beside others', measured in one run.

May import everything below the command line. ``measurements`` holds the
results, ``plan`` says how much is measured, ``payloads`` what is sent,
``systems`` has what is compared, ``workloads`` what is done, ``turns`` lets
systems take turns, ``resources`` looks at what they use, ``suite`` runs it all,
``targets`` and ``reasons`` say what we ask of the figures, ``plots`` draws them.

Each system runs in processes of its own, started with ``spawn``, so that what
one installs cannot change another. Systems take turns, so that a busy moment
of the machine meets them all. Every wait is bounded.
"""
