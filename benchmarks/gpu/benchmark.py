"""Runs the parts of benchmarks.gpu, each in its own process and time, and writes their results as they come.

A part that fails, hangs or is late affects no other. This module imports no torch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.gpu.environment import EIGHT, ONE, ROOT, SETTINGS, TMPFS, split
from benchmarks.gpu.processes import run_process
from benchmarks.gpu.results import check_requirements, merge, read_reports

MEANINGLESS = "fake CUDA driver over host memory: a try of the code, its numbers mean nothing"
PART_COMMAND = (sys.executable, "-m", "benchmarks.gpu.part")

# Time limits in seconds, the start of a process included, in the order of parts. The last part may use what
# the others left.
PART_SECONDS = {
    "machine": 30.0,
    "tests": 110.0,
    "training": 400.0,
    "held": 30.0,
    "copies": 40.0,
    "small_copies": 25.0,
    "steps": 50.0,
    f"steps{ONE}": 50.0,
    f"steps{EIGHT}": 50.0,
    f"held{ONE}": 25.0,
    "loads": 40.0,
    "page_locking": 20.0,
    "pipeline": 25.0,
    "megatron": 120.0,
}
# What fits into commands of 6 minutes, two of them on a machine that is lent for 15 minutes, starts included.
# What the third has differs little from machine to machine of a kind.
CALLS = {
    1: ("machine", "tests", "training"),
    2: ("held", "small_copies", "steps", f"steps{ONE}", f"steps{EIGHT}", "loads", "megatron"),
    3: ("copies", f"held{ONE}", "page_locking", "pipeline"),
}
CALL_SECONDS = 370.0
_LEAST_SECONDS = 10.0  # a part is not started with less
_MEASURING = 0.75  # of a part's seconds; the rest is for its start and its end,
_MOST_BESIDE = 25.0  # or these seconds, if they are less
_LOG_BYTES = 1 << 20  # kept of the output of one part that failed


class Benchmark:
    """The results so far, and the file that they are in."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._end = time.monotonic() + arguments.budget
        self._gpu = None if arguments.fake else (machine.gpu() or {}).get("name")
        self.logs = Path(tempfile.mkdtemp(prefix="datastates-bench-logs-"))
        self.parts: dict[str, Any] = {}
        self.results: dict[str, Any] = {}

    def run(self, parts: Sequence[str]) -> None:
        """Runs one part, or several that share a process."""
        limits = sum(PART_SECONDS[part] for part in parts)
        seconds = min(limits, self._end - time.monotonic())
        if seconds < _LEAST_SECONDS:
            self.parts |= {part: {"status": "left out: no time was left"} for part in parts}
            return
        say(f"{', '.join(parts)} ...")
        begin = time.monotonic()
        log = self.logs / f"gpu-{parts[0]}.log"
        if parts == ["tests"]:
            self._test(seconds, log)
        else:
            self._measure(parts, seconds, log)
        for part in parts:
            self.parts[part]["seconds"] = round(time.monotonic() - begin, 1)
            say(f"{part}: {self.parts[part]['status']}")
        if "OUT" in os.environ and not all(self.parts[part]["status"] == "done" for part in parts):
            self._keep(log)

    def _keep(self, log: Path) -> None:
        """Appends the output of a part that failed to one file: a lent machine returns few files."""
        self._arguments.out.mkdir(parents=True, exist_ok=True)
        with (self._arguments.out / "gpu-failed.log").open("ab") as kept:
            kept.write(f"==== {log.name}\n".encode() + log.read_bytes()[-_LOG_BYTES:])

    def _test(self, seconds: float, log: Path) -> None:
        settings = self.logs / "pytest.ini"  # setup.cfg needs a newer pytest than may be there
        settings.write_text(
            "[pytest]\naddopts = -ra --import-mode=importlib -p no:cacheprovider\n"
            "timeout = 60\nfaulthandler_timeout = 45\n"  # the latter shows a thread that hangs in the driver
            "tmp_path_retention_policy = failed\n"  # their files are large
        )
        # Without the conftest.py of tests/, which imports Megatron.
        limits = ["-c", str(settings), "--rootdir=.", "--confcutdir=tests/gpu"]
        limits += ["-v", "--tb=short", "--durations=5"]  # a line for each, so that a late end loses none
        # Plugins of the machine's other packages are not ours to try.
        environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        command = [sys.executable, "-m", "pytest", "-p", "pytest_timeout", *limits, "tests/gpu"]
        status = run_process(command, seconds, log, environment)
        lines = log.read_text(errors="replace").strip().splitlines()
        failed = [line for line in lines if re.search(r"^(FAILED|ERROR)| (FAILED|ERROR) ", line)]
        self.parts["tests"] = {"status": status, "summary": lines[-1] if lines else "", "failed": failed}
        if status != "done":
            print(*lines[-60:], sep="\n", flush=True)

    def _measure(self, parts: Sequence[str], seconds: float, log: Path) -> None:
        folder = Path(tempfile.mkdtemp(prefix="datastates-bench-", dir=self._arguments.folder))
        reports = self.logs / f"{parts[0]}.jsonl"
        command = [*PART_COMMAND, *parts, "--into", str(reports)]
        command += [
            "--folder",
            str(folder),
            "--seconds",
            f"{max(_MEASURING * seconds, seconds - _MOST_BESIDE):.1f}",
        ]

        def look() -> None:  # so that a kill of this process loses no more than a few seconds' results
            found = read_reports(reports)
            self.parts |= {part: {"status": "under way"} | found.get(part, {}) for part in parts}
            self.write()

        try:
            status = run_process(command, seconds, log, _environment(parts), look)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(TMPFS / folder.name, ignore_errors=True)  # see memory.tmpfs
        results = read_reports(reports)
        for part in parts:
            self.parts[part] = _conclude(results.get(part, {}), status)
        if status != "done":
            print(*log.read_text(errors="replace").splitlines()[-25:], sep="\n", flush=True)

    def write(self) -> Path:
        """Writes all results so far to the file, anew and whole; returns its path."""
        arguments = self._arguments
        gpu = self._gpu or (self.parts.get("machine", {}).get("gpu") or {}).get("name", "unknown")
        self.results = {
            "of": MEANINGLESS if arguments.fake else "GPU",
            "gpu": "none" if arguments.fake else gpu,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": _commit(),
            "native_module": arguments.native,
            "bars": check_requirements(self.parts),
            "parts": self.parts,
        }
        call = f"-call{arguments.call}" if arguments.call else ""
        return _store(self.results, arguments.out, call)

    def close(self) -> None:
        """Removes the logs."""
        shutil.rmtree(self.logs, ignore_errors=True)


def say(text: str) -> None:
    """Prints a line at once."""
    print(f"benchmarks.gpu: {text}", flush=True)


def _conclude(found: dict[str, Any], status: str) -> dict[str, Any]:
    """Adds to a part's results how it ended; `status` is how its process ended."""
    if found.pop("complete", False):  # then it does not matter what happened when the process ended
        return {"status": "done"} | found
    return found | {
        "status": "failed: its process ended before it was complete" if status == "done" else status
    }


def _environment(parts: Sequence[str]) -> dict[str, str]:
    """Returns the environment of the process of some parts, which all have the same settings."""
    names = {name for settings in SETTINGS.values() for name in settings}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    return environment | split(parts[0])[1]


def _store(results: Mapping[str, Any], folder: Path, suffix: str = "") -> Path:
    gpu = re.sub(r"[^a-z0-9]+", "-", str(results["gpu"]).lower().replace("nvidia ", ""))
    name = "fake" if results["of"] == MEANINGLESS else gpu
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"gpu-{name}-{datetime.date.today()}{suffix}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=1) + "\n")
    partial.replace(path)
    return path


def merge_files(paths: Sequence[Path], folder: Path) -> tuple[dict[str, Any], Path]:
    """Merges the results of several calls into one file in `folder`; returns them and its path."""
    merged = merge([json.loads(path.read_text()) for path in paths])
    return merged, _store(merged, folder)


def calls_beside(path: Path) -> list[Path]:
    """Returns the files of calls on the same GPU and day, or nothing if there is no other."""
    start = path.stem.rpartition("-call")[0]
    paths = [path.with_name(f"{start}-call{call}.json") for call in CALLS]
    found = [one for one in paths if start and one.exists()]
    return found if len(found) > 1 else []


def _commit() -> str | None:
    """Returns the checkout's commit, or None outside a checkout."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except OSError:  # no git there
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None
