"""`python -m megatron_datastates` is the command `datastates`."""

from megatron_datastates.cli.entry import main

main()
