"""Formats that can be read: a module for each, and what they share."""
