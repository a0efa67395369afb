"""Where the classes are."""
