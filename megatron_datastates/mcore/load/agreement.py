"""Agreement between ranks: a load that fails on one rank fails on all of them, with one message.

A load is known to be collective if Megatron itself makes a collective call in it on all ranks: a
`dist_checkpointing.load` that gathers metadata or is fully parallel, and the training loop's
load_checkpoint. All other loads communicate with no other rank: one rank may read alone.

Collective calls, which every rank makes equally often even if it fails:
  1. load_checkpoint with our format chosen: one maximum in the first one of a world, which compares
     releases and options (rank_consistency.py); with a near tier and --use-checkpoint-args, one
     broadcast of whether rank 0 sees a tracker (training/load.py).
  2. load_checkpoint with --ckpt-step: one broadcast, of whether rank 0 sees that iteration, before it loads
     anything (training/load.py).
  3. load_checkpoint: one maximum, after arguments and common state have been read (training/load.py).
  4. load: one sum, of whether a rank restates what it requests (optimizer_layout.py), so that all do:
     Megatron may compare all keys. The first rank has verified files before, if asked to. If one restates,
     and the group is the world: one exchange of optimizer maps, of which each rank reads a part. A rank that
     fails sends nothing, and the others read what they lack themselves.
  5. load: Megatron's own gather of metadata, to which a rank that has failed sends its failure; one
     maximum if Megatron gathers nothing.
  6. fully parallel load: one maximum of the whole world, after each rank has read its part and before parts
     are exchanged; Megatron exchanges objects in the whole world.
  7. load: one maximum at its end. It also shows whether all ranks have opened the same checkpoint: another
     run may publish one in between. And it says for which rank each part of the load took longest.
A check of Megatron's that fails between 5 and a fully parallel load is kept as a value instead of raised,
since that load starts with a gather of metadata. A rank that fails within an exchange, or in
Megatron's checks right after it, raises alone.

A rank that sees none of the checkpoint's files does not know that the checkpoint is ours, and raises alone,
but in 3 if the arguments select our format.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_datastates.engine.memory import local_ranks
from megatron_datastates.errors import (
    CorruptDataError,
    DataStatesError,
    FormatError,
    NotACheckpointError,
    StorageError,
    UnsafeObjectError,
    some_of,
)
from megatron_datastates.format.values import SaveId
from megatron_datastates.mcore.load import state
from megatron_datastates.pipeline.loading.read_costs import ReadCosts
from megatron_datastates.pipeline.publishing import collectives
from megatron_datastates.pipeline.publishing.collectives import are_equal, terms_of

T = TypeVar("T")
_DAMAGE = (CorruptDataError, StorageError, FormatError, NotACheckpointError)
_RANK_BITS = 24  # which leave 39 for microseconds: six days
_LISTED = 3  # different failures, and ranks of each, that a message lists
_SHARED_CHARACTERS = 64 << 20  # of the failures of all ranks, which each rank gets, on a device


def is_caused_by_damage(error: BaseException) -> bool:
    """Returns whether a load failed because of the checkpoint's files: an older checkpoint may load."""
    return is_of_files(error.__cause__)


def is_of_files(cause: BaseException | None) -> bool:
    """Returns whether an error is one of the checkpoint's files."""
    return isinstance(cause, _DAMAGE) and not isinstance(cause, UnsafeObjectError)


@dataclasses.dataclass(frozen=True)
class Failure:
    """One rank's failure, as sent to the others."""

    text: str
    node: str
    cause: DataStatesError | None
    is_mismatch: bool

    @classmethod
    def of(cls, error: BaseException, most: int = _SHARED_CHARACTERS) -> Failure:
        """Describes `error`, whatever wraps it.

        Args:
            most: characters of its text, and of its cause's; one of Megatron's may list every key of a
                checkpoint.
        """
        from megatron.core.dist_checkpointing.core import CheckpointingException

        from megatron_datastates.mcore.errors import LoadMismatch

        if not isinstance(error, Exception):  # torch's CheckpointException holds the errors it wraps
            error = next((cause for cause, _ in error.failures.values()), error)  # type: ignore[attr-defined]
        # An error that is also Megatron's has ours as its cause.
        is_ours_alone = isinstance(error, DataStatesError) and not isinstance(error, CheckpointingException)
        ours = error if is_ours_alone else error.__cause__
        text = type(error).__name__
        with contextlib.suppress(Exception):  # a class of somebody's own, without a text
            text = str(error) if isinstance(error, CheckpointingException) else f"{text}: {error}"
        cause = ours if isinstance(ours, DataStatesError) else None
        if cause is not None and len(str(cause)) > most:
            cause = type(cause)(_bounded(str(cause), most))
        return cls(_bounded(text, most), socket.gethostname(), cause, isinstance(error, LoadMismatch))


def _bounded(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({len(text) - most} more characters)"


class Agreement:
    """The agreement of a process group (None: the world) on whether one load has failed."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        group: Any,
        *,
        is_parallel: bool = False,
        gathers: bool = False,
    ) -> None:
        self.failure: Failure | None = None
        self.is_over = False  # or, within an exchange, interrupted: this rank makes no call of its own
        # What this rank has opened: the save, and its index, which a removal of keys replaces alone.
        self.opened: tuple[SaveId, str] | None = None
        # By other ranks of this node, and by this one; None: not known.
        self.keys_read_beside: frozenset[str] | None = frozenset() if is_parallel else None
        self.is_parallel = is_parallel
        self._directory, self._group = directory, group
        self._gathers = gathers  # whether Megatron gathers metadata in this load
        self._has_begun = False
        self._has_exchanged = False

    @contextlib.contextmanager
    def sharing_failures(self) -> Iterator[None]:
        """Shares a failure in this block, which may be this rank's alone, with the other ranks."""
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            with state.opened(agreement=self):
                yield
        except (Exception, CheckpointException) as error:
            if not self.is_over:
                self.fail(error)
                if not self._has_begun:
                    self.begin(None)
                if self.is_parallel and not self._has_exchanged:
                    self.begin_exchange()  # there the others wait
                self.settle()
            raise
        else:
            if not self.is_over:
                self.settle()

    def fail(self, error: BaseException) -> None:
        """Records a failure of this rank; only the first one counts."""
        if self.failure is None:
            self.failure = Failure.of(error, _SHARED_CHARACTERS // len(collectives.ranks_of()))

    def begin(self, metadata: Sequence[Any] | None) -> None:
        """Makes the first collective call, or takes its result from what Megatron has gathered.

        Args:
            metadata: what Megatron has gathered; None on a rank that failed before.

        Raises:
            LoadFailedError (and a CheckpointingException): a rank has failed; the same on all ranks.
        """
        from torch.distributed.checkpoint.api import CheckpointException

        self._has_begun = True
        try:
            self._compare(metadata)
        except (Exception, CheckpointException) as error:
            if self._is_one_of_several:
                self.fail(error)
                self.begin_exchange()  # there the ranks of other process groups wait
            raise

    def _compare(self, metadata: Sequence[Any] | None) -> None:
        from megatron_datastates.mcore.load.metadata import keys_read_beside

        if not self._gathers:
            self._raise_if_any(self._group)
            return
        everyone = metadata if metadata is not None else collectives.gather_objects(self.failure, self._group)
        self._raise_for(everyone, self._group)
        if metadata is not None and not self.is_parallel:  # there, each shard is read by one rank
            self.keys_read_beside = keys_read_beside(
                everyone, collectives.ranks_of(self._group), dist.get_rank(), local_ranks()
            )

    @property
    def _is_one_of_several(self) -> bool:
        """Whether other process groups may be loading at the same time, and exchange with this one."""
        return self.is_parallel and len(collectives.ranks_of(self._group)) < dist.get_world_size()

    def verify_files(self) -> None:
        """Compares the files with the SHA-256 sums in Megatron's `integrity.json`, on the first rank.

        Replaces Megatron's own call, in which the first rank sends its result to the others: any other
        failure of the first rank would leave them waiting.
        """
        from megatron.core.dist_checkpointing import validation

        if dist.get_rank() == collectives.ranks_of(self._group)[0]:
            validation._verify_integrity_manifest_impl(os.fspath(self._directory))

    def parts_if_any(
        self, here: Callable[[], bool], part: Callable[[int, int], T], problem: Exception | None = None
    ) -> list[T] | None:
        """Returns None if `here` returns true on no rank; else what `part` returns on each. Collective.

        Args:
            here: a failure of it counts as no. Not called on a rank with a problem.
            part: gets the rank and the number of ranks. Of one on which it fails, nothing is returned, and of
                none if other process groups may be loading at the same time.
            problem: what has failed on this rank before.

        Raises:
            Exception: `problem`, or what `here` raised on this rank, after the collective call.
        """
        found, error = False, problem
        try:
            found = problem is None and here()
        except Exception as raised:
            error = raised
        (count,) = collectives.sum_now([int(found)], self._group)
        parts = self._parts(part if error is None else None) if count > 0 else None
        if error is not None:
            raise error
        return parts

    def _parts(self, part: Callable[[int, int], T] | None) -> list[T]:
        if len(collectives.ranks_of(self._group)) < dist.get_world_size():
            return []
        ranks, mine = collectives.Collectives(), None
        if part is not None:
            with contextlib.suppress(Exception):  # it comes again where this rank reads its part alone
                mine = part(ranks.rank, ranks.size)
        return [each for each in ranks.gather_values(mine) if each is not None]

    def begin_exchange(self) -> None:
        """Makes the collective call of the world that precedes an exchange. Raises as `settle`."""
        self.is_over = self._has_exchanged = True
        self._raise_if_any(None, compares=False)  # process groups may load a checkpoint each

    def end_exchange(self) -> None:
        """No rank waits in an exchange: failures are shared again."""
        self.is_over = False

    def settle(self) -> None:
        """Makes the last collective call. Raises LoadFailedError, the same on all ranks, if any failed."""
        self.is_over = True
        self._raise_if_any(self._group)

    def _raise_if_any(self, group: Any, *, compares: bool = True) -> None:
        tracker = state.current().tracker
        parts = (ReadCosts() if tracker is None else tracker.costs).seconds()
        mine = [int(self.failure is not None), *_terms(self.opened), *map(_with_rank, parts.values())]
        failed, least, most, *slowest = collectives.max_now(mine, group)
        if tracker is not None:
            tracker.slowest = {part: _apart(found) for part, found in zip(parts, slowest, strict=True)}
        if failed:
            self._raise_for(collectives.gather_objects(self.failure, group), group)
        elif compares and not are_equal(least, most):  # so say the same numbers on every rank
            from megatron_datastates.mcore.errors import MegatronLoadFailedError

            self.is_over = True
            state.current().failed_on_all_ranks = True
            text = (
                f"loading {self._directory}: ranks have opened different checkpoints there: a job saved to "
                "it meanwhile, keys were removed, or the ranks see different storage. Load it again while no "
                "job saves there"
            )
            raise MegatronLoadFailedError(text) from StorageError(text)

    def _raise_for(self, everyone: Iterable[Any], group: Any) -> None:
        from megatron_datastates.mcore.errors import LoadMismatch, MegatronLoadFailedError

        ranks = collectives.ranks_of(group)
        by_rank = zip(ranks, everyone, strict=True)
        failures = {rank: failure for rank, failure in by_rank if isinstance(failure, Failure)}
        if not failures:
            return
        self.is_over = True
        state.current().failed_on_all_ranks = True
        mismatch = all(failure.is_mismatch for failure in failures.values())
        text = (
            f"loading {self._directory} failed on {len(failures)} of {len(ranks)} ranks: {_summary(failures)}"
        )
        raise (LoadMismatch if mismatch else MegatronLoadFailedError)(text) from _cause(failures)


def _terms(opened: tuple[SaveId, str] | None) -> list[int]:
    """Returns what shows whether all ranks have opened the same, of which each greatest number is shared."""
    if opened is None:
        return [collectives.NOTHING, collectives.NOTHING]
    return terms_of(hashlib.sha256(" ".join(map(str, opened)).encode()).digest())


def _with_rank(seconds: float) -> int:
    """Returns a time as a number that also says which rank's it is; that of the longest is the greatest."""
    return int(seconds * 1e6) << _RANK_BITS | dist.get_rank()


def _apart(found: int) -> tuple[float, int]:
    """Returns the seconds and the rank that _with_rank has joined."""
    return (found >> _RANK_BITS) / 1e6, found & (1 << _RANK_BITS) - 1


def _summary(failures: dict[int, Failure]) -> str:
    ranks_by_text: dict[str, list[int]] = {}
    for rank, failure in failures.items():
        ranks_by_text.setdefault(failure.text, []).append(rank)
    listed = []
    for text, ranks in list(ranks_by_text.items())[:_LISTED]:
        nodes = list(dict.fromkeys(failures[rank].node for rank in ranks))
        listed.append(f"{_some('rank', ranks)}: {text} (on {_some('node', nodes)})")
    omitted = sum(len(ranks) for ranks in list(ranks_by_text.values())[_LISTED:])
    return "; ".join(listed) + (f" (and {omitted} more ranks)" if omitted else "")


def _some(noun: str, names: Sequence[object]) -> str:
    return f"{noun}{'' if len(names) == 1 else 's'} {some_of([str(name) for name in names], _LISTED)}"


def _cause(failures: dict[int, Failure]) -> DataStatesError | None:
    """Returns the same cause on all ranks: damage if there is any, as it decides what the user can do."""
    causes = [failure.cause for failure in failures.values() if failure.cause is not None]
    return next((cause for cause in causes if isinstance(cause, _DAMAGE)), causes[0] if causes else None)
