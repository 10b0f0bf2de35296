"""recipes/slurm.sbatch trains, saves and resumes. Stand-ins replace Slurm; tests/unit has its ways to end."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.slurm import RECIPE, install
from tests.support.tiny import RECIPES, ROOT, Checkpoints

TRAINING = [str(RECIPES / "cpu/run.py"), str(RECIPES / "pretrain_tiny.py")]
TRAINING += (RECIPES / "tiny.args").read_text().split()
TRAINING += ["--lr-decay-iters", "1000", "--override-opt_param-scheduler"]
TRAINING += ["--save-interval", "1000", "--step-delay-ms", "100"]


@contextlib.contextmanager
def start(folder: Path, save: Path, iterations: int) -> Iterator[subprocess.Popen[str]]:
    """Runs the batch script, which prints into `folder/log`, and kills what is left of it in the end."""
    environment = install(folder, node="127.0.0.1", python=f'exec {sys.executable} "$@"')
    environment |= {"SLURM_RESTART_COUNT": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = ["bash", str(RECIPE), str(save), str(iterations), "python", *TRAINING]
    with (folder / "log").open("w") as log:
        job = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=log, stderr=log, text=True, start_new_session=True
        )
    try:
        yield job
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_signalled_job_saves_queues_itself_again_and_resumes(tmp_path: Path) -> None:
    checkpoints, log, calls = Checkpoints(tmp_path / "run"), tmp_path / "log", tmp_path / "calls"

    with start(tmp_path, checkpoints.root, 900) as job:
        while "iteration        2/" not in log.read_text():
            assert job.poll() is None, log.read_text()[-6000:]
            time.sleep(0.1)
        srun = children(job.pid)[0]
        os.kill(children(srun)[1], signal.SIGTERM)  # to one rank only: Megatron passes it on
        assert job.wait(60) == 0, log.read_text()[-6000:]
    last = checkpoints.tracked()
    assert last is not None and checkpoints.published() == [last]
    assert calls.read_text().count("scontrol requeue") == 1

    with start(tmp_path, checkpoints.root, last + 2) as job:
        assert job.wait(120) == 0, log.read_text()[-6000:]
    printed = log.read_text()
    assert f"iteration {last + 1:8d}/" in printed and f"iteration {last:8d}/" not in printed
    assert checkpoints.published() == [last, last + 2]
    assert calls.read_text().count("scontrol requeue") == 1, "training is over"
