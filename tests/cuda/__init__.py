"""The plugin for CUDA arrays, against a stand-in for the driver."""
