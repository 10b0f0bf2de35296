"""One rank of a run of Megatron's own tests, in a forked process, on gloo and the CPU.

What belongs here: stand-ins that let Megatron's tests run without a GPU, our strategy in place of
`TorchDistSaveShardedStrategy`, and the record of every test. What does not: judging the records
(`upstream_conformance.py`).
"""

from __future__ import annotations

import collections
import ctypes
import functools
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

COLLECTIVE_SECONDS = 600  # the launcher notices a hang before that
saves: collections.Counter[str] = collections.Counter()  # "ours" and "stock", of the current test


def prepare(ours: bool) -> None:
    """Imports Megatron with the stand-ins in place. Call it once, in the process that is forked."""
    sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "recipes/cpu"))
    import stand_ins

    stand_ins.install()
    import torch

    torch.set_num_threads(1)
    _use_gloo(torch.distributed)
    import megatron.core.dist_checkpointing.strategies.torch as strategies
    import megatron.core.models.gpt
    import megatron.training.checkpointing
    import megatron.training.training  # noqa: F401

    _count_stock_saves(strategies.TorchDistSaveShardedStrategy, torch.distributed.checkpoint)
    if ours:
        _construct_ours(strategies.TorchDistSaveShardedStrategy)


def run_rank(rank: int, ranks: int, arguments: list[str], folder: Path, done: list[str]) -> int:
    """Runs pytest as one rank; returns its exit code.

    Args:
        folder: receives the rank's log, record and temporary files.
        done: tests to skip.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    _download_nothing()
    # A failed test's TempNamedDir (Megatron's) lives as long as its traceback, and would be removed in a
    # later test that uses the same name. The launcher removes all of `folder`.
    tempfile.TemporaryDirectory._cleanup = classmethod(lambda *args, **kwargs: None)  # type: ignore
    recorder = Recorder(folder, rank, done)
    options = ["-p", "no:cacheprovider", "-o", "addopts=", "--basetemp", str(folder / f"tmp-{rank}")]
    return int(pytest.main([*arguments, "-q", "-s", *options], plugins=[recorder]))


class Recorder:
    """Writes lines of JSON: the collected tests, then the start and the end of each."""

    def __init__(self, folder: Path, rank: int, done: list[str]) -> None:
        self._folder, self._rank, self._done = folder, rank, frozenset(done)
        self._file = (folder / f"rank-{rank}.jsonl").open("w", buffering=1)
        self._reports: list[Any] = []

    def _write(self, **record: Any) -> None:
        self._file.write(json.dumps(record) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        self._write(collected=[_short(item.nodeid) for item in items])
        items[:] = [item for item in items if _short(item.nodeid) not in self._done]

    def pytest_runtestloop(self) -> None:
        """Initializes the process group: many tests rely on an earlier one to do so."""
        utilities = sys.modules.get("tests.unit_tests.test_utilities")
        if utilities is not None:
            utilities.Utils.initialize_distributed()

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome != "passed":
            self._write(test="collection", outcome=_outcome([report]), error=_error([report]), saves={})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._reports = []
        saves.clear()
        self._write(start=_short(nodeid))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        name, outcome = _short(nodeid), _outcome(self._reports)
        self._write(
            test=name, outcome=outcome, error=_error(self._reports), saves=dict(saves), at=time.monotonic()
        )
        # Collectives of the next test must not meet those of a rank that is still in this one: the launcher
        # lets all ranks continue, or restarts them.
        while outcome == "fail" and not permission(self._folder, name).exists():
            time.sleep(0.1)


def permission(folder: Path, test: str) -> Path:
    """Returns the path of the file whose presence lets ranks that failed `test` continue."""
    return folder / f"go-on-{hashlib.sha256(test.encode()).hexdigest()[:16]}"


def _short(nodeid: str) -> str:
    return nodeid.split("::", 1)[-1]


def _outcome(reports: list[Any]) -> str:
    outcomes = {report.outcome for report in reports}
    return "fail" if "failed" in outcomes else "skip" if "skipped" in outcomes else "pass"


def _error(reports: list[Any]) -> str:
    """Returns the reason, in one line, of the first report that did not pass."""
    for report in reports:
        if report.outcome == "failed":
            crash = getattr(report.longrepr, "reprcrash", None)
            lines = [line for line in str(crash.message if crash else report.longrepr).splitlines() if line]
            # If the message contains a traceback (torch's CheckpointException), the reason is at its end.
            return " ... ".join(dict.fromkeys([lines[0][:200], *lines[-2:]]))[:500]
        if report.outcome == "skipped":
            where = report.longrepr
            return str(where[2] if isinstance(where, tuple) else where)[:400]
    return ""


def _use_gloo(distributed: Any) -> None:
    names = ("init_process_group", "new_group", "barrier", "destroy_process_group")
    original = {name: getattr(distributed, name) for name in names}
    limit = timedelta(seconds=COLLECTIVE_SECONDS)
    groups: dict[Any, Any] = {}

    def init_process_group(backend: Any = None, timeout: Any = None, **options: Any) -> Any:
        groups.clear()
        options.pop("device_id", None)
        return original["init_process_group"]("gloo", timeout=limit, **options)

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **options: Any) -> Any:
        # Megatron rarely destroys groups, and each gloo group has a thread that wakes 100 times a second, so
        # every test would be slower than the one before. Groups of the same ranks are therefore shared.
        key = None if ranks is None else tuple(ranks)
        if key not in groups:
            options.pop("pg_options", None)
            groups[key] = original["new_group"](ranks, limit, "gloo", **options)
        return groups[key]

    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return original["barrier"](group, async_op)

    def destroy_process_group(group: Any = None) -> None:
        if group is None or group is distributed.group.WORLD:
            original["destroy_process_group"]()

    for replacement in (init_process_group, new_group, barrier, destroy_process_group):
        setattr(distributed, replacement.__name__, replacement)
        setattr(distributed.distributed_c10d, replacement.__name__, replacement)


def _download_nothing() -> None:
    """Stops the tests' conftest from downloading data sets, which tests of checkpoints do not read."""
    module: Any = types.ModuleType("tests.test_utils.python_scripts.download_unit_tests_dataset")
    module.download_and_extract_asset = lambda *args, **kwargs: None
    sys.modules[module.__name__] = module


def _count_stock_saves(strategy: Any, dcp: Any) -> None:
    def counted(original: Any) -> Any:
        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            saves["stock"] += 1
            return original(*args, **kwargs)

        return save

    strategy.async_save = counted(strategy.async_save)  # its save() calls it too
    dcp.save = counted(dcp.save)


def _construct_ours(stock: Any) -> None:
    """Makes the stock class construct ours, a subclass of it, under any name it was imported by."""
    from megatron_datastates.mcore.save.strategy import DataStatesSaveStrategy

    class OurStrategy(DataStatesSaveStrategy):
        def __init__(self, *stock_arguments: Any, **stock_options: Any) -> None:
            super().__init__()

        def save(self, *args: Any, **kwargs: Any) -> None:
            saves["ours"] += 1
            super().save(*args, **kwargs)

        def async_save(self, *args: Any, **kwargs: Any) -> Any:
            saves["ours"] += 1
            return super().async_save(*args, **kwargs)

    stock.__new__ = lambda cls, *args, **kwargs: object.__new__(OurStrategy if cls is stock else cls)
