"""The registry, settings, discovery of plugins and choice of strategy."""
