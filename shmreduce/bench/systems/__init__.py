"""What is compared, one module for each family of systems.

``base`` says what a system is; ``channels`` has the loops of those with queues.
This module imports nothing.
"""
