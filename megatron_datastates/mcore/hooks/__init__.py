"""Hooks: which functions of Megatron are replaced, in which release, and when."""
