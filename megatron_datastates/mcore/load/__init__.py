"""Loads through Megatron: by format, in agreement between ranks, and in place."""
