"""Simulates checkpoints of up to 16,384 ranks: planning, publishing and opening them, without data."""
