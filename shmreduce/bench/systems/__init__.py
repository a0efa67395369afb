"""The systems that are compared, with one module for each family of them.

``base`` defines what a system is. ``channels`` has the workers' loops for systems with
queues. This module imports nothing.
"""
