"""What benchmarks.load measures: loads in all shardings, a second load of the same structure, `verify`."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import disk
from benchmarks.command import Result
from benchmarks.load.optimizer import Layout
from benchmarks.load.ranks import Job, RankResult, start_world
from benchmarks.load.states import SMALL_WEIGHTS, Model, Sharding
from benchmarks.rounds import Bar, Rates, interleave, median, spread
from benchmarks.worlds import World
from megatron_datastates.config import GIB, MIB, Options
from megatron_datastates.engine.reader import SLOT_BYTES
from megatron_datastates.pipeline.upkeep.verify import verify

POOL_BYTES = Options().read_threads * SLOT_BYTES
FORMATS = ("datastates", "torch_dist")
_AGAIN_ROUNDS = 5  # for each repeat: these loads are short
_SMALL = Sharding(tensor=2, small=True)  # is loaded twice: its structure is what takes time

# By name: how it is saved, how it is loaded.
CASES = {
    "plain": (Sharding(tensor=2), Sharding(tensor=2)),
    "one rank": (Sharding(), Sharding()),
    "TP 2 to 4": (Sharding(tensor=2), Sharding(tensor=4)),
    "TP 4 to 2": (Sharding(tensor=4), Sharding(tensor=2)),
    "TP 2 to PP 2": (Sharding(tensor=2), Sharding(pipeline=2)),
    "the same on 2 ranks": (Sharding(), Sharding(copies=2)),
    "the same on 4 ranks": (Sharding(), Sharding(copies=4)),
    "optimizer buckets, DP 2": (Sharding(data=2), Sharding(data=2)),
    "optimizer buckets, DP 2 to 3": (Sharding(data=2), Sharding(data=3)),
}


_TP2 = Layout(tensor=2)
# By name: the format, how it is saved, how it is loaded. All but the last store buckets.
OPTIMIZERS = {
    "unchanged": ("datastates", _TP2, _TP2),
    "TP 2 to DP 2": ("datastates", _TP2, Layout(data=2)),
    "TP 2 to PP 2": ("datastates", _TP2, Layout(pipeline=2)),
    "DP 2 to TP 2": ("datastates", Layout(data=2), _TP2),
    "stock's fully reshardable, TP 2 to DP 2": (
        "torch_dist",
        Layout(tensor=2, by_parameter=True),
        Layout(data=2, by_parameter=True),
    ),
}


class Checkpoints:
    """Checkpoints of every case in both formats, and the worlds that save and load them."""

    def __init__(self, folder: Path, model: Model) -> None:
        self.folder = folder
        self.model = model
        self._worlds: dict[int, World] = {}
        self._saved: set[str] = set()

    def world(self, ranks: int) -> World:
        """Returns the world of so many ranks, started when it is first asked for."""
        if ranks not in self._worlds:
            self._worlds[ranks] = start_world(ranks)
        return self._worlds[ranks]

    def saved(self, sharding: Sharding, backend: str, copy: int = 0) -> str:
        """Returns the directory of a checkpoint, saved when it is first asked for."""
        cut = f"tp{sharding.tensor}-pp{sharding.pipeline}-dp{sharding.data}-small{sharding.small}"
        directory = str(self.folder / f"{backend}-{cut}-{copy}")
        if directory not in self._saved:
            self.world(sharding.ranks).do(Job("save", directory, sharding, self.model, backend))
            self._saved.add(directory)
        return directory

    def optimizer(self, layout: Layout, backend: str) -> str:
        """Does the same for a checkpoint of optimizer state."""
        cut = f"tp{layout.tensor}-pp{layout.pipeline}-dp{layout.data}-{layout.by_parameter}"
        directory = str(self.folder / f"{backend}-optimizer-{cut}")
        if directory not in self._saved:
            job = Job("save", directory, Sharding(), self.model, backend, optimizer=layout)
            self.world(layout.ranks).do(job)
            self._saved.add(directory)
        return directory

    def load(self, case: str, backend: str, check: bool = False) -> list[RankResult]:
        """Loads a case, with cold caches where dropping them is permitted."""
        stored, wanted = CASES[case]
        directory = self.saved(stored, backend)
        disk.drop_caches(Path(directory))
        return self.world(wanted.ranks).do(Job("load", directory, wanted, self.model, check=check))

    def close(self) -> None:
        """Ends all worlds."""
        for world in self._worlds.values():
            world.close()


def measure_loads(checkpoints: Checkpoints, repeats: int, cases: Sequence[str]) -> tuple[Result, list[Bar]]:
    """Measures the rates of loading the given cases in both formats, next to the disk's own.

    The first load of each is checked, element by element. A rate counts until the last rank has all its
    bytes.
    """
    last: dict[str, list[RankResult]] = {}

    def rate(case: str, backend: str) -> float:
        name = f"{case}, {backend}"
        ranks = last[name] = checkpoints.load(case, backend, check=name not in last)
        return sum(rank.bytes for rank in ranks) / max(rank.seconds for rank in ranks)

    contenders: dict[str, Callable[[], float]] = {
        f"{case}, {backend}": functools.partial(rate, case, backend) for case in cases for backend in FORMATS
    }
    ours = frozenset(contenders)
    contenders |= disk.readers(checkpoints.folder, checkpoints.model.bytes)
    rates = Rates(interleave(repeats, contenders), ours)
    result = rates.plain() | {
        "bytes": {name: sum(rank.bytes for rank in ranks) for name, ranks in last.items()},
        "read_per_byte_delivered": {
            name: round(sum(rank.bytes_read for rank in ranks) / sum(rank.bytes for rank in ranks), 3)
            for name, ranks in last.items()
            if name.endswith("datastates")
        },
        "peak_mib_beyond_targets": {
            name: round(max(rank.peak_bytes for rank in ranks) / MIB, 1) for name, ranks in last.items()
        },
        "pool_mib": POOL_BYTES / MIB,
    }
    return result, _bars_of_loads(result, rates, cases)


def _bars_of_loads(result: Result, rates: Rates, cases: Sequence[str]) -> list[Bar]:
    bars, medians = [], rates.gb_per_s
    for case in cases:
        ours, theirs = (f"{case}, {backend}" for backend in FORMATS)
        if CASES[case][0] == CASES[case][1]:
            of_theirs = medians[ours] / medians[theirs]
            bars.append(Bar(f"{case}, of the disk's best", rates.of_disk(ours), 0.85, "", at_least=True))
            bars.append(Bar(f"{case}, of torch_dist's rate", of_theirs, 3, "", at_least=True))
        elif "plain" in cases:
            share = medians[ours] / medians["plain, datastates"]
            bars.append(Bar(f"{case}, of plain", share, 0.6, "", at_least=True))
        peak, limit = result["peak_mib_beyond_targets"][ours], POOL_BYTES / MIB + 64
        bars.append(Bar(f"{case}: memory beyond the targets", peak, limit, "MiB", at_least=False))
    return bars


def measure_optimizer(checkpoints: Checkpoints, repeats: int) -> tuple[Result, list[Bar]]:
    """Measures resumes of optimizer state: unchanged, in other layouts, and as stock's fully reshardable one.

    Seconds are those of the last rank. What stock does after the load, cutting out each rank's part, is not
    counted.
    """
    last: dict[str, list[RankResult]] = {}

    def seconds(name: str) -> float:
        backend, stored, wanted = OPTIMIZERS[name]
        directory = checkpoints.optimizer(stored, backend)
        ranks: list[RankResult]
        disk.drop_caches(Path(directory))
        job = Job("load", directory, Sharding(), checkpoints.model, check=name not in last, optimizer=wanted)
        ranks = last[name] = checkpoints.world(wanted.ranks).do(job)
        return 1 / max(rank.seconds for rank in ranks)

    contenders = {name: functools.partial(seconds, name) for name in OPTIMIZERS}
    rates = interleave(repeats, contenders)
    times = {name: round(1 / median(found), 3) for name, found in rates.items()}
    peaks = {name: round(max(rank.peak_bytes for rank in ranks) / MIB, 1) for name, ranks in last.items()}
    result = {
        "seconds": times,
        "spread_seconds": {name: spread([1 / one for one in found]) for name, found in rates.items()},
        "gib_delivered": _per_case(last, lambda rank: rank.bytes, GIB),
        "gib_read": _per_case(last, lambda rank: rank.bytes_read, GIB),
        "peak_mib_beyond_targets": peaks,
    }
    bars = []
    for name in list(OPTIMIZERS)[1:-1]:
        of_unchanged, peak = times[name] / times["unchanged"], peaks[name]
        bars.append(Bar(f"{name}, of an unchanged resume's time", of_unchanged, 2, "", at_least=False))
        bars.append(
            Bar(f"{name}: memory beyond the targets", peak, POOL_BYTES / MIB + 64, "MiB", at_least=False)
        )
    return result, bars


def _per_case(
    last: dict[str, list[RankResult]], size: Callable[[RankResult], int], unit: int
) -> dict[str, float]:
    return {name: round(sum(map(size, ranks)) / unit, 3) for name, ranks in last.items()}


def measure_again(checkpoints: Checkpoints, repeats: int) -> tuple[Result, list[Bar]]:
    """Compares a second load of the same structure in one process with a first one.

    They are loads of two checkpoints with many keys. They take turns in one world, which forgets what it has
    kept of the structure before each first load.
    """
    directories = [checkpoints.saved(_SMALL, "datastates", copy) for copy in (0, 1)]
    world, model = checkpoints.world(_SMALL.ranks), checkpoints.model
    seconds: dict[str, list[float]] = {"first": [], "second": []}
    for round_ in range(-1, _AGAIN_ROUNDS * repeats):
        order = directories if round_ % 2 == 0 else directories[::-1]
        for name, directory in zip(seconds, order, strict=True):
            disk.drop_caches()
            job = Job("load", directory, _SMALL, model, check=round_ < 0, forget=name == "first")
            longest = max(rank.seconds for rank in world.do(job))
            if round_ >= 0:  # the warm-up: what a process imports and makes once is not part of either
                seconds[name].append(longest)
    result = {
        "tensors": 2 * model.small_layers * SMALL_WEIGHTS,
        "rounds": len(seconds["first"]),
        "seconds": {name: round(median(values), 4) for name, values in seconds.items()},
        "spread_seconds": {name: spread(values) for name, values in seconds.items()},
    }
    share = median([b / a for a, b in zip(seconds["first"], seconds["second"], strict=True)])
    return result, [Bar("second load, of the first's time", share, 1, "", at_least=False)]


def measure_verify(checkpoints: Checkpoints, repeats: int) -> tuple[Result, list[Bar]]:
    """Measures the rate of checking every block of a checkpoint in this process, next to the disk's own."""
    directory = checkpoints.saved(CASES["plain"][0], "datastates")

    def rate() -> float:
        disk.drop_caches()
        begin = time.perf_counter()
        verdict = verify(directory)
        assert verdict.good, verdict.faults
        return verdict.bytes_checked / (time.perf_counter() - begin)

    contenders = {"verify": rate} | disk.readers(checkpoints.folder, checkpoints.model.bytes)
    rates = Rates(interleave(repeats, contenders), frozenset({"verify"}))
    bar = Bar("verify, of the disk's best", rates.of_disk("verify"), 0.85, "", at_least=True)
    return rates.plain(), [bar]
