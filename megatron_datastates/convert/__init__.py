"""Checkpoints of all formats, read and written without Megatron, and what is made of them.

What belongs here: sources (a format, read), sinks (a format, written) and the jobs between them. What does
not: Megatron, and how things are shown to people (cli).
"""
