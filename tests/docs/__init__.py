"""What the pages under ``docs/`` must hold to."""
