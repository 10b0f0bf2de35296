"""Pure planning: values in, values out; no I/O, no torch, no clock.

Belongs here: layouts of data files, decomposition of strided boxes into spans, matching of stored and
requested slices. Does not belong here: anything that touches memory or files.
"""
