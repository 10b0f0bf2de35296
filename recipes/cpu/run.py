"""Runs a Megatron-LM training script on a CPU.

    torchrun --nproc-per-node 2 recipes/cpu/run.py SCRIPT ARGUMENTS...

The script runs as if started directly, but with the stand-ins of this folder in place of a GPU. It may be
the stock `pretrain_gpt.py` of a Megatron-LM checkout, or `recipes/pretrain_tiny.py`.
"""

import os
import runpy
import sys
from pathlib import Path

# Set before torch is imported: with a real GPU visible, some tensors would be allocated on it.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import stand_ins


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: run.py SCRIPT ARGUMENTS...")
    script = Path(sys.argv[1]).resolve()
    if not script.is_file():
        sys.exit(f"run.py: no such script: {script}")
    sys.argv = sys.argv[1:]
    sys.path[0] = str(script.parent)  # a checkout's Megatron takes precedence over an installed one
    stand_ins.install()
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
