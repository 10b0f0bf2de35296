"""A load that fails on one rank fails on all of them, with one text.

A load is known to be collective where Megatron itself makes a collective call in it on all ranks: in a
`dist_checkpointing.load` that gathers metadata, in a fully parallel load, and in the training loop's
load_checkpoint. All else communicates with nobody: one rank may read alone.

Where ranks meet, each of them the same number of times whatever fails:
  1. load_checkpoint: one sum, once arguments and common state were read (training_load.py).
  2. load: in Megatron's own gather of metadata, to which a rank that failed before it sends its failure; one
     sum where Megatron gathers nothing.
  3. load: one sum, once each rank has read its part; in a fully parallel load before the parts are exchanged.
What Megatron checks between 2 and a fully parallel load fails as a value: that load gathers metadata first.

A rank that sees no file of the checkpoint at all cannot tell that it is ours, and raises alone, as before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megatron_datastates.errors import (
    CorruptDataError,
    DataStatesError,
    FormatError,
    NotACheckpointError,
    StorageError,
    UnsafeObjectError,
)
from megatron_datastates.mcore.load import state
from megatron_datastates.pipeline.runs import may_be_ours

_DAMAGE = (CorruptDataError, StorageError, FormatError, NotACheckpointError)
_TOLD = 3  # different failures that are told in full


def is_damage(error: BaseException) -> bool:
    """Whether a load failed because of the checkpoint's files: an older checkpoint may load."""
    cause = error.__cause__
    return isinstance(cause, _DAMAGE) and not isinstance(cause, UnsafeObjectError)


@dataclasses.dataclass(frozen=True)
class Failure:
    """What one rank met; sent to the others."""

    text: str
    cause: DataStatesError | None
    is_mismatch: bool

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        from megatron.core.dist_checkpointing.core import CheckpointingException

        from megatron_datastates.mcore.errors import LoadMismatch

        if not isinstance(error, Exception):  # torch's CheckpointException holds what it was
            error = next((cause for cause, _ in error.failures.values()), error)  # type: ignore[attr-defined]
        # An error that is Megatron's, too, has ours for its cause.
        is_ours_alone = isinstance(error, DataStatesError) and not isinstance(error, CheckpointingException)
        ours = error if is_ours_alone else error.__cause__
        told = str(error) if isinstance(error, CheckpointingException) else f"{type(error).__name__}: {error}"
        cause = ours if isinstance(ours, DataStatesError) else None
        return cls(told, cause, isinstance(error, LoadMismatch))


class Agreement:
    """On whether one load has failed: between the ranks of a process group, None being the world."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        group: Any,
        *,
        is_parallel: bool = False,
        gathers: bool = False,
        began_alike: bool = False,
    ) -> None:
        self.failure: Failure | None = None
        self.is_over = False
        self.is_parallel = is_parallel
        self._directory, self._group = directory, group
        self._last_group = None if is_parallel else group  # Megatron exchanges objects in the whole world
        self._gathers = gathers  # Megatron does, metadata
        self._began_alike = began_alike

    @contextlib.contextmanager
    def reached(self) -> Iterator[None]:
        """Around what may fail on this rank alone."""
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            with state.opened(agreement=self):
                yield
        except (Exception, CheckpointException) as error:
            if self.is_over:
                raise
            self.fail(error)
            if not self._began_alike:
                self.begin(None)
            self.settle()
        else:
            if not self.is_over:
                self.settle()

    def fail(self, error: BaseException) -> None:
        """Notes a failure of this rank; the first one is told."""
        if self.failure is None:
            self.failure = Failure.of(error)

    def begin(self, metadata: Iterable[Any] | None) -> None:
        """The first meeting: in what Megatron gathered, or, on a rank that failed before it, now (None).

        Raises:
            LoadFailedError (and a CheckpointingException): a rank failed before; the same on all ranks.
        """
        from megatron_datastates.pipeline.agreement import gather_objects

        self._began_alike = True
        if not self._gathers:
            self._raise_if_any(self._group)
            return
        everyone = metadata if metadata is not None else gather_objects(self.failure, self._group)
        self._raise_for(everyone, self._group)

    def verify_files(self) -> None:
        """Compares the files with the SHA-256 sums in Megatron's `integrity.json`, on the first rank.

        In place of Megatron's own call, where the first rank tells the others what is wrong: one that fails
        otherwise, or before it, would leave them waiting.
        """
        import torch.distributed as dist
        from megatron.core.dist_checkpointing import validation

        from megatron_datastates.pipeline.agreement import ranks_of

        if dist.get_rank() == ranks_of(self._group)[0]:
            validation._verify_integrity_manifest_impl(os.fspath(self._directory))

    def settle(self) -> None:
        """The last meeting. Raises LoadFailedError, the same on all ranks, if any failed."""
        self.is_over = True
        self._raise_if_any(self._last_group)

    def _raise_if_any(self, group: Any) -> None:
        from megatron_datastates.pipeline.agreement import gather_objects, sum_now

        if sum_now(int(self.failure is not None), group):
            self._raise_for(gather_objects(self.failure, group), group)

    def _raise_for(self, everyone: Iterable[Any], group: Any) -> None:
        from megatron_datastates.mcore.errors import LoadMismatch, MegatronLoadFailedError
        from megatron_datastates.pipeline.agreement import ranks_of

        ranks = ranks_of(group)
        told = zip(ranks, everyone, strict=True)
        failures = {rank: failure for rank, failure in told if isinstance(failure, Failure)}
        if not failures:
            return
        self.is_over = True
        state.current().failed_alike = True
        mismatch = all(failure.is_mismatch for failure in failures.values())
        text = f"loading {self._directory} failed on {len(failures)} of {len(ranks)} ranks: {_told(failures)}"
        raise (LoadMismatch if mismatch else MegatronLoadFailedError)(text) from _cause(failures)


def _told(failures: dict[int, Failure]) -> str:
    ranks_by_text: dict[str, list[int]] = {}
    for rank, failure in failures.items():
        ranks_by_text.setdefault(failure.text, []).append(rank)
    told = [f"{_named(ranks)}: {text}" for text, ranks in list(ranks_by_text.items())[:_TOLD]]
    untold = sum(len(ranks) for ranks in list(ranks_by_text.values())[_TOLD:])
    return "; ".join(told) + (f" (and {untold} more ranks)" if untold else "")


def _named(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks[:_TOLD]))
    more = f" and {len(ranks) - _TOLD} more" if len(ranks) > _TOLD else ""
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}{more}"


def _cause(failures: dict[int, Failure]) -> DataStatesError | None:
    """The same on all ranks: damage before anything else, as it decides what is to be done."""
    causes = [failure.cause for failure in failures.values() if failure.cause is not None]
    return next((cause for cause in causes if isinstance(cause, _DAMAGE)), causes[0] if causes else None)


# -- what is made of Megatron's functions -----------------------------------------------------------------


def agreed(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `dist_checkpointing.load`."""
    signature = inspect.signature(original)

    def load(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        if not may_be_ours(call.arguments["checkpoint_dir"]):
            return original(*args, **kwargs)
        with _reported(call.arguments["checkpoint_dir"]):
            return load_together(call)

    def load_together(call: inspect.BoundArguments) -> Any:
        agreement = _agreement_of(call.arguments)
        if agreement is None:
            return original(*call.args, **call.kwargs)
        with agreement.reached():
            if call.arguments.get("verify_integrity"):  # since 0.19
                call.arguments["verify_integrity"] = False
                agreement.verify_files()
            return original(*call.args, **call.kwargs)

    return load


@contextlib.contextmanager
def _reported(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Reports the load in the block, once all ranks have agreed on whether it failed."""
    from megatron_datastates.pipeline.load_report import reported_load

    with (
        reported_load(directory, state.current().options) as tracker,
        state.opened(tracker=tracker),
    ):
        yield


def _agreement_of(asked: dict[str, Any]) -> Agreement | None:
    """None if nobody else is known to take part in this load."""
    from megatron.core.dist_checkpointing.validation import StrictHandling, parse_strict_flag

    from megatron_datastates.pipeline.agreement import ranks_of

    group = asked.get("process_group")  # since 0.19
    strict = parse_strict_flag(asked["strict"])
    gathers = asked["validate_access_integrity"] or StrictHandling.requires_global_app_metadata(strict)
    is_parallel = _is_parallel(asked["sharded_strategy"])
    if not (gathers or is_parallel or state.current().in_training_loop) or len(ranks_of(group)) < 2:
        return None
    return Agreement(asked["checkpoint_dir"], group, is_parallel=is_parallel, gathers=gathers)


def _is_parallel(strategy: Any) -> bool:
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

    from megatron_datastates.pipeline.agreement import ranks_of

    parallel = isinstance(strategy, FullyParallelLoadStrategyWrapper)
    return parallel and len(ranks_of(strategy.parallelization_group)) > 1


def begun_alike(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `validate_integrity_and_strict_load`, which is given what was gathered, and then may raise."""

    def validate(sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        agreement = state.current().agreement
        if agreement is not None:
            gathered = inspect.signature(original).bind(sharded_state_dict, *args, **kwargs).arguments
            agreement.begin(gathered.get("global_metadata"))
        try:
            return original(sharded_state_dict, *args, **kwargs)
        except Exception as error:
            if agreement is None or not agreement.is_parallel:
                raise
            agreement.fail(error)
            return sharded_state_dict, set(), set()

    return validate


def agreed_in_parallel(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `FullyParallelLoadStrategyWrapper.load`, where `dist_checkpointing.load` has not called it."""

    def load(self: Any, sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        if state.current().agreement is not None or not may_be_ours(checkpoint_dir) or not _is_parallel(self):
            return original(self, sharded_state_dict, checkpoint_dir, *args, **kwargs)
        with Agreement(checkpoint_dir, None, is_parallel=True, began_alike=True).reached():
            return original(self, sharded_state_dict, checkpoint_dir, *args, **kwargs)

    return load


def settled_before(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `exchange_by_distribution` of a fully parallel load, in which all ranks of the world take part."""

    def exchange_by_distribution(*args: Any, **kwargs: Any) -> Any:
        agreement = state.current().agreement
        if agreement is not None and not agreement.is_over:
            agreement.settle()
        return original(*args, **kwargs)

    return exchange_by_distribution
