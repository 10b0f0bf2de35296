"""What overlapping, coalescing and lazy copies each bring to a save: the same save with and without it."""
