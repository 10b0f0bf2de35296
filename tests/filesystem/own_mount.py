"""Runs a script as recipes/cpu/run.py does, in a rank that sees a directory through a mount of its own.

    MOUNTS=A:B SEEN_AT=C torchrun --nproc-per-node 2 tests/filesystem/own_mount.py SCRIPT ARGUMENTS...

Rank 0 finds at C what A has, rank 1 what B has. Needs root.
"""

import os
import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).parents[2] / "recipes" / "cpu" / "run.py"


def main() -> None:
    """Mounts, and runs the script."""
    mounts = os.environ["MOUNTS"].split(":")
    os.unshare(os.CLONE_NEWNS)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    mount = mounts[int(os.environ["LOCAL_RANK"])]
    subprocess.run(["mount", "--bind", mount, os.environ["SEEN_AT"]], check=True)
    os.execv(sys.executable, [sys.executable, str(RUN), *sys.argv[1:]])  # with the same mounts


if __name__ == "__main__":
    main()
