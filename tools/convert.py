"""Runs `datastates convert` as a script: torchrun --nproc-per-node 8 tools/convert.py SOURCE TARGET."""

from megatron_datastates.cli import convert, entry

if __name__ == "__main__":
    entry.run(lambda: convert.app)  # importing only this module registers only this command
