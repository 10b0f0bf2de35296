"""Measures saves and loads of one state by this package and by others, in turns, on a CPU and its disk."""
