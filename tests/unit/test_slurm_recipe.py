"""recipes/slurm.sbatch: what ranks get, and when the job queues itself again.

Stand-ins replace Slurm's commands and the training.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.slurm import RECIPE, install

TRACKER = "latest_checkpointed_iteration.txt"
PYTHON = f"""
if [ "$2" = megatron_datastates ]; then echo "$RANK: $*" >> "$CALLS"; exit "$PREFLIGHT"; fi
exec {sys.executable} "$@"
"""
RANK = """
import os, pathlib, signal, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
got = [*(os.environ[name] for name in names), str(os.getppid()), *sys.argv[1:]]
pathlib.Path(__file__).with_name(f"got-{got[0]}").write_text("\\n".join(got))
how, iteration = sys.argv[1:3]
if how == "killed":
    os.kill(os.getpid(), signal.SIGTERM)
if how == "saved" and got[0] == "0":
    save = sys.argv[sys.argv.index("--save") + 1]
    pathlib.Path(save, "latest_checkpointed_iteration.txt").write_text(iteration)
sys.exit(int(iteration) if how == "fails" else 0)
"""


@dataclass(frozen=True)
class Batch:
    """How the batch script ended, what it printed, and the commands of Slurm, and of ours, that it called."""

    status: int
    printed: str
    calls: list[str]


def submit(
    folder: Path, how: str, iteration: int, *, restarts: str | None = "1", preflight: int = 0
) -> Batch:
    (folder / "rank.py").write_text(RANK)
    save = folder / "a run"
    save.mkdir(exist_ok=True)
    slurm = install(folder, python=PYTHON) | {"PREFLIGHT": str(preflight)}
    slurm |= {"SLURM_RESTART_COUNT": restarts} if restarts is not None else {}
    command = ["bash", *map(str, (RECIPE, save, 20, "python", folder / "rank.py", how, iteration))]
    done = subprocess.run(command, env=slurm, text=True, capture_output=True, timeout=60, check=False)
    return Batch(done.returncode, done.stdout + done.stderr, (folder / "calls").read_text().splitlines())


def test_ranks_get_what_torchrun_would_set_and_are_the_tasks_themselves(tmp_path: Path) -> None:
    """Slurm signals tasks, not their children: no shell may stay between srun and a rank."""
    batch = submit(tmp_path, "saved", 20)
    assert batch.status == 0, batch.printed
    first, second = ((tmp_path / f"got-{rank}").read_text().split("\n") for rank in (0, 1))
    assert first[:5] == ["0", "2", "0", "node-1", "23456"] and second[:5] == [
        "1",
        "2",
        "1",
        "node-1",
        "23456",
    ]
    assert first[5] == second[5], "the parent of both is srun"
    save = str(tmp_path / "a run")
    training = ["saved", "20", "--train-iters", "20", "--save", save, "--load", save]
    ours = ["--ckpt-format", "datastates", "--async-save", "--exit-signal-handler"]
    assert first[6:] == second[6:] == training + ours
    assert all(call.startswith("srun --kill-on-bad-exit=1 --cpus-per-task=7 ") for call in batch.calls[1:])


@pytest.mark.parametrize(
    ("how", "iteration", "status", "is_queued_again"),
    [
        ("saved", 20, 0, False),
        ("saved", 7, 0, True),
        ("killed", 7, 0, True),  # before Megatron handles SIGTERM, and before the first save
        ("ends", 20, 1, False),  # without a tracker to be seen, as with an object store
        ("fails", 3, 3, False),
        ("fails", 137, 137, False),  # out of memory: it would happen again
    ],
)
def test_only_a_job_that_was_signalled_is_queued_again(
    how: str, iteration: int, status: int, is_queued_again: bool, tmp_path: Path
) -> None:
    batch = submit(tmp_path, how, iteration)
    assert batch.status == status, batch.printed
    assert ("scontrol requeue 123456" in batch.calls) == is_queued_again


def test_preflight_comes_first_and_once(tmp_path: Path) -> None:
    batch = submit(tmp_path, "saved", 20, restarts=None)
    assert batch.status == 0, batch.printed
    asked = f"-m megatron_datastates preflight {tmp_path / 'a run'}"
    assert sorted(call for call in batch.calls if "scontrol" not in call and "srun" not in call) == [
        f"{rank}: {asked}" for rank in (0, 1)
    ]
    later = submit(tmp_path, "saved", 20).calls[len(batch.calls) :]
    assert later and not any(asked in call for call in later)


def test_no_training_starts_after_a_failed_preflight(tmp_path: Path) -> None:
    batch = submit(tmp_path, "saved", 20, restarts=None, preflight=1)
    assert batch.status == 1 and not (tmp_path / "a run" / TRACKER).exists()
    assert not any("requeue" in call for call in batch.calls)
