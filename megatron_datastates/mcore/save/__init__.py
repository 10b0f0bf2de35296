"""The save strategy, and Megatron's sharded state as a state provider."""
