"""Which older checkpoint is undamaged, once a load has met a damaged one: looked for by all ranks together.

Each rank checks its share of a checkpoint on a thread of its own, while the trainer's thread sums how many
are done, at polls: no collective call waits for a disk, so no watchdog ends ranks that wait for a slow one.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from pathlib import Path

from megatron_datastates.config import Options
from megatron_datastates.errors import printable
from megatron_datastates.format.directory import BACKEND, iteration_in_name, iteration_name
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.pipeline.publishing.collectives import Collectives
from megatron_datastates.pipeline.runs.branches import known_point
from megatron_datastates.pipeline.runs.history import by_branch
from megatron_datastates.pipeline.runs.runs import Iteration, find_iterations, has_file, is_named_by_megatron
from megatron_datastates.pipeline.upkeep.verify import Verdict, verify
from megatron_datastates.threads import Call, ThreadPool

logger = logging.getLogger(__name__)
_POLL_SECONDS = 0.2
_NONE = -1


@dataclasses.dataclass
class FallbackSearch:
    """What the search for an older checkpoint found."""

    iteration: int | None = None  # the newest undamaged one
    has_checksums: bool = True  # all files of that one; without them, data cannot be verified
    damaged: list[int] = dataclasses.field(default_factory=list)  # newer than that, and damaged or not read
    unread: list[int] = dataclasses.field(default_factory=list)  # of these: no fault was found
    other: int | None = None  # the newest that is newer than that, and of another format: it was not verified
    is_without_optimizer: bool = False  # that one: its optimizer's state was removed


def find_older_checkpoint(
    damaged: Path, root: Path, most: int, collectives: Collectives, options: Options
) -> FallbackSearch:
    """Verifies up to `most` published checkpoints under `root` that are older than `damaged`, newest first.

    Those of other formats are not verified: ranks share the work by data files of ours.

    Collective: all ranks call it, and all find the same, among what rank 0 sees.
    """
    older, others = _older(damaged, root, most) if collectives.rank == 0 else ([], [])
    search = FallbackSearch()
    for turn in range(most):
        iteration = collectives.share_from_first(older[turn] if turn < len(older) else _NONE)
        if iteration == _NONE:
            break
        faults, unread, unchecked = verify_together(root / iteration_name(iteration), collectives, options)
        if not faults and not unread:
            search.iteration, search.has_checksums = iteration, not unchecked
            point = known_point(root / iteration_name(iteration), iteration)
            search.is_without_optimizer = point is not None and point.is_without_optimizer
            break
        search.damaged.append(iteration)
        search.unread += [] if faults else [iteration]
    newer = [one for one in others if one > (search.iteration or 0)]
    other = collectives.share_from_first(max(newer, default=_NONE))
    search.other = None if other == _NONE else other
    return search


def _older(damaged: Path, root: Path, most: int) -> tuple[list[int], list[int]]:
    """Returns `most` older iterations, newest first, and all complete ones of other formats.

    Without 0, which --ckpt-step does not accept, and names that Megatron does not load. Those of a branch
    that was left come last.
    """
    number = iteration_in_name(damaged.name) or 0
    try:
        older = [one for one in find_iterations(root) if 0 < one.number < number]
    except OSError as error:
        logger.warning("older checkpoints were not looked for: %s", error)
        return [], []
    older = [one for one in older if is_named_by_megatron(one.path)]
    published = {one.number: one.path for one in older if _may_be_published(one)}
    others = [one.number for one in older if one.complete and one.format != BACKEND]
    return by_branch(root, published, most, known_point(damaged, number)), others


def _may_be_published(iteration: Iteration) -> bool:
    """Returns whether a checkpoint of ours is published, or cannot be looked at now, as another user's."""
    if iteration.format == BACKEND and iteration.complete:
        return True
    try:
        has_file(iteration.path / MANIFEST_NAME)
    except OSError:
        return True
    return False


def verify_together(directory: Path, collectives: Collectives, options: Options) -> tuple[int, int, int]:
    """Returns the numbers of faults, of what cannot be read now (damaged or not), and of unchecked files.

    Those are of one checkpoint; unchecked files have no checksums. Collective: all ranks call it, and find
    the same.
    """
    began = time.monotonic()
    with ThreadPool(1, "verifies") as thread:
        share = thread.submit(_check, directory, collectives.rank, collectives.size, options)
        while (sums := _sums(share, collectives))[0] < collectives.size:
            time.sleep(_POLL_SECONDS)
    _, faults, unread, unchecked, mebibytes = sums
    if collectives.rank == 0:
        seconds = time.monotonic() - began
        found = "1 fault" if faults == 1 else f"{faults} faults"
        verdict = found if faults else "could not be read" if unread else "undamaged"
        logger.warning("%s: %s (%d MiB checked in %.1f s)", directory, verdict, mebibytes, seconds)
    return faults, unread, unchecked


def _sums(share: Call[Verdict], collectives: Collectives) -> list[int]:
    """Sums over ranks: those that are done, faults, what is unread, files without checksums, checked MiB."""
    numbers = [0, 0, 0, 0, 0]
    if share.done():
        verdict = share.result()
        faults, unread = min(len(verdict.faults), 1000), min(len(verdict.unread), 1000)
        numbers = [1, faults, unread, verdict.unchecked_files, verdict.bytes_checked >> 20]
    return collectives.start_sum(numbers).result()


def _check(directory: Path, rank: int, ranks: int, options: Options) -> Verdict:
    """Checks this rank's share. Never raises: whatever keeps a rank from that is in the verdict."""
    try:
        verdict = verify(directory, share=(rank, ranks), options=options)
    except Exception as error:
        verdict = Verdict()
        verdict.add(error)
    for fault in [*verdict.faults, *verdict.unread][:3]:
        logger.warning("%s", printable(fault))
    return verdict
