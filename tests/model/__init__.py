"""A small model of the lease protocol, searched whole, and the proof that the code is it."""
