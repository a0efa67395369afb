"""The contract suites and the leak guard, each proven to fail."""
