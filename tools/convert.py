"""Runs `datastates convert` as a script: torchrun --nproc-per-node 8 tools/convert.py SOURCE TARGET."""

import sys

from megatron_datastates.cli import entry

if __name__ == "__main__":
    sys.argv.insert(1, "convert")
    entry.main()
