"""Follows tensors over all checkpoints of a run: norms, updates and largest changes, layer by layer.

A batch of slices is read from every checkpoint, in order, before the next batch is. So each byte is read
once, few elements are in memory at a time, and nothing is written. Of every checkpoint, the index is open.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_datastates.convert.batches import AHEAD, Cut, batches
from megatron_datastates.convert.diff import THREADS, bytes_of
from megatron_datastates.convert.drift import Drift, compare_all
from megatron_datastates.convert.look import COMPLETE, Look, look_at_run
from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.parts import Part, choose_parts, group_of, is_of_generators, place_of
from megatron_datastates.convert.sources.source import Source
from megatron_datastates.convert.views import Tensors, same_keys, view
from megatron_datastates.convert.workers import ahead
from megatron_datastates.errors import DataStatesError, NotACheckpointError, describe_error
from megatron_datastates.format.directory import iteration_in_name
from megatron_datastates.pipeline.runs.run_folders import is_run, why_no_run

if TYPE_CHECKING:
    import torch

Row = tuple[str, str]  # a group, such as `model`, and a place in it, such as `decoder.layers.3`


@dataclasses.dataclass
class Point:
    """Some elements at one iteration."""

    squares: float = 0.0  # the sum of the squares of finite elements
    update: Drift | None = None  # from the checkpoint before; None: that was skipped, or lacks the elements

    @property
    def norm(self) -> float:
        return math.sqrt(self.squares)

    def add(self, other: Point) -> None:
        self.squares += other.squares
        if other.update is not None:
            self.update = self.update or Drift()
            self.update.add(other.update)


@dataclasses.dataclass
class Step:
    """One checkpoint of a run. `tensors` is None once it is skipped."""

    path: Path
    source: Source | None = None  # None if it cannot be opened
    tensors: Tensors | None = None  # of the source, perhaps by parameter
    skipped: str = ""  # why

    @property
    def iteration(self) -> int | None:
        """Returns its iteration; None for `release`."""
        return iteration_in_name(self.path.name)

    def skip(self, error: Exception) -> None:
        """Leaves this checkpoint out."""
        self.tensors, self.skipped = None, describe_error(error)


@dataclasses.dataclass(frozen=True)
class Trend:
    """All steps of a run, and rows that have a point, or None, for each of them."""

    steps: list[Step]
    rows: dict[Row, list[Point | None]]

    def groups(self) -> dict[str, list[Point | None]]:
        """Returns the sum of the rows of each group."""
        by_group: dict[str, list[Point | None]] = {}
        for (group, _), points in self.rows.items():
            sums = by_group.setdefault(group, [None] * len(points))
            for number, point in enumerate(points):
                if point is not None:
                    total = sums[number] = sums[number] or Point()
                    total.add(point)
        return by_group


@dataclasses.dataclass(frozen=True)
class Selection:
    """What to follow, and how many bytes that is in all checkpoints."""

    steps: list[Step]
    newest: dict[str, Tensors]  # by key, the last checkpoint that has it
    parts: dict[str, list[Part]]
    bytes: int

    def has(self, step: Step, key: str) -> bool:
        """Returns whether a step has a tensor, in the shape that the newest one has."""
        if step.tensors is None or key not in step.tensors.tensors:
            return False
        return step.tensors.tensors[key].global_shape == self.newest[key].tensors[key].global_shape


def open_run(run: Path, leave_out: Callable[[Path], None] = lambda path: None) -> list[Step]:
    """Opens all checkpoints of a run. Those that are incomplete or damaged are skipped, with the reason.

    Args:
        leave_out: called with each checkpoint of an abandoned branch: none of what follows continues it.

    Raises:
        NotACheckpointError: it is not a run, or no checkpoint of it can be read.
        StorageError, OSError: it cannot be listed.
    """
    if not is_run(run):
        raise NotACheckpointError(why_no_run(run))
    looks = look_at_run(run)
    for look in looks:
        if look.abandoned:
            leave_out(look.path)
    steps = [_open(look) for look in looks if not look.abandoned]
    opened = [step.tensors for step in steps if step.tensors is not None]
    if not opened:
        why = "; ".join(f"{step.path.name}: {step.skipped}" for step in steps[-1:])
        raise NotACheckpointError(f"no checkpoint of {run} can be read: {why or 'it has none'}")
    if not same_keys(opened):
        for step in steps:
            step.tensors = step.source
    return steps


def _open(look: Look) -> Step:
    path = look.path
    if look.state != COMPLETE:
        return Step(path, skipped=f"{look.state}: {look.problem}")
    try:
        source = open_source(path)
        source.note_files()
        return Step(path, source, view(source))
    except (DataStatesError, OSError) as error:
        return Step(path, skipped=describe_error(error))


def select(steps: list[Step], patterns: Sequence[str], where: str) -> Selection:
    """Chooses the tensors to follow. Raises MissingKeyError: a pattern matches nothing in any checkpoint.

    Without patterns, states of random generators are left out: their bytes are no numbers.
    """
    newest = {
        key: step.tensors
        for step in steps
        if step.tensors is not None
        for key in step.tensors.tensors
        if patterns or not is_of_generators(key)
    }
    shapes = {key: one.tensors[key].global_shape for key, one in newest.items()}
    choices = choose_parts(shapes, patterns, where)
    parts = {key: choice.parts for key, choice in choices.items()}
    selection = Selection(steps, newest, parts, 0)
    sizes = {key: bytes_of(newest[key], key, parts[key]) for key in parts}
    total = sum(size for step in steps for key, size in sizes.items() if selection.has(step, key))
    return dataclasses.replace(selection, bytes=total)


def follow(
    selection: Selection,
    *,
    memory_bytes: int = 1 << 30,
    progress: Callable[[int], None] = lambda bytes_done: None,
) -> Trend:
    """Reads the selected tensors of all steps once. A step that turns out to be damaged is skipped.

    Args:
        memory_bytes: upper limit of the memory for elements.
        progress: called with the number of bytes read since the last call.
    """
    trend, steps = Trend(selection.steps, {}), selection.steps
    with ThreadPoolExecutor(THREADS) as pool:

        def compare(
            number: int, before: Mapping[Cut, torch.Tensor], after: Mapping[Cut, torch.Tensor]
        ) -> Iterator[tuple[int, list[Cut], bool, Future[list[Drift]]]]:
            """Compares what both have; of the rest of `before`, only the norm is known."""
            both = [cut for cut in before if cut in after]
            rest = [cut for cut in before if cut not in after]
            for cuts, others in ((both, after), (rest, before)):
                if cuts:
                    sides = [before[cut] for cut in cuts], [others[cut] for cut in cuts]
                    yield number, cuts, others is after, pool.submit(compare_all, *sides)

        def comparisons() -> Iterator[tuple[int, list[Cut], bool, Future[list[Drift]]]]:
            for batch in batches(selection.newest, selection.parts, memory_bytes):
                before: dict[Cut, torch.Tensor] = {}
                for number, step in enumerate(steps):
                    after = _read(selection, step, batch)
                    yield from compare(number - 1, before, after)
                    progress(sum(cut.bytes for cut in batch if selection.has(step, cut.key)))
                    before = after
                yield from compare(len(steps) - 1, before, {})

        for number, cuts, is_update, drifts in ahead(comparisons(), AHEAD):  # in order, as in diff.py
            for cut, drift in zip(cuts, drifts.result(), strict=True):
                _add(trend, number, cut, drift, is_update=is_update)
    _skip_changed(steps)
    _forget_skipped(trend)
    return trend


def _read(selection: Selection, step: Step, batch: Sequence[Cut]) -> dict[Cut, torch.Tensor]:
    """Reads what a step has of a batch; nothing if it is skipped, or has to be from now on."""
    cuts = [cut for cut in batch if selection.has(step, cut.key)]
    if step.tensors is None or not cuts:
        return {}
    try:
        return dict(zip(cuts, step.tensors.read_tensors([cut.slice for cut in cuts]), strict=True))
    except (DataStatesError, OSError) as error:
        step.skip(error)
        return {}


def _skip_changed(steps: Sequence[Step]) -> None:
    """Skips steps with files that were written to meanwhile: what was read may be of two saves."""
    for step in steps:
        try:
            if isinstance(step.tensors, Source):
                step.tensors.require_unchanged()
        except (DataStatesError, OSError) as error:
            step.skip(error)


def _add(trend: Trend, number: int, cut: Cut, drift: Drift, *, is_update: bool) -> None:
    """Adds the comparison of a slice at step `number` with that of the next step, or with itself."""
    row = group_of(cut.key), place_of(cut.key, cut.part.layer)
    points = trend.rows.setdefault(row, [None] * len(trend.steps))
    for at, point in ((number, Point(drift.squares_first)), (number + 1, Point(update=drift))):
        if at == number or is_update:
            total = points[at] = points[at] or Point()
            total.add(point)


def _forget_skipped(trend: Trend) -> None:
    """Removes what was added of steps that were skipped later, and updates from those."""
    for number, step in enumerate(trend.steps):
        if not step.skipped:
            continue
        for points in trend.rows.values():
            points[number] = None
            after = points[number + 1] if number + 1 < len(points) else None
            if after is not None:
                after.update = None
