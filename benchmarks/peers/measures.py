"""Rounds of saves and loads by all contenders, and what is made of them."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import disk
from benchmarks.command import Result, notes, scratch
from benchmarks.peers.contenders import Facts
from benchmarks.peers.megatron import OURS
from benchmarks.peers.memory import PeakMemory
from benchmarks.peers.ranks import Job, Load, Save, start_world
from benchmarks.peers.states import Model
from benchmarks.rounds import median, spread, within
from benchmarks.worlds import JobFailedError, World
from megatron_datastates.config import MIB

_LIMIT_SECONDS = 150.0  # of one save, or one load
PARTS = ("prepare", "call", "fence", "polls")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured in a part."""

    ranks: int
    model: Model
    rounds: int  # at most
    seconds: float  # for all rounds; at least one is made
    work_seconds: float
    contenders: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Round:
    """One contender's save and loads in one round; values are those of the slowest rank."""

    save: Save
    loads: dict[str, Load]  # cold and warm
    files: int
    bytes: int
    memory: int | None = None  # growth of all ranks together, measured in the first save only

    @property
    def difference(self) -> str | None:
        """What was not loaded as it had been saved."""
        return next((load.difference for load in self.loads.values() if load.difference), None)


class Peers:
    """Measures the contenders of one part; those that do not work here are left out, with the reason."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan, self._folder = plan, folder
        self._caches_dropped = True
        self.left_out: dict[str, str] = {}
        self.facts: dict[str, Facts] = {}

    def measure(self) -> Result:
        """Returns the part's results: the first saves apart, medians of the later ones."""
        names = list(self._plan.contenders)
        world, first = self._first_rounds(names)
        later: dict[str, list[Round]] = {name: [] for name in first}
        rates = _DiskRates(self._folder, self._plan.model.bytes)
        with contextlib.closing(world):
            for number in within(self._plan.rounds, self._plan.seconds):
                rounds = number + 1
                for name, found in later.items():
                    found.append(self._round(world, name))
                rates.measure()
        exact = [name for name in first if not any(one.difference for one in (first[name], *later[name]))]
        contenders = {
            name: summary(later[name], self._plan.model.bytes)
            | {"first": _first(first[name]), "settings": self.facts[name].settings}
            | {"syncs": self.facts[name].syncs}
            for name in first
        }
        return {
            "date": time.strftime("%Y-%m-%d"),
            "ranks": self._plan.ranks,
            "bytes": self._plan.model.bytes,
            "tensors": (1 + 3) * len(self._plan.model.parameters),
            "rounds": rounds,
            "work_ms": 1e3 * self._plan.work_seconds,
            "caches_dropped": self._caches_dropped,
            "contenders": contenders,
            "ratios": _ratios({name: later[name] for name in exact}),
            "disk": rates.plain(),
            "left_out": self.left_out,
        }

    def _first_rounds(self, names: list[str]) -> tuple[World, dict[str, Round]]:
        """Runs every contender once; one that fails is left out, and all others begin again."""
        while True:
            world = start_world(self._plan.ranks, self._plan.model)
            first: dict[str, Round] = {}
            for name in names:
                try:
                    self.facts[name] = world.do(Job("introduce", name), _LIMIT_SECONDS)[0]
                    first[name] = self._round(world, name, watch=True)
                except JobFailedError as error:
                    self.left_out[name] = error.cause
                    notes.print(f"left out: {name}: {error.cause}", markup=False)
                if name in self.left_out and (name in self.facts or world.is_dead):
                    break  # its half-made save may disturb what follows
            else:
                return world, first
            world.kill()
            world.close()
            names = [name for name in names if name not in self.left_out]

    def _round(self, world: World, name: str, watch: bool = False) -> Round:
        directory = self._folder / "checkpoint"
        directory.mkdir()
        try:
            job = Job("save", name, str(directory), self._plan.work_seconds)
            with PeakMemory(world.pids) if watch else contextlib.nullcontext() as peak:
                saves: list[Save] = world.do(job, _LIMIT_SECONDS)
            files = [path for path in directory.rglob("*") if path.is_file()]
            size = sum(path.stat().st_size for path in files)
            loads = {}
            for kind in ("cold", "warm"):
                if kind == "cold":
                    self._caches_dropped = disk.drop_caches() and self._caches_dropped
                wanted = Job("load", name, str(directory), steps=saves[0].steps)
                done: list[Load] = world.do(wanted, _LIMIT_SECONDS)
                wrong = next((load.difference for load in done if load.difference), None)
                loads[kind] = Load(max(load.seconds for load in done), wrong)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        growth = peak.growth if peak is not None else None
        return Round(_slowest(saves), loads, len(files), size, growth)


class _DiskRates:
    """The disk's own rates: all configurations once, and then the best of them in every round."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size = folder, max(size, 64 * MIB)
        self._best: dict[str, str] = {}
        self._found: dict[str, list[float]] = {"write": [], "read": []}

    def measure(self) -> None:
        with scratch(self._folder) as inside:
            for verb, make in (("write", disk.writers), ("read", disk.readers)):
                ways = make(inside, self._size)
                if verb not in self._best:
                    tried = {name: measure() for name, measure in ways.items()}
                    self._best[verb] = max(tried, key=tried.__getitem__)
                disk.drop_caches()
                self._found[verb].append(ways[self._best[verb]]())

    def plain(self) -> Result:
        return {
            verb: {
                "gb_per_s": round(median(found) / 1e9, 3),
                "spread_gb_per_s": spread([rate / 1e9 for rate in found]),
                "by": self._best[verb],
            }
            for verb, found in self._found.items()
        }


def _slowest(saves: Sequence[Save]) -> Save:
    """Returns one rank's save: the one that held its trainer longest, with the latest end of all ranks."""
    longest = max(saves, key=lambda save: save.held)
    finished, durable = (max(getattr(save, end) for save in saves) for end in ("finished", "durable"))
    step = max(save.step for save in saves)
    return dataclasses.replace(longest, finished=finished, durable=durable, step=step)


def summary(rounds: Sequence[Round], size: int) -> Result:
    """Returns medians and spreads of a contender's rounds, and whether each was loaded bit for bit."""
    held = [1e3 * one.save.held for one in rounds]
    durable = [one.save.durable for one in rounds]
    loads = {kind: [one.loads[kind].seconds for one in rounds] for kind in rounds[0].loads}
    wrong = next((one.difference for one in rounds if one.difference), None)
    return {
        "exact": wrong is None,
        **({} if wrong is None else {"differs": wrong}),
        "held_ms": round(median(held), 2),
        "spread_held_ms": spread(held),
        "parts_ms": {
            part: round(1e3 * median([one.save.parts[part] for one in rounds]), 2) for part in PARTS
        },
        "next_step_ms": round(1e3 * median([one.save.step for one in rounds]), 1),
        "finished_s": round(median([one.save.finished for one in rounds]), 3),
        "durable_s": round(median(durable), 3),
        "spread_durable_s": spread(durable),
        "write_gb_per_s": round(size / median(durable) / 1e9, 3),
        "load_s": {kind: round(median(found), 3) for kind, found in loads.items()},
        "spread_load_s": {kind: spread(found) for kind, found in loads.items()},
        "read_gb_per_s": {kind: round(size / median(found) / 1e9, 3) for kind, found in loads.items()},
        "files": rounds[-1].files,
        "stored_bytes": rounds[-1].bytes,
    }


def _first(one: Round) -> Result:
    """Returns what the first save took: in time, and in memory that was still there after it or was not."""
    assert one.memory is not None
    return {
        "held_ms": round(1e3 * one.save.held, 1),
        "durable_s": round(one.save.durable, 3),
        "memory_growth_mib": round(one.memory / MIB, 1),
        "exact": one.difference is None,
    }


def _ratios(later: dict[str, list[Round]]) -> Result:
    """Returns how many times longer than ours each peer took: medians of the rounds' own ratios."""
    ours = {kind: later[name] for kind, name in zip(("sync", "async"), OURS, strict=True) if name in later}
    ratios: Result = {}
    for name, found in later.items():
        base = ours.get("async" if "async" in name else "sync")
        if name in OURS or base is None:
            continue
        pairs = list(zip(found, base, strict=True))
        ratios[name] = {
            "held": round(median([a.save.held / b.save.held for a, b in pairs]), 2),
            "durable": round(median([a.save.durable / b.save.durable for a, b in pairs]), 2),
            "load_cold": round(
                median([a.loads["cold"].seconds / b.loads["cold"].seconds for a, b in pairs]), 2
            ),
        }
    return ratios
