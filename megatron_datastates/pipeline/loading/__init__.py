"""Loads: from a published checkpoint to tensors and objects, on any number of ranks.

Belongs here: planning and filling, conversion of dtypes, damage by name, optimizer state by parameter. Does
not belong here: Megatron, and which checkpoint is loaded (runs).
"""
