"""Packages that look like CuPy, numba and torch to the plugin, over the stand-in.

They have the names, signatures and class hierarchies that the plugin relies on,
and no more. A folder for PYTHONPATH.
"""
