"""What a save costs a GPU that trains; run by gpu.sh, which see.

Runs each part (tests, copies, held time, steps, pipeline, Megatron) in a process of its own and within its
own time, so that a part that fails, hangs or is late loses no other. Writes one JSON file, anew after each
part, and prints a table. This process imports no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FAKE = "DATASTATES_BENCH_FAKE"
MEANINGLESS = "fake CUDA driver over host memory: a try of the code, its numbers mean nothing"

# Seconds at most, the start of a process included; in this order. The last gets what the others left.
PART_SECONDS = {
    "machine": 30.0,
    "tests": 80.0,
    "copies": 60.0,
    "held": 60.0,
    "steps": 50.0,
    "pipeline": 45.0,
    "loads": 40.0,
    "megatron": 200.0,
}
_FINE = ("done", "left out: megatron")
_LEAST_SECONDS = 10.0  # a part is not begun with less
_MEASURING = 0.75  # of a part's seconds; the rest is for its start and its end


@dataclasses.dataclass(frozen=True)
class Bar:
    """One thing that must hold, of a value in one part's results."""

    name: str
    part: str
    path: tuple[str, ...]
    holds: Callable[[float], bool]


BARS = (
    Bar("copy rate >= 95% of a bare loop", "copies", ("engine_to_bare",), lambda x: x >= 0.95),
    Bar("trainer held <= 5 ms for 16 GiB", "held", ("cases", "16 GiB", "held_ms"), lambda x: x <= 5),
    Bar("no device memory, by the driver", "held", ("device_bytes_by_driver",), lambda x: x == 0),
    Bar("no device memory, by torch", "held", ("device_bytes_by_torch",), lambda x: x == 0),
    Bar("no device memory for loads, by torch", "loads", ("device_bytes_by_torch",), lambda x: x == 0),
    Bar("loads to the device >= 85% of the disk", "loads", ("device_to_disk",), lambda x: x >= 0.85),
    Bar("longer step slowed by < 3%", "steps", ("slowdown_percent",), lambda x: x < 3),
)


def check_bars(parts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each bar with its measured value and whether it is met; None where it was not measured."""
    checked = []
    for bar in BARS:
        value: Any = parts.get(bar.part, {})
        for key in bar.path:
            value = value.get(key) if isinstance(value, dict) else None
        met = None if value is None else bool(bar.holds(value))
        checked.append({"bar": bar.name, "measured": value, "met": met})
    steps = parts.get("steps", {})
    if steps.get("step_longer_than_copy") is False:
        checked[-1]["met"] = None  # the step was no longer than the copy after all
    return checked


def run_process(command: Sequence[str], seconds: float, log: Path) -> str:
    """Runs a command, with all that it starts, for at most so long; says how it ended."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"ended after its {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # workers that it left behind, too
            process.wait()
    if code:
        last = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return f"failed with {code}: {' | '.join(last[-3:])}"
    return "done"


class Benchmark:
    """The results so far, and the file that they are in."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._end = time.monotonic() + arguments.budget
        self._logs = Path(tempfile.mkdtemp(prefix="datastates-bench-logs-"))
        self.parts: dict[str, Any] = {}

    def run(self, parts: Sequence[str]) -> None:
        """One part, or several that share a process."""
        wanted = sum(PART_SECONDS[part] for part in parts)
        seconds = min(wanted, self._end - time.monotonic())
        if seconds < _LEAST_SECONDS:
            self.parts |= {part: {"status": "left out: no time was left"} for part in parts}
            return
        self._say(f"{', '.join(parts)} ...")
        begin = time.monotonic()
        log = self._logs / f"gpu-{parts[0]}.log"
        if parts == ["tests"]:
            self._test(seconds, log)
        else:
            self._measure(parts, seconds, log)
        for part in parts:
            self.parts[part]["seconds"] = round(time.monotonic() - begin, 1)
            self._say(f"{part}: {self.parts[part]['status']}")
        if "OUT" in os.environ and not all(self.parts[part]["status"] == "done" for part in parts):
            self._arguments.out.mkdir(parents=True, exist_ok=True)
            shutil.copy(log, self._arguments.out / log.name)  # for whoever is not on that machine

    def _test(self, seconds: float, log: Path) -> None:
        settings = self._logs / "pytest.ini"  # those of setup.cfg ask for newer pytest than may be there
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
        told = self._logs / f"{parts[0]}.jsonl"
        command = [sys.executable, str(HERE / "gpu_part.py"), *parts, "--into", str(told)]
        command += ["--folder", str(folder), "--seconds", f"{_MEASURING * seconds:.1f}"]
        try:
            status = run_process(command, seconds, log)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
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
        """Writes the file, so that a kill loses no more than the part under way."""
        arguments = self._arguments
        results = {
            "of": MEANINGLESS if arguments.fake else "GPU",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": _commit(),
            "native_module": arguments.native,
            "bars": check_bars(self.parts),
            "parts": self.parts,
        }
        gpu = (self.parts.get("machine", {}).get("gpu") or {}).get("name", "unknown")
        name = "fake" if arguments.fake else re.sub(r"[^a-z0-9]+", "-", gpu.lower().replace("nvidia ", ""))
        arguments.out.mkdir(parents=True, exist_ok=True)
        path = arguments.out / f"gpu-{name}-{datetime.date.today()}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(results, indent=1) + "\n")
        partial.replace(path)
        return path

    def _say(self, text: str) -> None:
        print(f"gpu.py: {text}", flush=True)

    def close(self) -> None:
        shutil.rmtree(self._logs, ignore_errors=True)


def read_told(path: Path) -> dict[str, dict[str, Any]]:
    """Results by part; a line that was cut off is none."""
    results: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            values = json.loads(line)
        except ValueError:
            continue
        results.setdefault(values.pop("part"), {}).update(values)
    return results


def _commit() -> str | None:
    """None outside a checkout."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or None if found.returncode == 0 else None


def print_table(parts: Mapping[str, Any], fake: bool) -> None:
    for part, results in parts.items():
        print(f"{part}: {results['status']}")
        for name, values in _tables(results):
            shown = [f"{key} {_short(value)}" for key, value in values.items() if _short(value)]
            print(*textwrap.wrap(f"{name}: {', '.join(shown)}", 110, subsequent_indent="    "), sep="\n")
    print()
    for row in check_bars(parts):
        met = {True: "met", False: "NOT MET", None: "not measured"}[row["met"]]
        print(f"{row['bar']:<42} {_short(row['measured']) or '-':>12}   {'means nothing' if fake else met}")


def _tables(nested: Mapping[str, Any], name: str = "") -> list[tuple[str, Mapping[str, Any]]]:
    """Every dictionary in the results that holds numbers itself."""
    found = [("  " + (name or "all"), nested)] if any(map(_short, nested.values())) else []
    for key, value in nested.items():
        if isinstance(value, dict):
            found += _tables(value, f"{name} {key}".strip())
    return found


def _short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, int | float) else ""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fake", action="store_true", help="a tiny try on the fake driver, without a GPU")
    parser.add_argument("--out", type=Path, help="folder of the results' file")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="disk to measure")
    parser.add_argument("--budget", type=float, default=440.0, help="seconds for everything")
    parser.add_argument("--parts", nargs="+", choices=PART_SECONDS, default=list(PART_SECONDS))
    parser.add_argument("--native", default="as found", help="where the native module came from; noted")
    parsed = parser.parse_args(arguments)
    if parsed.out is None:
        kept = HERE / "results" if not parsed.fake else ROOT / "build" / "bench"
        parsed.out = kept if parsed.fake or "OUT" not in os.environ else Path(os.environ["OUT"])
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """0: every part was done, or left out for want of Megatron. Bars are told, not judged."""
    parsed = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what is under way is ended, its folder removed
    parts = [part for part in PART_SECONDS if part in parsed.parts]
    groups = [[part] for part in parts]
    if parsed.fake:
        os.environ[FAKE] = "1"
        groups = [[part for part in parts if part != "tests"]]  # in one process: they are tiny
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    benchmark = Benchmark(parsed)
    try:
        for group in filter(None, groups):
            benchmark.run(group)
            benchmark.write()
        path = benchmark.write()
    finally:
        benchmark.close()
    print_table(benchmark.parts, parsed.fake)
    print(f"gpu.py: {'of the ' + MEANINGLESS + '; ' if parsed.fake else ''}results are in {path}")
    return int(not all(part["status"].startswith(_FINE) for part in benchmark.parts.values()))


if __name__ == "__main__":
    sys.exit(main())
