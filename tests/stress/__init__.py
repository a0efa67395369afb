"""A randomized stress of the memory layer, and proof that it sees what it looks for."""
