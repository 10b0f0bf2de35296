"""The formats that can be read, one module each, and what they share."""
