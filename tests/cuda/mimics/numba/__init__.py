"""Looks like numba with numba-cuda 0.30."""
