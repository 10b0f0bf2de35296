"""The directories of a run: which checkpoints they hold, in which format, of which branch and job.

Belongs here: what a directory shows before a checkpoint in it is loaded or removed. Does not belong here:
reading tensors, writing, removing.
"""
