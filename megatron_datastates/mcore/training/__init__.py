"""The integration with Megatron's training program: its arguments, loop, and run directories."""
