"""Saving and loading as a whole: wires providers, plan and engine, and agrees between ranks.

Belongs here: the life of a save, agreement and publication, opening and verifying checkpoints, reports.
Does not belong here: Megatron. Other trainers can use this layer as it is.
"""
