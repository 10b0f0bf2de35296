"""Checkpoints for Megatron-Core that cost training almost nothing.

Importing this package does nothing, so that every process that imports torch can afford it (see
`mcore.hooks.activation`). Megatron users pass `--ckpt-format datastates`; programs without Megatron's
argument parser import `megatron_datastates.mcore`; other trainers use `megatron_datastates.pipeline`.
"""

__version__ = "0.1.0.dev0"
