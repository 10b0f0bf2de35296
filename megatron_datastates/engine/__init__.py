"""How bytes move: staging, writing, reading, committing. The only importer of the native module.

Belongs here: files, threads, staging memory, fences, fault points. Does not belong here: what the bytes
are, what Megatron is, collectives.
"""
