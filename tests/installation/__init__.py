"""Installation into multiprocessing, in this process and in children."""
