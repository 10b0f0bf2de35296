"""The command `datastates`, for people and for scripts.

What belongs here: arguments, progress bars, tables, exit codes. What does not: the work itself.
"""
