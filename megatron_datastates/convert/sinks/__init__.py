"""The formats that can be written, one module each, and what they share."""
