"""One process parses the arguments, others save with them, never in another format than requested."""

import json
import os
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import LAYOUTS, PATH, RECIPES, ROOT, Checkpoints

pytestmark = pytest.mark.skipif(
    metadata.version("megatron-core") < "0.19",
    reason="before 0.19, Megatron validates arguments where it trains",
)
PROGRAM = ROOT / "tests/support/pickled_rank.py"
TINY = (RECIPES / "tiny.args").read_text().split()
RANKS = 2


def environment(rank: int = 0, port: int = 0) -> dict[str, str]:
    ours = [*map(str, PATH), str(ROOT), os.environ.get("PYTHONPATH", "")]
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    return (
        os.environ
        | {name: str(value) for name, value in numbers.items()}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        | {"PYTHONPATH": os.pathsep.join(ours), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    )


def drive(file: Path, *arguments: str | Path) -> None:
    command = [sys.executable, PROGRAM, "drive", file, *TINY, "--ckpt-format", "datastates", *arguments]
    subprocess.run(list(map(str, command)), env=environment(), check=True, capture_output=True)


def work(verb: str, file: Path, folder: Path, *, fails: bool = False) -> str:
    """Runs the workers in new processes and returns what they printed."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(PROGRAM), verb, str(file), str(folder)]
    ranks = [
        subprocess.Popen(
            command,
            env=environment(rank, port),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(RANKS)
    ]
    try:
        printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, text in zip(ranks, printed, strict=True):
        assert bool(rank.returncode) == fails, text[-6000:]
    return "\n".join(printed)


def reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_workers_save_what_the_driver_asked_for_and_resume_exactly(tmp_path: Path, mode: str) -> None:
    save = tmp_path / "ck"
    flags = [*LAYOUTS["tp2"], "--save", save, *(["--async-save"] if mode == "async" else [])]
    drive(tmp_path / "args", *flags)
    work("save", tmp_path / "args", tmp_path / "saved")
    Checkpoints(save).assert_format(1, "datastates")
    assert Checkpoints(save).tracked() == 1
    drive(tmp_path / "resuming", *flags, "--load", save)
    work("load", tmp_path / "resuming", tmp_path / "loaded")
    for before, after in zip(reports(tmp_path / "saved"), reports(tmp_path / "loaded"), strict=True):
        assert after["iteration"] == 1
        assert after["state"] == before["state"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("verb", "word"),
    [
        ("unhooked", "no megatron.core.dist_checkpointing.strategies.fully_parallel.Fully"),
        ("detached", "--ckpt-format datastates is not available"),
    ],
)
def test_worker_that_cannot_save_in_our_format_saves_nothing(tmp_path: Path, verb: str, word: str) -> None:
    drive(tmp_path / "args", *LAYOUTS["tp2"], "--save", tmp_path / "ck")
    printed = work(verb, tmp_path / "args", tmp_path / "saved", fails=True)
    assert "HookPointError" in printed and word in printed
    assert Checkpoints(tmp_path / "ck").complete() == []
    assert not list((tmp_path / "ck").rglob("*.distcp"))
