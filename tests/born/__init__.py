"""Arrays that NumPy itself makes in shared memory."""
