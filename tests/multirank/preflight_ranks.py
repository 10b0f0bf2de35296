"""Ranks that run a preflight, each in the working directory of its node."""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from saving_rank import report

from megatron_datastates.pipeline.near import places
from megatron_datastates.preflight import run, storage
from megatron_datastates.preflight.ranks import Ranks


def preflight(nodes: list[str], folder: str) -> None:
    """The directory is `run`, below the working directory, which ranks on one node share."""
    storage._SECONDS = 1.0
    torch.cuda.is_available = lambda: False  # the stand-ins for Megatron on a CPU pretend that there is a GPU
    ranks = Ranks()
    assert dist.get_backend() == "undefined", "that of a program that has named none"
    os.environ["LOCAL_RANK"] = "0"
    os.chdir(nodes[ranks.rank])
    result = run.preflight(ranks, Path("run"), 2 << 20, saves=2)
    checks = {check.name: [check.verdict.name, check.text] for check in result.checks}
    trial = None if result.trial is None else {"bytes": result.trial.bytes, "fault": result.trial.fault}
    report(folder, good=result.is_good, nodes=result.nodes, checks=checks, trial=trial)
    ranks.close()


def preflight_of_two_kernels(node: str, folder: str) -> None:
    """Of two nodes with one name."""
    places._BOOT_ID = Path(node, os.environ["RANK"])
    places._BOOT_ID.write_text(os.environ["RANK"])
    preflight([node] * 2, folder)


def preflight_where_a_rank_differs(node: str, folder: str) -> None:
    if os.environ["RANK"] == "1":
        os.environ["MEGATRON_DATASTATES_DRAIN_EVERY"] = "2"
    preflight([node] * 2, folder)


def close(where: str, folder: str) -> None:
    """Rank 0 takes a while to print."""
    torch.cuda.is_available = lambda: False
    ranks = Ranks()
    printed = Path(where, "printed")
    if ranks.rank == 0:
        time.sleep(1.0)
        printed.touch()
    ranks.close()
    Path(folder, f"rank{ranks.rank}.json").write_text(json.dumps({"printed": printed.exists()}))
