"""Formats that can be written: a module for each, and what they share."""
