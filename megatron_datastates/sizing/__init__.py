"""How large a checkpoint will be, before anything runs.

What belongs here: Megatron's formulas for parameters and optimizer state, and arithmetic on bytes, rates and
ranks. What does not: files, torch, Megatron.
"""
