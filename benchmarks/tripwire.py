"""Measures which early changes the tripwire catches, and what it costs the trainer.

An early change is made after the save has begun and before anything is copied: `at once`, or `later`, after
the second look that sources in host memory get. Nothing depends on timing: the copying threads are held until
the change is made. The device is that of the fake driver, so counts on it are valid, but it has no times.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.table import Table

from benchmarks import machine
from benchmarks.command import (
    PATH,
    Result,
    benchmark_command,
    choose,
    measure_parts,
    notes,
    scratch,
    write_results,
)
from benchmarks.rounds import Bar, interleave, median, spread
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
    make_engine,
    random_bytes,
)
from tests.support.waiting import eventually

Part = tuple[int, int]  # begin and size, in a source
Flip = Callable[[], None]
HOST_SLOT, DEVICE_SLOT = 2 * MIB, 8 * MIB  # the defaults
LARGE, SMALL, SMALLS = 32 * MIB, 16 * KIB, 200
ROW = 4 * KIB


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    tries: int  # changes of each kind
    repeats: int  # rounds of the comparison of times
    tensors: int = 3000  # of the states with many tensors
    tensor_bytes: int = 128 * MIB  # of the largest tensors; on the device they have half


QUICK = Sizes(tries=1, repeats=1, tensors=30, tensor_bytes=4 * MIB)


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of the state: of its large tensor (number 0) or of a small one."""

    name: str
    parts: Callable[[np.random.Generator], list[Part]]
    tensor: int = 0


def _size(size: int) -> str:
    return f"{size} B" if size < KIB else f"{size // KIB} KiB" if size < MIB else f"{size // MIB} MiB"


def _contiguous(size: int) -> Change:
    return Change(_size(size), lambda random: [(int(random.integers(LARGE - size + 1)), size)])


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


@functools.cache
def _fake_cuda(folder: Path) -> FakeCuda:
    """Builds the fake driver once, because that takes seconds, and loads it."""
    return FakeCuda(build(folder))


class State:
    """One large tensor and many small ones, and on the device a leader, whose copy can be held back."""

    def __init__(self, slot: int, on_device: bool) -> None:
        self.leader = Copy(random_bytes(1), 0, device=True)
        memory = random_bytes(SMALLS * 2 * SMALL)
        self.tensors = [Copy(random_bytes(LARGE), slot, device=on_device)]
        for i in range(SMALLS):
            source = memory[2 * i * SMALL :][:SMALL]
            self.tensors.append(Copy(source, slot + LARGE + i * SMALL, device=on_device))

    def change(self, tensor: int, parts: Sequence[Part]) -> None:
        """Flips a bit of each byte; a second call restores the state."""
        for begin, size in parts:
            self.tensors[tensor].source[begin : begin + size] ^= 1


@contextmanager
def _held(cuda: FakeCuda, engine: native.Engine, folder: Path) -> Iterator[None]:
    """Holds the engine's only copying thread in the driver, so that nothing is sampled or copied."""
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
    """Where the sources are, when the change comes, and how the engine is configured."""

    on_device: bool
    at_once: bool = False
    paranoid: bool = False

    @property
    def slot(self) -> int:
        """Returns the size of a slot in bytes."""
        return DEVICE_SLOT if self.on_device else HOST_SLOT

    def save(self, cuda: FakeCuda, engine: native.Engine, folder: Path, state: State, flip: Flip) -> Save:
        """Starts a save, calls `flip` at this case's time, and lets the save continue."""
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
        """Returns whether a save fails because of the change. Raises AssertionError for any other error."""
        engine = make_engine(
            slot_bytes=self.slot,
            most_slots=4,
            copy_threads=1,
            discard=True,
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


def measure_reach(folder: Path, sizes: Sizes) -> tuple[Result, list[Bar]]:
    """Counts, for each kind of change, how many tries failed the save."""
    cuda = _fake_cuda(folder)
    found: Result = {change.name: {} for change in CHANGES}
    for name, case in CASES.items():
        state, random = State(case.slot, case.on_device), np.random.default_rng(1)
        times = max(sizes.tries // 5, 1) if case.paranoid else sizes.tries
        for change in CHANGES:
            caught = sum(_try(cuda, case, state, change, random) for _ in range(times))
            found[change.name][name] = f"{caught} of {times}"
    _print_reach(found)
    return {"tensors": f"one of {LARGE // MIB} MiB, {SMALLS} of {SMALL // KIB} KiB", "caught": found}, []


def _try(cuda: FakeCuda, case: Case, state: State, change: Change, random: np.random.Generator) -> bool:
    parts = change.parts(random)
    found = case.finds(cuda, state, lambda: state.change(change.tensor, parts))
    state.change(change.tensor, parts)
    return found


def _state_of(count: int, size: int, on_device: bool = False) -> list[Copy]:
    memory = random_bytes(count * size)
    return [Copy(memory[i * size :][: size - 1], i * size, device=on_device) for i in range(count)]


def _timings(copies: list[Copy], folder: Path, tripwire: bool) -> tuple[float, float]:
    """Returns milliseconds of this thread's CPU time for the start, and milliseconds of the second look."""
    engine = make_engine(slot_bytes=HOST_SLOT, discard=True, tripwire=tripwire)
    try:
        described: Any = arrays(copies)
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


def measure_cost(folder: Path, sizes: Sizes) -> tuple[Result, list[Bar]]:
    """Times the start of a save with the tripwire and without, in turns.

    Nothing is eager, so the start is all that the trainer waits for. The second look is that of the fastest
    round, because other programs on the machine can only make it longer.
    """
    states = _states((sizes.tensors, 128 * KIB), (3, sizes.tensor_bytes))
    result: Result = {}
    for name, (count, size) in states.items():
        copies = _state_of(count, size)
        looks: list[float] = []

        def once(tripwire: bool, copies: list[Copy] = copies, looks: list[float] = looks) -> float:
            held, looked = _timings(copies, folder, tripwire)
            if tripwire:
                looks.append(looked)
            return held

        held = interleave(
            sizes.repeats, {"with": functools.partial(once, True), "without": functools.partial(once, False)}
        )
        result[name] = {
            "start_cpu_ms": {key: round(median(values), 3) for key, values in held.items()},
            "start_cpu_spread_ms": {key: spread(values) for key, values in held.items()},
            "look_least_ms": round(min(looks), 2),
        }
    return result, []


def _states(*states: tuple[int, int]) -> dict[str, tuple[int, int]]:
    """Names states of a number of tensors and the size of each in bytes."""
    return {f"{count:,} tensors of {_size(size)}": (count, size) for count, size in states}


def measure_device_calls(folder: Path, sizes: Sizes) -> tuple[Result, list[Bar]]:
    """Counts what the trainer's thread enqueues for samples: copies, and driver calls for them."""
    cuda = _fake_cuda(folder)
    states = _states((sizes.tensors, 16 * KIB), (3, sizes.tensor_bytes // 2))
    result: Result = {}
    for name, (count, size) in states.items():
        before = {call: len(cuda.calls(call)) for call in _COPIES}
        copies_before = cuda.copies_to_host
        engine = make_engine(driver=cuda.path, slot_bytes=DEVICE_SLOT, discard=True)
        with tempfile.TemporaryDirectory(prefix="datastates-bench-", dir=folder) as inside:
            copies, stream = _state_of(count, size, on_device=True), cuda.new_stream()
            save = Save(engine, Path(inside, "data"), copies, stream=stream, lazy_seconds=3600.0)
            assert save.reaches(native.Milestone.EAGER)
            calls = {call: len(cuda.calls(call)) - before[call] for call in _COPIES}
            rows = [
                int(call.split()[1].split("x")[0]) for call in cuda.calls(_COPIES[1])[before[_COPIES[1]] :]
            ]
            result[name] = {"copies": cuda.copies_to_host - copies_before, "calls": calls, "rows": sum(rows)}
            engine.close()
        KEPT.clear()
    return result, []


_COPIES = ("cuMemcpyDtoHAsync", "cuMemcpy2DAsync")


def _print_reach(caught: Result) -> None:
    cases = list(next(iter(caught.values())))
    table = Table("change", *cases)
    for change, found in caught.items():
        table.add_row(change, *(found[case] for case in cases))
    notes.print(table)


PARTS: dict[str, Callable[[Path, Sizes], tuple[Result, list[Bar]]]] = {
    "cost": measure_cost,
    "device_samples": measure_device_calls,
    "reach": measure_reach,
}


@benchmark_command
@click.option("--tries", type=click.IntRange(min=1), default=40, help="Changes of each kind.")
@click.option("--repeats", type=click.IntRange(min=1), default=15, help="Rounds of the comparison of times.")
@click.option("--only", multiple=True, help=f"A part to run: {', '.join(PARTS)}.")
@click.option(
    "--quick", "is_quick", is_flag=True, help="Tiny states, one try: seconds, and figures that mean little."
)
@click.option("--folder", type=PATH, default=".", help="Where to build the fake driver; little is written.")
@click.option("--out", type=PATH, help="Write the results to this JSON file.")
def run(
    tries: int, repeats: int, only: Sequence[str], is_quick: bool, folder: Path, out: Path | None
) -> None:
    """Measures which early changes the tripwire catches, and what it costs.

    Deliberately changes tensors during saves and counts how many saves fail; compares the start of a save
    with the tripwire and without. Needs a C compiler and 1 GiB of memory, but no GPU.

    \b
    Examples:
      python -m benchmarks.tripwire                # about 5 minutes
      python -m benchmarks.tripwire --only reach --tries 10
      python -m benchmarks.tripwire --quick        # only to see that it works
      python -m benchmarks.tripwire --out benchmarks/results/tripwire.json
    """
    parts = choose(only, PARTS, list(PARTS), "part")
    sizes = QUICK if is_quick else Sizes(tries, repeats)
    results: Result = {
        "machine": machine.describe(folder),
        "tries": sizes.tries,
        "repeats": sizes.repeats,
    }
    with scratch(folder) as inside:
        measure_parts(results, parts, lambda part: PARTS[part](inside, sizes))
    write_results(results, out)


if __name__ == "__main__":
    run()
