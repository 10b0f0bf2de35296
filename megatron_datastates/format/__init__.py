"""What the bytes of a checkpoint mean: values and their codecs, no I/O (see FORMAT.md).

Belongs here: types that are stored, encoding them, and decoding them as if the bytes were hostile.
Does not belong here: opening files, torch, Megatron.
"""
