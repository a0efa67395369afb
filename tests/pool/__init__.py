"""Pools and executors."""
