"""Measures saves on a CPU: rates against the disk's limit, the time the caller is held, memory."""
