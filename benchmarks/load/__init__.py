"""Measures loads through Megatron: rates by sharding, against torch_dist and the disk's limit."""
