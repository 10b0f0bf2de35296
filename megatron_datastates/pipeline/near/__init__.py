"""The near tier: checkpoints are written to a disk or memory of each node, and drained from there.

`places.py` (where things are in a near tier), `nodes.py` (which nodes have a save), `publishing.py`
(publishing near), `copying.py`, `drain.py` and `publish_queue.py` (from there to the directories of the
checkpoints), `room.py` (what need not stay), `removal.py`, `recovery.py` (what a new job brings home before
it loads), `listing.py` (what `datastates ls --near` shows).
"""
