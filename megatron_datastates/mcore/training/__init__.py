"""Megatron's own training program: its arguments, its loop, and the directories of its runs."""
