"""Resumes of a job of two nodes: how long until a checkpoint is loaded, by what is left of it, and where."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from pathlib import Path

from benchmarks.command import Result, notes
from benchmarks.rounds import median, spread, within
from benchmarks.training.measures import Rounds
from benchmarks.training.runs import Case, Setting, Span, arguments_of, launch

_CASE = Case("datastates async", 2, drain_every=1)


@dataclasses.dataclass(frozen=True)
class _Loss:
    """What a job finds that resumes."""

    nodes: tuple[int, ...] = ()  # whose near tiers are gone
    is_far: bool = True  # whether the checkpoint is in --save


LOSSES = {
    "near and in --save": _Loss(),
    "near, not in --save yet": _Loss(is_far=False),
    "a node lost, in --save": _Loss((1,)),
    "a node lost, not in --save: from its partner's copy": _Loss((1,), is_far=False),
    "all nodes lost, in --save": _Loss((0, 1)),
}


def measure_restores(setting: Setting, rounds: Rounds, folder: Path, bytes_per_second: int) -> Result:
    """Saves once, with copies on the other node; then resumes from what each loss leaves, in turns.

    Args:
        bytes_per_second: what the far side has for each node.
    """
    checkpoints, nears = folder / "checkpoints", [folder / f"near-{node}" for node in (0, 1)]
    arguments = arguments_of(setting, _CASE, checkpoints)
    arguments[arguments.index("--datastates-near") + 1] = f"{folder / 'near'}-$RANK"
    arguments += ["--datastates-near-replicas", "1"]
    stored = {place: folder / "stored" / place.name for place in (checkpoints, *nears)}
    try:
        launch(setting, arguments, _CASE, folder)
        for place, kept in stored.items():
            shutil.move(place, kept)
        resume = ["--load" if word == "--save" else word for word in arguments]  # and save nothing more
        resume += ["--train-iters", str(setting.iterations + 1), "--override-opt_param-scheduler"]
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in LOSSES}
        for number in within(rounds.most, rounds.seconds):
            for name, loss in LOSSES.items():
                with notes.status(f"round {number + 1}: {name}"):
                    _lay_out(stored, loss, checkpoints, nears)
                    records = launch(setting, resume, _CASE, folder, (checkpoints, bytes_per_second))
                    found[name].append(_times(records))
        size = sum(path.stat().st_size for path in stored[checkpoints].glob("iter_*/*"))
    finally:
        for place in (*stored, *stored.values()):
            shutil.rmtree(place, ignore_errors=True)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "rounds": len(next(iter(found.values()))),
        "checkpoint_bytes": size,
        "far_bytes_per_second": bytes_per_second,
        "restores": {
            name: {
                "load_s": round(median([load for load, _, _ in times]), 3),
                "spread_s": spread([load for load, _, _ in times]),
                "brought_s": round(median([brought for _, brought, _ in times]), 3),
                "far_mb": round(median([far for _, _, far in times]) / 1e6, 1),
            }
            for name, times in found.items()
        },
    }


def _lay_out(stored: dict[Path, Path], loss: _Loss, checkpoints: Path, nears: list[Path]) -> None:
    """Puts links to what was stored in its places, as far as it is left; the page cache drops it."""
    for place, kept in stored.items():
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(kept, place, copy_function=os.link)
        for path in place.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for node in loss.nodes:
        shutil.rmtree(nears[node])
    if not loss.is_far:
        shutil.rmtree(checkpoints)
        checkpoints.mkdir()


def _times(records: list[dict[str, list[Span]]]) -> tuple[float, float, float]:
    """Returns seconds in load_checkpoint, of them those that bring the checkpoint, and bytes read far."""
    loads = [end - begin for record in records for begin, end in record["load"]]
    assert len(loads) == len(records), "each rank loads once"
    brought = [end - begin for record in records for begin, end in record.get("recover", [])]
    return max(loads), max(brought, default=0.0), sum(record["far bytes"][0][1] for record in records)
