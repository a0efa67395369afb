"""The shipped plugins, each against its contract and in every detail."""
