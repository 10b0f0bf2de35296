"""The command line of benchmarks.gpu, which benchmarks/gpu/run.sh runs; see there. Imports no torch."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.benchmark import (
    CALL_SECONDS,
    CALLS,
    MEANINGLESS,
    PART_SECONDS,
    Benchmark,
    calls_beside,
    merge_files,
    say,
)
from benchmarks.gpu.environment import FAKE, FAKE_FOLDER, MEMORY, ROOT, SETTINGS, split
from benchmarks.gpu.results import FINE, print_table

RESULTS = ROOT / "benchmarks" / "results"
_DESCRIPTION = """\
Measures what a save costs a GPU that trains.

Runs each part (tests, training, held time, copies, small copies beside them, steps, loads...) in its own
process and within its own time limit. Writes one JSON file, anew after each part, and prints a table. Three
calls (--call) make a whole: once files of several are in one folder they are merged, by themselves or by
--merge."""
_EXAMPLES = """\
examples:
  benchmarks/gpu/run.sh --call 1          prepares the machine first; see benchmarks/gpu/run.sh --help
  python -m benchmarks.gpu --fake         a tiny try without a GPU
  python -m benchmarks.gpu --fake --parts copies held
  python -m benchmarks.gpu --merge FILE-call1.json FILE-call2.json"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line, and fills in what depends on several options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--fake", "--quick", action="store_true", help="a tiny try on the fake driver, without a GPU"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="results' folder (default: $OUT, benchmarks/results; of --fake build/bench)",
    )
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="disk to measure")
    parser.add_argument("--call", type=int, choices=CALLS, help="some of the parts, in 6 minutes at most")
    parser.add_argument("--parts", nargs="+", choices=PART_SECONDS, help="these parts instead of all")
    parser.add_argument(
        "--memory",
        type=float,
        metavar="GIB",
        help="host memory, if the system shows less at first",
    )
    parser.add_argument(
        "--merge", nargs="+", type=Path, metavar="FILE", help="merge results, and measure nothing"
    )
    parser.add_argument("--prebuilt", action="store_true", help="for run.sh: use the module carried in")
    parser.add_argument("--budget", type=float, help="seconds for everything")
    parser.add_argument("--spent", type=float, default=0.0, help="for run.sh: seconds that are over already")
    parser.add_argument("--native", default="as found", help="for run.sh: where the native module came from")
    parsed = parser.parse_args(arguments)
    parsed.parts = parsed.parts or CALLS.get(parsed.call, PART_SECONDS)
    if parsed.budget is None:
        whole = sum(PART_SECONDS[part] for part in parsed.parts)
        parsed.budget = CALL_SECONDS - parsed.spent if parsed.call else whole
    parsed.out = parsed.out or _default_out(parsed.fake)
    return parsed


def _default_out(is_fake: bool) -> Path:
    if is_fake:
        return ROOT / "build" / "bench"
    return Path(os.environ["OUT"]) if "OUT" in os.environ else RESULTS


def _processes(parsed: argparse.Namespace) -> list[list[str]]:
    """Returns the parts to run, grouped by the process that they share."""
    parts = [part for part in PART_SECONDS if part in parsed.parts]
    if not parsed.fake:
        return [[part] for part in parts]
    # The fake parts are tiny: those with the same settings share one process.
    groups = (
        [part for part in parts if part != "tests" and split(part)[1] == settings]
        for settings in ({}, *SETTINGS.values())
    )
    return [group for group in groups if group]


def _prepare_environment(parsed: argparse.Namespace, logs: Path) -> None:
    """Sets what the parts' processes inherit."""
    if parsed.fake:
        os.environ[FAKE] = "1"
        os.environ[FAKE_FOLDER] = str(logs)
    if parsed.memory:
        os.environ[MEMORY] = str(parsed.memory)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every part was done, or left out because Megatron is missing, whatever bars were met."""
    parsed = parse(arguments)
    if parsed.merge:
        results, path = merge_files(parsed.merge, parsed.out)
        print_table(results, results["of"] == MEANINGLESS)
        say(f"merged into {path}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the part under way, and removes its folder
    benchmark = Benchmark(parsed)
    _prepare_environment(parsed, benchmark.logs)
    try:
        for group in _processes(parsed):
            benchmark.run(group)
            benchmark.write()
        path = benchmark.write()
    finally:
        benchmark.close()
    results = benchmark.results
    if beside := calls_beside(path):
        results, path = merge_files(beside, parsed.out)
    print_table(results, parsed.fake)
    say(f"{'of the ' + MEANINGLESS + '; ' if parsed.fake else ''}results are in {path}")
    return int(not all(part["status"].startswith(FINE) for part in benchmark.parts.values()))


if __name__ == "__main__":
    sys.exit(main())
