"""Runs a Megatron-LM training script on a CPU.

    torchrun --nproc-per-node 2 recipes/cpu/run.py SCRIPT ARGUMENTS...

The script runs as if it had been started itself, with the stand-ins of this folder in place. It may
be the stock `pretrain_gpt.py` of a Megatron-LM checkout, or `recipes/pretrain_tiny.py`.
"""

import os
import runpy
import sys
from pathlib import Path

# Before torch: a GPU beside the pretend one would make some of the tensors its own.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import stand_ins


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: run.py SCRIPT ARGUMENTS...")
    script = Path(sys.argv[1]).resolve()
    if not script.is_file():
        sys.exit(f"run.py: no such script: {script}")
    sys.argv = sys.argv[1:]
    sys.path[0] = str(script.parent)  # a checkout's Megatron comes before an installed one
    stand_ins.install()
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
