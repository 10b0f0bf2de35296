"""Stand-ins for Slurm's commands, which start two tasks on this machine, and the environment of a job."""

import os
from pathlib import Path

RECIPE = Path(__file__).parents[2] / "recipes" / "slurm.sbatch"
JOB = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "node-[1-100000]", "SLURM_CPUS_PER_TASK": "7"}
# A step of two tasks. As Slurm's, it ends with the largest exit code, which is 143 after SIGTERM.
SRUN = """
echo srun "$@" >> "$CALLS"
while [[ $1 == --* ]]; do shift; done
for task in 0 1; do
    SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NTASKS=2 "$@" & tasks+=($!)
done
status=0
for task in "${tasks[@]}"; do
    wait "$task"; code=$?; (( code > status )) && status=$code
done
exit "$status"
"""
# So many nodes that a reader that does not read all of them is noticed.
SCONTROL = """
echo scontrol "$@" >> "$CALLS"
if [ "$1" = show ]; then echo "$FIRST_NODE"; seq -f 'node-%g' 2 100000; fi
"""


def install(folder: Path, node: str = "node-1", **others: str) -> dict[str, str]:
    """Writes `srun`, `scontrol` and other commands into a folder, and returns the environment of a job.

    Calls are appended to `folder/calls`.
    """
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, **others}.items():
        file = folder / name
        file.write_text(f"#!/bin/bash\n{text}")
        file.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return os.environ | JOB | {"FIRST_NODE": node, "CALLS": str(folder / "calls"), "PATH": path}
