"""What a save costs a GPU that trains; run by gpu.sh, which see.

Runs each part (tests, page-locking, copies, held time, steps, loads, pipeline, Megatron) in a process of its
own and within its own time, so that a part that fails, hangs or is late loses no other. Writes one JSON file,
anew after each part, and prints a table. Two calls (--call) make one whole: once both files are in one folder
they are merged, there and by --merge. This process imports no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # as a script has it, for tests that import this

import machine
from gpu_results import FINE, ONE, check_bars, merge, print_table, read_told

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FAKE = "DATASTATES_BENCH_FAKE"
FAKE_FOLDER = "DATASTATES_BENCH_FAKE_FOLDER"
MEMORY = "DATASTATES_BENCH_MEMORY_GIB"  # see gpu_saves.py
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
MEANINGLESS = "fake CUDA driver over host memory: a try of the code, its numbers mean nothing"

# Seconds at most, the start of a process included; in this order. The last gets what the others left.
PART_SECONDS = {
    "machine": 30.0,
    "tests": 110.0,
    "page_locking": 50.0,
    "copies": 90.0,
    "held": 110.0,
    "steps": 60.0,
    "loads": 35.0,
    "pipeline": 30.0,
    f"copies{ONE}": 40.0,
    f"held{ONE}": 60.0,
    f"steps{ONE}": 45.0,
    "megatron": 200.0,
}
# What fits into two commands on a machine that is lent for less than 8 minutes at a time.
CALLS = {
    1: ("machine", "tests", "page_locking", "copies", "held"),
    2: ("steps", "loads", "pipeline", f"copies{ONE}", f"held{ONE}", f"steps{ONE}", "megatron"),
}
CALL_SECONDS = 455.0
_LOOK_SECONDS = 5.0
_LEAST_SECONDS = 10.0  # a part is not begun with less
_MEASURING = 0.75  # of a part's seconds; the rest is for its start and its end
_MOST_LOG_BYTES = 1 << 20  # of one part's output that failed
_TMPFS = Path("/dev/shm")


def run_process(
    command: Sequence[str],
    seconds: float,
    log: Path,
    environment: Mapping[str, str] | None = None,
    look: Callable[[], None] = lambda: None,
) -> str:
    """Runs a command, with all that it starts, for at most so long; returns how it ended.

    Meanwhile it calls `look` every few seconds.
    """
    end = time.monotonic() + seconds
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )
        try:
            while (code := _ended(process, min(_LOOK_SECONDS, end - time.monotonic()))) is None:
                if time.monotonic() >= end:
                    return f"ended after its {seconds:.0f} s"
                look()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # workers that it left, too
            process.wait()
    if code:
        last = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return f"failed with {code}: {' | '.join(last[-3:])}"
    return "done"


def _ended(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Its exit status, or None if it has not ended by then."""
    try:
        return process.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        return None


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
        """One part, or several that share a process."""
        wanted = sum(PART_SECONDS[part] for part in parts)
        seconds = min(wanted, self._end - time.monotonic())
        if seconds < _LEAST_SECONDS:
            self.parts |= {part: {"status": "left out: no time was left"} for part in parts}
            return
        self._say(f"{', '.join(parts)} ...")
        begin = time.monotonic()
        log = self.logs / f"gpu-{parts[0]}.log"
        if parts == ["tests"]:
            self._test(seconds, log)
        else:
            self._measure(parts, seconds, log)
        for part in parts:
            self.parts[part]["seconds"] = round(time.monotonic() - begin, 1)
            self._say(f"{part}: {self.parts[part]['status']}")
        if "OUT" in os.environ and not all(self.parts[part]["status"] == "done" for part in parts):
            self._keep(log)

    def _keep(self, log: Path) -> None:
        """Adds the output of a part that failed to one file: a lent machine returns few."""
        self._arguments.out.mkdir(parents=True, exist_ok=True)
        with (self._arguments.out / "gpu-failed.log").open("ab") as kept:
            kept.write(f"==== {log.name}\n".encode() + log.read_bytes()[-_MOST_LOG_BYTES:])

    def _test(self, seconds: float, log: Path) -> None:
        settings = self.logs / "pytest.ini"  # those of setup.cfg ask for newer pytest than may be there
        settings.write_text(
            "[pytest]\naddopts = -ra --import-mode=importlib -p no:cacheprovider\n"
            "timeout = 60\ntmp_path_retention_policy = none\n"  # their files are large
        )
        # Without the conftest.py of tests/, which wants Megatron.
        limits = ["-c", str(settings), "--rootdir=.", "--confcutdir=tests/gpu", "-q", "--durations=5"]
        status = run_process([sys.executable, "-m", "pytest", *limits, "tests/gpu"], seconds, log)
        lines = log.read_text(errors="replace").strip().splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        self.parts["tests"] = {"status": status, "summary": lines[-1] if lines else "", "failed": failed}
        if status != "done":
            print(*lines[-60:], sep="\n", flush=True)

    def _measure(self, parts: Sequence[str], seconds: float, log: Path) -> None:
        folder = Path(tempfile.mkdtemp(prefix="datastates-bench-", dir=self._arguments.folder))
        told = self.logs / f"{parts[0]}.jsonl"
        command = [sys.executable, str(HERE / "gpu_part.py"), *parts, "--into", str(told)]
        command += ["--folder", str(folder), "--seconds", f"{_MEASURING * seconds:.1f}"]

        def look() -> None:  # what a kill of all of this would lose is no more than a few seconds' results
            found = read_told(told)
            self.parts |= {part: {"status": "under way"} | found.get(part, {}) for part in parts}
            self.write()

        try:
            status = run_process(command, seconds, log, _environment(parts), look)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(_TMPFS / folder.name, ignore_errors=True)  # see gpu_saves.tmpfs
        results = read_told(told)
        for part in parts:
            found = results.get(part, {})
            if found.pop("complete", False):  # whatever happened when its process ended
                self.parts[part] = {"status": "done"} | found
            else:
                self.parts[part] = found | {
                    "status": "failed: it ended without a word" if status == "done" else status
                }
        if status != "done":
            print(*log.read_text(errors="replace").splitlines()[-25:], sep="\n", flush=True)

    def write(self) -> Path:
        """Writes the file anew, whole."""
        arguments = self._arguments
        gpu = self._gpu or (self.parts.get("machine", {}).get("gpu") or {}).get("name", "unknown")
        self.results = {
            "of": MEANINGLESS if arguments.fake else "GPU",
            "gpu": "none" if arguments.fake else gpu,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": _commit(),
            "native_module": arguments.native,
            "bars": check_bars(self.parts),
            "parts": self.parts,
        }
        call = f"-call{arguments.call}" if arguments.call else ""
        return _store(self.results, arguments.out, call)

    def _say(self, text: str) -> None:
        print(f"gpu.py: {text}", flush=True)

    def close(self) -> None:
        shutil.rmtree(self.logs, ignore_errors=True)


def _environment(parts: Sequence[str]) -> dict[str, str]:
    """Of a part's process. CUDA reads the number of its connections once, when it starts."""
    environment = dict(os.environ)
    environment.pop(_CONNECTIONS, None)
    return environment | ({_CONNECTIONS: "1"} if parts[0].endswith(ONE) else {})


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
    """Results of several calls, and the file that they are now in together."""
    merged = merge([json.loads(path.read_text()) for path in paths])
    return merged, _store(merged, folder)


def _calls_beside(path: Path) -> list[Path]:
    """The files of all calls on the same GPU and day, if every one is there."""
    start = path.stem.rpartition("-call")[0]
    paths = [path.with_name(f"{start}-call{call}.json") for call in CALLS]
    return paths if start and all(one.exists() for one in paths) else []


def _commit() -> str | None:
    """None outside a checkout."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or None if found.returncode == 0 else None


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fake", action="store_true", help="a tiny try on the fake driver, without a GPU")
    parser.add_argument("--out", type=Path, help="folder of the results' file")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="disk to measure")
    parser.add_argument("--call", type=int, choices=CALLS, help="half of the parts, for less than 8 minutes")
    parser.add_argument("--parts", nargs="+", choices=PART_SECONDS, help="these parts instead")
    parser.add_argument(
        "--memory", type=float, metavar="GIB", help="host memory, where the system shows less"
    )
    parser.add_argument(
        "--merge", nargs="+", type=Path, metavar="FILE", help="merge results; measure nothing"
    )
    parser.add_argument("--prebuilt", action="store_true", help="for gpu.sh: use the module carried in")
    parser.add_argument("--budget", type=float, help="seconds for everything")
    parser.add_argument("--spent", type=float, default=0.0, help="seconds of a call that are over")
    parser.add_argument("--native", default="as found", help="where the native module came from; noted")
    parsed = parser.parse_args(arguments)
    parsed.parts = parsed.parts or CALLS.get(parsed.call, PART_SECONDS)
    if parsed.budget is None:
        whole = sum(PART_SECONDS[part] for part in parsed.parts)
        parsed.budget = CALL_SECONDS - parsed.spent if parsed.call else whole
    if parsed.out is None:
        kept = HERE / "results" if not parsed.fake else ROOT / "build" / "bench"
        parsed.out = kept if parsed.fake or "OUT" not in os.environ else Path(os.environ["OUT"])
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every part was done, or left out for want of Megatron, whatever bars were met."""
    parsed = parse(arguments)
    if parsed.merge:
        results, path = merge_files(parsed.merge, parsed.out)
        print_table(results, results["of"] == MEANINGLESS)
        print(f"gpu.py: merged into {path}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what is under way is ended, its folder removed
    parts = [part for part in PART_SECONDS if part in parsed.parts]
    groups = [[part] for part in parts]
    benchmark = Benchmark(parsed)
    if parsed.fake:
        os.environ[FAKE] = "1"
        os.environ[FAKE_FOLDER] = str(benchmark.logs)
        # In one process: they are tiny. The others show that they get an environment of their own.
        groups = [[part for part in parts if part != "tests" and not part.endswith(ONE)]]
        groups.append([part for part in parts if part.endswith(ONE)])
    if parsed.memory:
        os.environ[MEMORY] = str(parsed.memory)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        for group in filter(None, groups):
            benchmark.run(group)
            benchmark.write()
        path = benchmark.write()
    finally:
        benchmark.close()
    results = benchmark.results
    if beside := _calls_beside(path):
        results, path = merge_files(beside, parsed.out)
    print_table(results, parsed.fake)
    print(f"gpu.py: {'of the ' + MEANINGLESS + '; ' if parsed.fake else ''}results are in {path}")
    return int(not all(part["status"].startswith(FINE) for part in benchmark.parts.values()))


if __name__ == "__main__":
    sys.exit(main())
