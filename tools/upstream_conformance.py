"""Runs Megatron's own tests of distributed checkpoints with our strategy in place of torch_dist.

What belongs here: launching the ranks, merging their records, comparing the outcomes with those recorded in
`upstream_conformance.json`. What happens inside a rank is in `upstream_conformance_plugin.py`. Both the tests
and the Megatron under test come from your checkout of Megatron-LM; nothing of it is copied.

Needs only the environment of `make env`. Tests of Megatron's that need more (Transformer Engine,
nvidia-resiliency-ext) skip or fail; the reasons are recorded.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import re
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RECORDED = HERE / "upstream_conformance.json"
FOLDER = "tests/unit_tests/dist_checkpointing"
MODES = ("ours", "stock")
STRAGGLER_SECONDS = 20  # wait for the other ranks after one has failed a test
EXAMPLES = """\
examples:
  .venv/bin/python tools/upstream_conformance.py ~/Megatron-LM
  .venv/bin/python tools/upstream_conformance.py ~/Megatron-LM --files test_serialization.py -k sharding
  .venv/bin/python tools/upstream_conformance.py ~/Megatron-LM --baseline --record

exit codes: 0 all outcomes as recorded, 1 some differ, 2 there are no tests to run"""


@dataclasses.dataclass
class Result:
    """The outcome of a test on all ranks: pass, fail, skip, or "not ours" (passed, saved without us)."""

    outcome: str
    error: str = ""
    saves: int = 0


class Ranks:
    """One launch of all ranks for one test file: the processes and their records."""

    def __init__(self, count: int, arguments: list[str], folder: Path, done: Iterable[str]) -> None:
        import upstream_conformance_plugin as plugin

        self.folder, self.tests = folder, []
        self.records: dict[str, dict[int, dict[str, Any]]] = {}
        self.running: dict[int, str] = {}
        self._permission = plugin.permission
        self._read = dict.fromkeys(range(count), 0)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        sys.stdout.flush()
        self.processes: dict[int, int] = {}
        for rank in range(count):
            pid = os.fork()
            if pid == 0:
                code = 70
                try:
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    code = plugin.run_rank(rank, count, arguments, folder, list(done))
                finally:
                    os._exit(code)
            os.setpgid(pid, pid)
            self.processes[rank] = pid
        self._groups = list(self.processes.values())

    def watch(self, deadline_seconds: float) -> str:
        """Waits until the ranks have ended and returns "", or returns the reason for ending them early."""
        last = time.monotonic()
        alive = dict(self.processes)
        while True:
            ended = {rank for rank, pid in alive.items() if os.waitpid(pid, os.WNOHANG)[0]}
            if self._take():
                last = time.monotonic()
            for rank in ended:
                del alive[rank], self.processes[rank]
                if rank in self.running:
                    return f"rank {rank} died"
            if not alive:
                return ""
            disagreement = self._disagreement()
            if disagreement:
                return disagreement
            if time.monotonic() - last > deadline_seconds:
                return f"no progress for {deadline_seconds:.0f} s"
            time.sleep(0.1)

    def _take(self) -> bool:
        """Reads new lines of the ranks' records; returns whether there were any."""
        before = dict(self._read)
        for rank in self._read:
            path = self.folder / f"rank-{rank}.jsonl"
            if not path.exists():
                continue
            with path.open() as file:
                file.seek(self._read[rank])
                lines = file.read()
            lines = lines[: lines.rfind("\n") + 1]
            self._read[rank] += len(lines.encode())
            for record in map(json.loads, lines.splitlines()):
                if "collected" in record:
                    self.tests = record["collected"]
                elif "start" in record:
                    self.running[rank] = record["start"]
                else:
                    self.running.pop(rank, None)
                    self.records.setdefault(record["test"], {})[rank] = record
        return before != self._read

    def _disagreement(self) -> str:
        """Returns why to restart if ranks disagree about a test; lets them continue if all failed it."""
        for test, by_rank in self.records.items():
            failed = [record for record in by_rank.values() if record["outcome"] == "fail"]
            allowed = self._permission(self.folder, test)
            if not failed or "at" not in failed[0] or allowed.exists():
                continue
            if len(by_rank) == len(self._read):
                if len({record["error"].split(":")[0] for record in by_rank.values()}) > 1:
                    return "ranks disagree"
                allowed.touch()
            elif time.monotonic() - min(record["at"] for record in failed) > STRAGGLER_SECONDS:
                return "ranks disagree"
        return ""

    def end(self) -> None:
        for pid in self._groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # including workers that a test has started
        for pid in self.processes.values():
            os.waitpid(pid, 0)


def run_file(file: Path, arguments: argparse.Namespace, mode: str) -> dict[str, Result]:
    """Runs every test of one file. If ranks get out of step in a test, restarts them after it."""
    results: dict[str, Result] = {}
    selected = ["-k", arguments.k] if arguments.k else []
    while True:
        with tempfile.TemporaryDirectory(prefix="conformance-", dir=arguments.scratch) as folder:
            ranks = Ranks(arguments.ranks, [str(file), *selected], Path(folder), results)
            why = "interrupted"
            try:
                why = ranks.watch(arguments.deadline)
            finally:
                ranks.end()
                if arguments.logs:
                    _keep_logs(Path(folder), arguments.logs / f"{mode}-{file.stem}")
        interrupted = set(ranks.running.values())
        for test, by_rank in ranks.records.items():
            if test not in interrupted or any(record["outcome"] == "fail" for record in by_rank.values()):
                results[test] = merge(by_rank, mode)
        for test in interrupted - set(results):
            results[test] = Result("fail", f"hang or crash: {why}")
        if not why or set(ranks.tests) <= set(results) or not (ranks.records or interrupted):
            break
    return results


def merge(by_rank: dict[int, dict[str, Any]], mode: str) -> Result:
    """Merges the records of all ranks into one result; the earliest failure is its reason."""
    records = sorted(by_rank.values(), key=lambda record: record.get("at", 0))
    outcomes = [record["outcome"] for record in records]
    outcome = "fail" if "fail" in outcomes else "pass" if "pass" in outcomes else "skip"
    error = next((record["error"] for record in records if record["outcome"] == outcome), "")
    stock = sum(record["saves"].get("stock", 0) for record in records)
    if mode == "ours" and outcome == "pass" and stock:
        outcome, error = "not ours", f"{stock} saves did not use our strategy"
    return Result(outcome, error, sum(record["saves"].get("ours", 0) for record in records))


def expected(entry: dict[str, Any], test: str, mode: str) -> tuple[str, str]:
    """Returns the recorded outcome and reason of a test; one without an exception is expected to pass."""
    for name in (test, test.split("[")[0]):
        for exception in entry["exceptions"]:
            if name in exception["tests"]:
                return exception[mode], exception["why"]
    return "pass" if mode in entry["modes"] else "not run", ""


def differences(
    entry: dict[str, Any] | None, results: dict[str, Result], mode: str, whole: bool
) -> list[str]:
    """Lists how the results of one file differ from its record."""
    if entry is None or mode not in entry["modes"]:
        return [f"is not recorded: {len(results)} tests"]
    found = []
    for test, result in results.items():
        outcome, why = expected(entry, test, mode)
        if outcome != result.outcome:
            note = f": {result.error}" if result.error else f" (recorded reason: {why})" if why else ""
            found.append(f"{test}: expected {outcome}, got {result.outcome}{note}")
    if whole and len(results) != entry["tests"]:
        found.append(f"has {len(results)} tests, {entry['tests']} are recorded")
    return found


def record(
    entry: dict[str, Any] | None, results: dict[str, Result], mode: str, reasons: dict[str, str]
) -> dict[str, Any]:
    """Returns the entry of one file after a run in one mode; what it says about the other mode is kept.

    Args:
        reasons: explains failures: a pattern that matches "test: error" -> plain words.
    """
    entry = entry or {"modes": [], "tests": 0, "exceptions": []}
    groups: dict[tuple[str, str, str], list[str]] = collections.defaultdict(list)
    for test, result in results.items():
        before = {name: expected(entry, test, name) for name in MODES}
        outcomes = {name: before[name][0] for name in MODES} | {mode: result.outcome}
        if not set(outcomes.values()) <= {"pass", "not run"}:
            why = before["ours"][1]
            if mode == "ours" or not why:
                why = explain(f"{test}: {result.error}", reasons) if result.error else why
            groups[outcomes["ours"], outcomes["stock"], why].append(test)
    exceptions = [
        {"ours": ours, "stock": stock, "why": why, "tests": _without_parameters(tests, results)}
        for (ours, stock, why), tests in sorted(groups.items())
    ]
    saves = sum(result.saves for result in results.values()) if mode == "ours" else entry.get("saves", 0)
    modes = sorted({*entry["modes"], mode})
    return {"modes": modes, "tests": len(results), "saves": saves, "exceptions": exceptions}


def explain(error: str, reasons: dict[str, str]) -> str:
    """Returns the plain words for an error, or the error marked UNEXPLAINED."""
    for pattern, words in reasons.items():
        if re.search(pattern, error):
            return words
    return "UNEXPLAINED " + error.split(": ", 1)[-1][:200]


def _without_parameters(tests: list[str], results: Iterable[str]) -> list[str]:
    """Replaces all parametrizations of a test by the test's bare name, where all of them are in the list."""
    of_function = collections.Counter(test.split("[")[0] for test in results)
    meant = collections.Counter(test.split("[")[0] for test in tests)
    return sorted(
        {name if meant[name := test.split("[")[0]] == of_function[name] else test for test in tests}
    )


def release(checkout: Path) -> str:
    """Returns the version of the checkout's megatron-core."""
    names = runpy.run_path(str(checkout / "megatron/core/package_info.py"))
    return ".".join(map(str, names["VERSION"][:3]))


def main() -> int:
    arguments = _parse()
    files = _choose(arguments.checkout / FOLDER, arguments.files)
    if not files:
        print(f"no tests in {arguments.checkout / FOLDER}: is it a checkout of Megatron-LM?", file=sys.stderr)
        return 2
    mode = "stock" if arguments.baseline else "ours"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` ends the ranks
    _prepare(arguments, mode)
    recorded = json.loads(arguments.recorded.read_text()) if arguments.recorded.exists() else {}
    recorded = {"ranks": arguments.ranks, "reasons": {}, "releases": {}} | recorded
    version = release(arguments.checkout)
    entries = recorded["releases"].setdefault(version, {})
    print(f"Megatron {version}, {arguments.ranks} ranks, saves by {'Megatron' if mode == 'stock' else 'us'}")
    if arguments.ranks != recorded["ranks"]:
        print(f"recorded with {recorded['ranks']} ranks: differences may be due to that")
    differing = 0
    for file in files:
        name, begun = file.relative_to(arguments.checkout / FOLDER).as_posix(), time.monotonic()
        results = run_file(file, arguments, mode)
        print(f"{name:38} {_summary(results)} ({time.monotonic() - begun:.0f} s)", flush=True)
        if arguments.record and not arguments.k:
            entries[name] = record(entries.get(name), results, mode, recorded["reasons"])
            arguments.recorded.write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")
        else:
            found = differences(entries.get(name), results, mode, whole=not arguments.k)
            differing += len(found)
            for line in found:
                print(f"    {line}", flush=True)
    print(f"{differing} differences from {arguments.recorded.name}" if differing else "as recorded")
    return 1 if differing else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("checkout", type=_absolute, help="a checkout of Megatron-LM, at the release to test")
    add("--files", nargs="+", metavar="FILE", help=f"only these files of {FOLDER}")
    add("-k", metavar="EXPRESSION", help="only these tests, as in pytest")
    add("--ranks", type=int, default=8, help="processes; the tests are written for 8 (default)")
    add("--baseline", action="store_true", help="test Megatron's own strategy, without this package")
    add("--record", action="store_true", help="record the outcomes as expected")
    add(
        "--recorded",
        type=_absolute,
        default=RECORDED,
        metavar="JSON",
        help="the record (default: beside this script)",
    )
    add(
        "--deadline",
        type=float,
        default=240,
        metavar="SECONDS",
        help="restart ranks after so long without progress (default 240)",
    )
    add("--scratch", type=_absolute, metavar="FOLDER", help="where checkpoints are written (default: /tmp)")
    add("--logs", type=_absolute, metavar="FOLDER", help="keep the output of the ranks in this folder")
    return parser.parse_args()


def _absolute(text: str) -> Path:
    """Returns a path that stays the same when this process goes to the checkout."""
    return Path(text).resolve()


def _choose(folder: Path, names: list[str] | None) -> list[Path]:
    files = [*sorted(folder.glob("test_*.py")), *sorted(folder.glob("models/test_*.py"))]
    return [file for file in files if not names or file.name in names]


def _prepare(arguments: argparse.Namespace, mode: str) -> None:
    """Prepares this process for forking ranks: the checkout's Megatron, no GPU, no files in the checkout."""
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(arguments.checkout)]
    sys.path.append(str(HERE))
    os.chdir(arguments.checkout)
    environment = {
        "CUDA_VISIBLE_DEVICES": "",  # before torch is imported: a real GPU would be used
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",  # the checkout is the user's; for workers of tests, too
        "PYTHONPATH": os.pathsep.join([str(arguments.checkout), os.environ.get("PYTHONPATH", "")]),
        "MEGATRON_DATASTATES_STAGING_MEMORY": "64MiB",
    }
    if mode == "stock":
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    os.environ |= environment
    warnings.simplefilter("ignore")  # about packages that are not installed
    import upstream_conformance_plugin

    upstream_conformance_plugin.prepare(ours=mode == "ours")


def _summary(results: dict[str, Result]) -> str:
    counts = collections.Counter(result.outcome for result in results.values())
    text = ", ".join(
        f"{counts[name]} {name}" for name in ("pass", "fail", "skip", "not ours") if counts[name]
    )
    return f"{text or 'no tests'}; {sum(result.saves for result in results.values())} saves by us"


def _keep_logs(folder: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for log in folder.glob("rank-*.log"):
        with log.open("rb") as source, (target / log.name).open("ab") as copy:
            shutil.copyfileobj(source, copy)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
