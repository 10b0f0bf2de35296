"""The command `datastates`, for people and for scripts.

Belongs here: reading arguments, progress bars, tables, exit codes. Does not belong here: doing the work.
"""
