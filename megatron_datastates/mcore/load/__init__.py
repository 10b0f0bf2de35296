"""Loads through Megatron: chosen by the directory's format, in place, with one outcome on all ranks."""
