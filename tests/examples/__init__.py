"""The example project, really installed."""
