"""Measures what checkpoints cost a training run, in Megatron's own loop on a CPU: the papers' evaluation."""
