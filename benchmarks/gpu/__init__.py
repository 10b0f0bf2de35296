"""Measures what a save costs a GPU that trains. Importing this package imports no torch."""
