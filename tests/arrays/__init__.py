"""Arrays born shared."""
