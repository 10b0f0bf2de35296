"""Where Megatron is attached to: which functions are replaced, in which release, and when."""
