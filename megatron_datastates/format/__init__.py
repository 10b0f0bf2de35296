"""What the bytes of a checkpoint mean: values and their codecs, no I/O (see FORMAT.md).

Belongs here: the types that are stored, and their codecs, which decode bytes as if they were hostile.
Does not belong here: opening files, torch, Megatron.
"""
