"""What `datastates preflight` tries before a run: this software, this storage, these ranks.

No test of ours runs on the machine of a user, with its file system and its network. So this does there what
a run will do, with the same code: it saves, loads and compares. Nothing that it writes is left.
"""
