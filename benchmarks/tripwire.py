"""What the tripwire catches, and what it costs: deliberate early changes, and the time that a save holds.

A change comes when the save has begun and nothing has been copied: `at once`, or `later`, after the second
look that sources in host memory get. No time decides that: the threads that copy are held until the change is
made. The device is the fake driver's, so its shares mean what they say and it has no times.

    python -m benchmarks.tripwire --out results.json        # about 5 minutes, 1 GiB of memory, no disk
"""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.rounds import interleave, median, spread
from megatron_datastates.engine import native
from tests.native.fake_cuda.driver import FakeCuda, build
from tests.native.harness import (
    KEPT,
    KIB,
    MIB,
    Copy,
    Save,
    arrays,
    end_of,
    eventually,
    make_engine,
    random_bytes,
)

Result = dict[str, Any]
Part = tuple[int, int]  # begin and size, in a source
Flip = Callable[[], None]
HOST_SLOT, DEVICE_SLOT = 2 * MIB, 8 * MIB  # the defaults
LARGE, SMALL, SMALLS = 32 * MIB, 16 * KIB, 200
ROW = 4 * KIB
notes = Console(stderr=True)


@dataclasses.dataclass(frozen=True)
class Change:
    """What is changed of the state: its large tensor (0), or one of the small ones."""

    name: str
    parts: Callable[[np.random.Generator], list[Part]]
    tensor: int = 0


def _contiguous(size: int) -> Change:
    name = f"{size} B" if size < KIB else f"{size // KIB} KiB" if size < MIB else f"{size // MIB} MiB"
    return Change(name, lambda random: [(int(random.integers(LARGE - size + 1)), size)])


def _one_percent_of_rows(random: np.random.Generator) -> list[Part]:
    rows = random.choice(LARGE // ROW, LARGE // ROW // 100, replace=False)
    return [(int(row) * ROW, ROW) for row in rows]


CHANGES = [
    *(_contiguous(size) for size in (1, 64, 4 * KIB, 64 * KIB, MIB, 16 * MIB)),
    Change("1% of the rows of 4 KiB", _one_percent_of_rows),
    Change(
        "one row in 1000, evenly", lambda random: [(row * ROW, ROW) for row in range(7, LARGE // ROW, 1000)]
    ),
    Change("all of the large tensor", lambda random: [(0, LARGE)]),
    Change("all of a small tensor", lambda random: [(0, SMALL)], tensor=1),
]


class State:
    """One large tensor and many small ones; a leader on the device waits for leave to be copied."""

    def __init__(self, slot: int, on_device: bool) -> None:
        self.leader = Copy(random_bytes(1), 0, device=True)
        memory = random_bytes(SMALLS * 2 * SMALL)
        self.tensors = [Copy(random_bytes(LARGE), slot, device=on_device)]
        for i in range(SMALLS):
            source = memory[2 * i * SMALL :][:SMALL]
            self.tensors.append(Copy(source, slot + LARGE + i * SMALL, device=on_device))

    def change(self, tensor: int, parts: Sequence[Part]) -> None:
        """Twice is no change."""
        for begin, size in parts:
            self.tensors[tensor].source[begin : begin + size] ^= 1


@contextmanager
def _held(cuda: FakeCuda, engine: native.Engine, folder: Path) -> Iterator[None]:
    """Nothing is looked at or copied in here: the engine's only copying thread stands in the driver."""
    cuda.hold_call("cuCtxSetCurrent")
    Save(
        engine,
        folder / "plug",
        [Copy(random_bytes(10), 0, eager=True, device=True)],
        stream=cuda.new_stream(),
    )
    yield
    cuda.release_call("cuCtxSetCurrent")


@dataclasses.dataclass(frozen=True)
class Case:
    """Where the sources are, when the change comes, and how the engine was made."""

    on_device: bool
    at_once: bool = False
    paranoid: bool = False

    @property
    def slot(self) -> int:
        return DEVICE_SLOT if self.on_device else HOST_SLOT

    def save(self, cuda: FakeCuda, engine: native.Engine, folder: Path, state: State, flip: Flip) -> Save:
        if self.at_once:
            with _held(cuda, engine, folder):
                save = Save(engine, folder / "data", state.tensors)
                flip()
            return save
        tensors, stream = [state.leader, *state.tensors], cuda.new_stream()
        save = Save(engine, folder / "data", tensors, stream=stream, lazy_seconds=3600.0)
        assert save.reaches(native.Milestone.EAGER)
        save.job.hold_back(stream)
        cuda.synchronize(stream)  # the device's samples have been taken
        if not self.on_device and not self.paranoid:
            eventually(lambda: save.status.get("looked_at", 0) >= 0, "the sources are looked at")
        flip()
        engine.allow_lazy_copies(save.job, 0.0)
        return save

    def finds(self, cuda: FakeCuda, state: State, flip: Flip) -> bool:
        """Whether the save fails."""
        engine = make_engine(
            slot_bytes=self.slot,
            most_slots=4,
            copy_threads=1,
            backend="discard",
            driver=cuda.path,
            paranoid=self.paranoid,
            tripwire=not self.paranoid,
        )
        try:
            with tempfile.TemporaryDirectory(prefix="datastates-bench-") as folder:
                save = self.save(cuda, engine, Path(folder), state, flip)
                save.job.close_input()
                assert save.reaches(native.Milestone.WRITTEN)
                error = save.error
                engine.close()
        finally:
            engine.close()
            cuda.let_go()
            KEPT.clear()
        assert not error or "changed before its copy was done" in error, error
        return bool(error)


CASES = {
    "host, at once": Case(on_device=False, at_once=True),
    "host, later": Case(on_device=False),
    "device": Case(on_device=True),
    "host, paranoid": Case(on_device=False, paranoid=True),
    "device, paranoid": Case(on_device=True, paranoid=True),
}


def measure_reach(cuda: FakeCuda, tries: int) -> Result:
    """For each kind of change: how many of so many tries failed the save."""
    found: Result = {change.name: {} for change in CHANGES}
    for name, case in CASES.items():
        state, random = State(case.slot, case.on_device), np.random.default_rng(1)
        times = max(tries // 5, 1) if case.paranoid else tries
        for change in CHANGES:
            caught = sum(_try(cuda, case, state, change, random) for _ in range(times))
            found[change.name][name] = f"{caught} of {times}"
    return {"tensors": f"one of {LARGE // MIB} MiB, {SMALLS} of {SMALL // KIB} KiB", "caught": found}


def _try(cuda: FakeCuda, case: Case, state: State, change: Change, random: np.random.Generator) -> bool:
    parts = change.parts(random)
    found = case.finds(cuda, state, lambda: state.change(change.tensor, parts))
    state.change(change.tensor, parts)
    return found


# -- what it costs ----------------------------------------------------------------------------------------


def _state_of(count: int, size: int, on_device: bool = False) -> list[Copy]:
    memory = random_bytes(count * size)
    return [Copy(memory[i * size :][: size - 1], i * size, device=on_device) for i in range(count)]


def _timings(copies: list[Copy], folder: Path, tripwire: bool) -> tuple[float, float]:
    """Milliseconds of CPU that the start took on this thread, and milliseconds of the second look."""
    engine = make_engine(slot_bytes=HOST_SLOT, backend="discard", tripwire=tripwire)
    try:
        described = arrays(copies)
        begin = time.thread_time()
        job = engine.start(
            path=str(folder / "data"),
            reserve_bytes=end_of(copies),
            end=end_of(copies),
            stream=0,
            lazy_seconds=0.0,
            **described,
        )
        held = time.thread_time() - begin
        assert job.wait(native.Milestone.STAGED, 60.0)
        status: Any = job.status()
        return 1e3 * held, 1e3 * (status["looked_at"] - status["reserved_at"])
    finally:
        engine.close()
        (folder / "data").unlink(missing_ok=True)


def measure_cost(repeats: int) -> Result:
    """With the tripwire and without, in turns. Nothing is eager, so the start is all that holds.

    Of the second look the best round is given: other programs on the machine only ever make it longer.
    """
    states = {"3,000 tensors of 128 KiB": (3000, 128 * KIB), "3 tensors of 128 MiB": (3, 128 * MIB)}
    result: Result = {}
    with tempfile.TemporaryDirectory(prefix="datastates-bench-") as folder:
        for name, (count, size) in states.items():
            copies = _state_of(count, size)
            looks: list[float] = []

            def once(tripwire: bool, copies: list[Copy] = copies, looks: list[float] = looks) -> float:
                held, looked = _timings(copies, Path(folder), tripwire)
                if tripwire:
                    looks.append(looked)
                return held

            held = interleave(
                repeats, {"with": functools.partial(once, True), "without": functools.partial(once, False)}
            )
            result[name] = {
                "start_cpu_ms": {key: round(median(values), 3) for key, values in held.items()},
                "start_cpu_spread_ms": {key: spread(values) for key, values in held.items()},
                "look_least_ms": round(min(looks), 2),
            }
    return result


def measure_device_calls(cuda: FakeCuda) -> Result:
    """What the trainer's thread enqueues for samples: copies, and calls of the driver for them."""
    states = {"3,000 tensors of 16 KiB": (3000, 16 * KIB), "3 tensors of 64 MiB": (3, 64 * MIB)}
    result: Result = {}
    for name, (count, size) in states.items():
        before = {call: len(cuda.calls(call)) for call in _COPIES}
        copies_before = cuda.copies_to_host
        engine = make_engine(driver=cuda.path, slot_bytes=DEVICE_SLOT, backend="discard")
        with tempfile.TemporaryDirectory(prefix="datastates-bench-") as folder:
            copies, stream = _state_of(count, size, on_device=True), cuda.new_stream()
            save = Save(engine, Path(folder, "data"), copies, stream=stream, lazy_seconds=3600.0)
            assert save.reaches(native.Milestone.EAGER)
            calls = {call: len(cuda.calls(call)) - before[call] for call in _COPIES}
            rows = [
                int(call.split()[1].split("x")[0]) for call in cuda.calls(_COPIES[2])[before[_COPIES[2]] :]
            ]
            result[name] = {"copies": cuda.copies_to_host - copies_before, "calls": calls, "rows": sum(rows)}
            engine.close()
        KEPT.clear()
    return result


_COPIES = ("cuMemcpyBatchAsync", "cuMemcpyDtoHAsync", "cuMemcpy2DAsync")


def _print_reach(reach: Result) -> None:
    cases = list(next(iter(reach["caught"].values())))
    table = Table("change", *cases)
    for change, found in reach["caught"].items():
        table.add_row(change, *(found[case] for case in cases))
    notes.print(table)


def run(
    tries: Annotated[int, typer.Option(help="Changes of each kind.")] = 40,
    repeats: Annotated[int, typer.Option(help="Rounds of the comparison of times.")] = 15,
    out: Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")] = None,
) -> None:
    """Measures which early changes the tripwire catches, and what it costs.

    Example: python -m benchmarks.tripwire --out benchmarks/results/tripwire.json
    """
    results: Result = {"machine": machine.describe(Path()), "tries": tries, "repeats": repeats}
    with tempfile.TemporaryDirectory(prefix="datastates-bench-") as folder, notes.status("measuring"):
        results["cost"] = measure_cost(repeats)
        cuda = FakeCuda(build(Path(folder)))
        results["device_samples"] = measure_device_calls(cuda)
        results["reach"] = measure_reach(cuda, tries)
    _print_reach(results["reach"])
    notes.print_json(json.dumps({key: results[key] for key in ("cost", "device_samples")}))
    if out is not None:
        out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(run)
