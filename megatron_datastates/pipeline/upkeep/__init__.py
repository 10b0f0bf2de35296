"""What is done with checkpoints beside saves and loads: verify, repair, prune, find an undamaged one."""
