"""What is done with checkpoints beside saving and loading: verify, repair, prune, look for a good one."""
