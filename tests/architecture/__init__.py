"""What the source code itself must hold to."""
