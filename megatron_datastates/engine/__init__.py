"""Moving bytes: staging, writing, reading, publishing. The only package that imports the native module.

Belongs here: files, threads, staging memory, fences, fault points. Does not belong here: the meaning of
the bytes, anything of Megatron's, collectives.
"""
