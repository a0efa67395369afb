"""The benchmark's plumbing. Nothing here looks at how long something takes."""
