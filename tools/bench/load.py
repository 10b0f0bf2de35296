"""How fast checkpoints are read on this machine: beside torch_dist, and beside what its disk can do.

Ranks are processes of gloo worlds on this machine. They load through Megatron's `dist_checkpointing.load`,
into memory that is already there, with the system's file caches dropped before each load where that is
permitted. Two ranks keep both cores of a small machine busy; in the case "one rank" there are cores to
spare, as on most machines with GPUs. Each comparison is made in one run: contenders take turns, several
times, and medians are reported. The first load of each kind is checked, element by element.

    python tools/bench/load.py                        # about 10 minutes and 16 GiB of disk
    python tools/bench/load.py --gib 0.5 --repeats 2
    python tools/bench/load.py --only plain --out results.json
    python tools/bench/load.py --gib 0.7 --folder /dev/shm    # storage that is never what limits
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import disk
import machine
import typer
from load_ranks import LAYER_BYTES, SMALL_WEIGHTS, Job, Sharding, Told, World
from rich.console import Console
from rounds import Bar, in_turns, median, print_bars, spread

from megatron_datastates.config import GIB, MIB, Options
from megatron_datastates.engine.reader import SLOT_BYTES
from megatron_datastates.pipeline.verify import verify

POOL_BYTES = Options().read_threads * SLOT_BYTES
FORMATS = ("datastates", "torch_dist")
Result = dict[str, Any]
notes = Console(stderr=True)

# name -> how it was saved, how it is loaded
CASES = {
    "plain": (Sharding(tensor=2), Sharding(tensor=2)),
    "one rank": (Sharding(), Sharding()),
    "TP 2 to 4": (Sharding(tensor=2), Sharding(tensor=4)),
    "TP 4 to 2": (Sharding(tensor=4), Sharding(tensor=2)),
    "TP 2 to PP 2": (Sharding(tensor=2), Sharding(pipeline=2)),
    "optimizer buckets, DP 2": (Sharding(data=2), Sharding(data=2)),
    "optimizer buckets, DP 2 to 3": (Sharding(data=2), Sharding(data=3)),
}
OTHER_CASES = ("again", "verify")
# What is loaded twice: there, the structure is what takes time.
SMALL, SMALL_LAYERS, AGAIN_ROUNDS = Sharding(tensor=2, small=True), 400, 5


class Bench:
    """Checkpoints of every case in both formats, and the worlds that load them."""

    def __init__(self, folder: Path, gib: float) -> None:
        self._folder = folder
        self.layers = max(2, 2 * round(gib * GIB / LAYER_BYTES / 2))
        self._worlds: dict[int, World] = {}
        self._saved: set[str] = set()

    def world(self, ranks: int) -> World:
        if ranks not in self._worlds:
            self._worlds[ranks] = World(ranks)
        return self._worlds[ranks]

    def saved(self, sharding: Sharding, backend: str, copy: int = 0) -> str:
        """The checkpoint of a state, saved when it is asked for first."""
        cut = f"tp{sharding.tensor}-pp{sharding.pipeline}-dp{sharding.data}-small{sharding.small}"
        directory = str(self._folder / f"{backend}-{cut}-{copy}")
        if directory not in self._saved:
            layers = SMALL_LAYERS if sharding.small else self.layers
            self.world(sharding.ranks).do(Job("save", directory, sharding, layers, backend))
            self._saved.add(directory)
        return directory

    def load(self, case: str, backend: str, check: bool = False) -> list[Told]:
        stored, wanted = CASES[case]
        directory = self.saved(stored, backend)
        disk.drop_caches()
        return self.world(wanted.ranks).do(Job("load", directory, wanted, self.layers, check=check))

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()


def rate(told: list[Told]) -> float:
    """Bytes per second that all ranks together got, until the last of them had its own."""
    return sum(rank.bytes for rank in told) / max(rank.seconds for rank in told)


def measure_loads(bench: Bench, folder: Path, repeats: int, cases: list[str]) -> tuple[Result, list[Bar]]:
    """Rates of loading, in all shardings and both formats."""
    last: dict[str, list[Told]] = {}

    def load(case: str, backend: str) -> float:
        name = f"{case}, {backend}"
        last[name] = bench.load(case, backend, check=name not in last)
        return rate(last[name])

    contenders: dict[str, Callable[[], float]] = {}
    for case in cases:
        for backend in FORMATS:
            contenders[f"{case}, {backend}"] = lambda case=case, backend=backend: load(case, backend)
    size = bench.layers * LAYER_BYTES
    for yardstick in disk.yardsticks(reads=True):
        contenders[str(yardstick)] = lambda y=yardstick: disk.read_rate(y, folder, size)
    found = in_turns(repeats, contenders)
    rates = {name: median(values) / 1e9 for name, values in found.items() if median(values)}
    best = max((name for name in rates if name not in last), key=rates.__getitem__)
    result = {
        "gb_per_s": {name: round(value, 3) for name, value in rates.items()},
        "spread_gb_per_s": {name: spread([v / 1e9 for v in found[name]]) for name in rates},
        "best_of_the_disk": best,
        "bytes": {name: sum(rank.bytes for rank in told) for name, told in last.items()},
        "read_per_byte_delivered": {
            name: round(sum(rank.bytes_read for rank in told) / sum(rank.bytes for rank in told), 3)
            for name, told in last.items()
            if name.endswith("datastates")
        },
        "peak_mib_beyond_targets": {
            name: round(max(rank.peak_bytes for rank in told) / MIB, 1) for name, told in last.items()
        },
        "pool_mib": POOL_BYTES / MIB,
    }
    return result, _bars_of_loads(result, rates, rates[best], cases)


def _bars_of_loads(result: Result, rates: dict[str, float], best: float, cases: list[str]) -> list[Bar]:
    bars = []
    for case in cases:
        ours, theirs = (rates[f"{case}, {backend}"] for backend in FORMATS)
        if CASES[case][0] == CASES[case][1]:
            bars.append(Bar(f"{case}, of the disk's best", ours / best, 0.85, "", at_least=True))
            bars.append(Bar(f"{case}, of torch_dist's rate", ours / theirs, 3, "", at_least=True))
        elif "plain" in cases:
            share = ours / rates["plain, datastates"]
            bars.append(Bar(f"{case}, of plain", share, 0.6, "", at_least=True))
        peak = result["peak_mib_beyond_targets"][f"{case}, datastates"]
        limit = POOL_BYTES / MIB + 64
        bars.append(Bar(f"{case}: memory beyond the targets", peak, limit, "MiB", at_least=False))
    return bars


def measure_again(bench: Bench, repeats: int) -> tuple[Result, list[Bar]]:
    """A second load of the same structure in one process, beside a first: another checkpoint, many keys.

    They take turns in one world, and before each first one it forgets what it has kept.
    """
    directories = [bench.saved(SMALL, "datastates", copy) for copy in (0, 1)]
    world, seconds = bench.world(SMALL.ranks), dict[str, list[float]](first=[], second=[])
    for round_ in range(-1, AGAIN_ROUNDS * repeats):
        order = directories if round_ % 2 == 0 else directories[::-1]
        for name, directory in zip(seconds, order, strict=True):
            disk.drop_caches()
            job = Job("load", directory, SMALL, SMALL_LAYERS, check=round_ < 0, forget=name == "first")
            took = max(rank.seconds for rank in world.do(job))
            if round_ >= 0:  # what is imported and made once in a process is not part of either
                seconds[name].append(took)
    middle = {name: median(values) for name, values in seconds.items()}
    result = {
        "tensors": 2 * SMALL_LAYERS * SMALL_WEIGHTS,
        "rounds": len(seconds["first"]),
        "seconds": {name: round(value, 4) for name, value in middle.items()},
        "spread_seconds": {name: spread(values) for name, values in seconds.items()},
    }
    share = median([b / a for a, b in zip(seconds["first"], seconds["second"], strict=True)])
    return result, [Bar("second load, of the first's time", share, 1, "", at_least=False)]


def measure_verify(bench: Bench, folder: Path, repeats: int) -> tuple[Result, list[Bar]]:
    """The rate of checking every block of a checkpoint in this process, beside the disk's."""
    directory, size = bench.saved(CASES["plain"][0], "datastates"), bench.layers * LAYER_BYTES

    def check() -> float:
        disk.drop_caches()
        begin = time.perf_counter()
        verdict = verify(directory)
        assert verdict.good, verdict.faults
        return verdict.bytes_checked / (time.perf_counter() - begin)

    contenders: dict[str, Callable[[], float]] = {"verify": check}
    for yardstick in disk.yardsticks(reads=True):
        contenders[str(yardstick)] = lambda y=yardstick: disk.read_rate(y, folder, size)
    found = in_turns(repeats, contenders)
    rates = {name: median(values) / 1e9 for name, values in found.items() if median(values)}
    best = max((name for name in rates if name != "verify"), key=rates.__getitem__)
    result = {
        "gb_per_s": {name: round(value, 3) for name, value in rates.items()},
        "spread_gb_per_s": {name: spread([v / 1e9 for v in found[name]]) for name in rates},
        "best_of_the_disk": best,
    }
    return result, [Bar("verify, of the disk's best", rates["verify"] / rates[best], 0.85, "", at_least=True)]


def run(
    gib: Annotated[float, typer.Option(help="Bytes of each checkpoint, in GiB.")] = 2.0,
    repeats: Annotated[int, typer.Option(help="Rounds of every comparison; medians are reported.")] = 5,
    only: Annotated[
        list[str] | None, typer.Option(help=f"Cases, of {', '.join([*CASES, *OTHER_CASES])}.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where checkpoints are; on the disk in question.")] = Path(),
    out: Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")] = None,
) -> None:
    """Measures loads on this machine and prints a table."""
    chosen = only or [*CASES, *OTHER_CASES]
    unknown = set(chosen) - {*CASES, *OTHER_CASES}
    if unknown:
        raise typer.BadParameter(
            f"there is no case {', '.join(unknown)}; there are {', '.join([*CASES, *OTHER_CASES])}"
        )
    cases = [case for case in CASES if case in chosen]
    results: Result = {"machine": machine.describe(folder), "gib": gib, "repeats": repeats}
    results["caches_dropped"] = disk.drop_caches()
    bars: list[Bar] = []
    with (
        tempfile.TemporaryDirectory(prefix="datastates-bench-", dir=folder) as inside,
        contextlib.closing(Bench(Path(inside), gib)) as bench,
    ):
        if cases:
            with notes.status(f"loading: {', '.join(cases)}"):
                results["loads"], found = measure_loads(bench, Path(inside), repeats, cases)
            bars += found
            notes.print_json(json.dumps(results["loads"]))
        if "again" in chosen:
            with notes.status("loading the same structure again"):
                results["again"], found = measure_again(bench, repeats)
            bars += found
            notes.print_json(json.dumps(results["again"]))
        if "verify" in chosen:
            with notes.status("verifying"):
                results["verify"], found = measure_verify(bench, Path(inside), repeats)
            bars += found
            notes.print_json(json.dumps(results["verify"]))
    results["bars"] = [bar.plain() for bar in bars]
    print_bars(bars)
    if out is not None:
        out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(run)
