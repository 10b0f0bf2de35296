"""A run of five checkpoints to be pruned, and what a plan for it says."""

from __future__ import annotations

import os
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.format.directory import TRACKER_NAME
from megatron_datastates.pipeline.runs.runs import find_iterations
from megatron_datastates.pipeline.upkeep.retention import RetentionRules, plan_prune
from megatron_datastates.pipeline.upkeep.verify import verify
from tests.unit.states import OPTIONS, SMALL, data_files

NUMBERS = [100, 200, 300, 400, 500]


def call_and_be_killed(work: Callable[[], object]) -> None:
    """Calls `work` in a fork of this process, which must end by a SIGKILL: that of a fault plan."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads; `work` needs none
        child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("saved") / "run"
    for number in NUMBERS:
        ds.save({"a": torch.arange(number), "o": number}, place(root, number), **SMALL)
        (place(root, number) / "metadata.json").write_text('{"sharded_backend": "datastates"}')
    (root / TRACKER_NAME).write_text("500")
    return root


@pytest.fixture
def root(saved, tmp_path) -> Path:
    """A copy of the run, which ended hours ago."""
    copied = Path(shutil.copytree(saved, tmp_path / "run"))
    for path in copied.rglob("*"):
        age(path, 7200)
    age(copied / TRACKER_NAME, 7199)  # written last
    return copied


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def place(root: Path, number: int) -> Path:
    return root / f"iter_{number:07d}"


def removed(root: Path, **rules: int) -> list[int]:
    return [one.number for one in plan_prune(root, RetentionRules(**rules)).removed]


def reasons(root: Path, **rules: int) -> dict[int, str]:
    return {one.number: why for one, why in plan_prune(root, RetentionRules(**rules)).kept}


def lose(root: Path, number: int) -> None:
    """Removes all of a checkpoint but its data files, which are what a killed save leaves."""
    for path in place(root, number).iterdir():
        if path not in data_files(place(root, number)):
            path.unlink()


def complete(root: Path) -> list[int]:
    """Returns the iterations that are called complete, and requires that they are."""
    found = [one for one in find_iterations(root) if one.complete]
    assert all(verify(one.path, options=OPTIONS).good for one in found)
    return [one.number for one in found]


def put(root: Path, number: int, name: str, seconds_old: float = 0.0) -> Path:
    path = place(root, number) / name
    path.write_bytes(b"12345")
    age(path, seconds_old)
    return path
