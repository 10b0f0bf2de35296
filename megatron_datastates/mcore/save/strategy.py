"""Save strategies for Megatron."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import fully_parallel
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.utils import _sharded_tensor_shard_id

from megatron_datastates.config import Options
from megatron_datastates.dcp.items import PlannedState
from megatron_datastates.files import path_of, read_regular
from megatron_datastates.format.directory import (
    BACKEND,
    COMMON_FILE,
    FILES_OF_TORCH_DIST,
    METADATA_NAME,
    iteration_in_name,
)
from megatron_datastates.format.values import SaveId
from megatron_datastates.mcore.hooks import versions
from megatron_datastates.mcore.hooks.attach import attach_saving, replaced
from megatron_datastates.mcore.parallel import parallel_sizes
from megatron_datastates.mcore.providers import Providers, register, registered
from megatron_datastates.mcore.save import mutability, preparing
from megatron_datastates.mcore.save.mapping import ShardedStateProvider
from megatron_datastates.mcore.save.marks import mark_of
from megatron_datastates.mcore.save.request import make_request, raise_if_failed
from megatron_datastates.pipeline.publication import Publication
from megatron_datastates.pipeline.publishing.collectives import gather_objects
from megatron_datastates.pipeline.publishing.documents import PublicationExtras
from megatron_datastates.pipeline.runs.branches import Origin
from megatron_datastates.pipeline.saver_pool import saver_for
from megatron_datastates.pipeline.saving.held import trainer_held
from megatron_datastates.providers.base import StateProvider

Transform = Callable[[StateProvider], StateProvider]
FarPublished = Callable[[Path], Callable[[SaveId, bool], None] | None]
_of_program: list[Transform | None] = [None]  # the one of `enable`
_DETERMINE = "determine_main_replica_uniform_distribution"
_DISTRIBUTE = "distribute_main_replicas_with_precomputed_distribution"


def _is_not_known(*args: Any) -> None:
    return None


def use_transform(transform: Transform | None) -> None:
    """Sets what later saves of training loops make of the provider of Megatron's state."""
    _of_program[0] = transform


class DataStatesSaveStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Saves in the datastates format; for `dist_checkpointing.save`.

    Args:
        assume_immutable: the caller promises not to change the tensors before the next step of a torch
            optimizer, or before calling `fence()`. They are then copied after the save has returned. Without
            the promise everything is copied before the save returns.
        options: see megatron_datastates.config; by default from the environment.
        providers: further state to save in the same checkpoints, by name or with an attribute `name`; loads
            restore it, too, as with `enable(providers=...)`.
        transform: what each save makes of the provider of Megatron's state, such as
            `lambda state: Cast(state, torch.bfloat16, "*exp_avg*")`.
    """

    def __init__(
        self,
        *,
        assume_immutable: bool = False,
        options: Options | None = None,
        providers: Providers = (),
        transform: Transform | None = None,
    ) -> None:
        attach_saving()
        super().__init__(backend=BACKEND, version=1)
        self._document = _metadata_json(CheckpointingConfig(self.backend, self.version))
        register(providers)
        self.assume_immutable = assume_immutable
        self._transform = transform
        # Known in training loops only. Without the first, a save leaves near tiers out.
        self._far_published: FarPublished = _is_not_known
        self._origin: Callable[[], Origin | None] = _is_not_known
        self._is_kept: Callable[[int | None], bool] = lambda iteration: False
        self.options = options or Options.from_environment()

    def is_lazy(self) -> bool:
        """Returns whether a save started now may read the caller's memory after it has returned."""
        return self.assume_immutable

    def transform(self) -> Transform | None:
        """Returns what a save started now makes of the provider of Megatron's state."""
        return self._transform

    def classifier(self) -> mutability.Classify:
        """Returns the function that classifies the tensors of a save started now."""
        return mutability.all_promised if self.is_lazy() else mutability.nothing_promised

    def async_save(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path, async_strategy: str = "mcore"
    ) -> Any:
        """Starts the save and returns a request, which must be scheduled in an AsyncCallsQueue.

        An error on one rank is not raised here: it is raised on every rank when the request is finalized.
        """
        with trainer_held("start"):
            publication = self._start(sharded_state_dict, checkpoint_dir, "async")
        return make_request(publication, async_strategy, self.options.on_failure)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        """Saves, and returns once the checkpoint is published.

        Raises:
            SaveFailedError (and a CheckpointingException): any rank failed; the same on every rank.
        """
        with trainer_held("start"):
            publication = self._start(sharded_state_dict, checkpoint_dir, "sync")
        _note_near(publication)
        publication.wait()
        raise_if_failed(publication)

    def _start(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path, mode: str) -> Publication:
        sharded = ShardedStateProvider(sharded_state_dict, self.classifier, is_lazy=self.is_lazy())
        directory = path_of(checkpoint_dir)
        iteration = _iteration(sharded_state_dict, directory)
        extras = PublicationExtras(
            parallel=parallel_sizes(),
            other_files=(COMMON_FILE,) if versions.installed().writes_common_file else (),
            superseded=FILES_OF_TORCH_DIST,
            metadata=self._document,
            origin=self._origin(),
        )
        publication = self._start_state(sharded, directory, iteration, mode, extras)
        publication.is_prepared = sharded.thin is not None
        publication.not_prepared_because = preparing.obstacle()
        return publication

    def _start_state(
        self,
        state: StateProvider,
        directory: Path,
        iteration: int | None,
        mode: str,
        extras: PublicationExtras,
    ) -> Publication:
        def providers() -> dict[str, StateProvider]:
            transform = self.transform()
            own = state if transform is None else transform(state)
            return {"": own, **registered(self.options.providers)}

        return saver_for(self.options).start(
            directory,
            providers,
            iteration=iteration,
            mode=mode,
            extras=extras,
            await_copies=not self.is_lazy(),
            far_published=self._far_published(directory),
            is_of_training=isinstance(self, TrainingSaveStrategy),
            is_kept=self._is_kept(iteration),
        )


class TrainingSaveStrategy(DataStatesSaveStrategy):
    """A strategy for training loops: memory proved to change only in optimizer steps is copied lazily.

    Args:
        in_loop: returns whether such a loop is running. If not, a save copies everything before it returns.
        far_published: called with the directory of every checkpoint; returns what is to be called on rank 0
            once it is published there, or None if it is not to be written to a near tier first.
        origin: returns what the job has resumed from, if that is known.
        is_kept: returns whether the loop's retention keeps the checkpoint of an iteration.
    """

    def __init__(
        self,
        options: Options | None = None,
        in_loop: Callable[[], bool] = lambda: True,
        far_published: FarPublished = _is_not_known,
        origin: Callable[[], Origin | None] = _is_not_known,
        is_kept: Callable[[int | None], bool] = lambda iteration: False,
    ) -> None:
        super().__init__(options=options)
        self._in_loop = in_loop
        self._far_published = far_published
        self._origin = origin
        self._is_kept = is_kept

    def change(self, options: Options, in_loop: Callable[[], bool]) -> None:
        """Changes how later saves are made."""
        self.options, self._in_loop = options, in_loop

    def transform(self) -> Transform | None:
        return _of_program[0]

    def start_planned(
        self, state: PlannedState, directory: Path, mode: str, facts: Callable[[], bytes]
    ) -> Publication:
        """Starts to save what DCP has planned. Errors are values of the save.

        Args:
            facts: returns what DCP knows of the state; called by rank 0's publishing thread.
        """
        extras = PublicationExtras(
            parallel=parallel_sizes(),
            superseded=FILES_OF_TORCH_DIST,
            origin=self._origin(),
            dcp_facts=facts,
        )
        with trainer_held("start"):
            return self._start_state(state, directory, iteration_in_name(directory.name), mode, extras)

    def is_lazy(self) -> bool:
        return self._in_loop()

    def classifier(self) -> mutability.Classify:
        if not self.is_lazy():
            return mutability.nothing_promised
        return mutability.proof_in_training_loop(preparing.saved_model())


def _note_near(publication: Publication) -> None:
    """Remembers, for `save_config`, whether the files of a save are brought to its directory later."""
    global _near_directory
    _near_directory = publication.save.context.directory if publication.publisher.place.node else None


def _metadata_json(config: Any) -> bytes:
    return json.dumps(dataclasses.asdict(config)).encode()


_near_directory: Path | None = None  # of the last synchronous save, if a near tier may hold it


def wrap_save_config(original: Any, config: Any, checkpoint_dir: str) -> None:
    """Wraps `save_config`, which writes metadata.json on rank 0 while all others wait in a barrier.

    Megatron calls it right after a synchronous save; our requests leave it out. Our save has already written
    the complete file, or failed on all ranks; an error here would leave the other ranks waiting.
    """
    if config.sharded_backend == BACKEND:
        content = _metadata_json(config)
        directory = path_of(checkpoint_dir).absolute()
        if directory == _near_directory:
            return  # it belongs to a checkpoint that is not there yet, and --save may hang
        with contextlib.suppress(OSError):
            if read_regular(directory / METADATA_NAME, len(content)) == content:
                return
    original(config, checkpoint_dir)


def _iteration(sharded_state_dict: dict[str, Any], directory: Path) -> int | None:
    common = getattr(sharded_state_dict.get("common_state"), "data", None)
    if isinstance(common, dict) and isinstance(common.get("iteration"), int):
        return int(common["iteration"])
    return iteration_in_name(directory.name)


def wrap_fully_parallel_init(original: Any, self: Any, strategy: Any, *args: Any, **kwargs: Any) -> None:
    """Wraps `FullyParallelSaveStrategyWrapper.__init__`: metadata.json has to name the inner backend."""
    original(self, strategy, *args, **kwargs)
    if isinstance(strategy, DataStatesSaveStrategy):
        self.backend, self.version = strategy.backend, strategy.version


# Strategies whose first save was checked.
_checked: weakref.WeakSet[Any] = weakref.WeakSet()


def wrap_apply_saving_parallelization(original: Any, self: Any, sharded_state_dict: Any) -> None:
    """Wraps `FullyParallelSaveStrategyWrapper.apply_saving_parallelization`: checks only the first save.

    In a group of one rank there is no distribution to cache, so Megatron would exchange the metadata of all
    ranks in every save, although their structure is declared constant. A prepared save distributes nothing.
    """
    mark = mark_of(sharded_state_dict)
    if mark is not None and mark.thin is not None:
        return  # the tensors are distributed as in the last full save
    if self in _checked and self.cached_distribution is None:
        return
    if not isinstance(self.base_strategy, DataStatesSaveStrategy):
        original(self, sharded_state_dict)
        return
    determine = functools.partial(_determine, getattr(fully_parallel, _DETERMINE))
    distribute = functools.partial(_distribute, getattr(fully_parallel, _DISTRIBUTE))
    with (
        replaced(fully_parallel, _DETERMINE, determine),
        replaced(fully_parallel, _DISTRIBUTE, distribute),
    ):
        original(self, sharded_state_dict)
    if self.do_cache_distribution:
        _checked.add(self)


def _determine(
    original: Callable[..., Any], sharded_state_dict: Any, group: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wraps Megatron's function that determines a distribution: a stored one is used only if it fits.

    A load may have made the stored one. It requests on all ranks some state that a save has on one rank only:
    all of the optimizer's with --distrib-optim-fully-reshardable-mem-efficient. What such a distribution
    assigns to another rank would not be stored at all.
    """
    distribution = original(sharded_state_dict, group, *args, **kwargs)
    if kwargs.get("pg_cache_path") is None or distribution is None:
        return distribution
    rank, stored_by = torch.distributed.get_rank(group), distribution.main_rank_for_shard
    held = {_sharded_tensor_shard_id(item) for item in _tensors_in(sharded_state_dict)}
    is_lacking = any(main == rank and shard not in held for shard, main in stored_by.items())
    return original(sharded_state_dict, group) if any(gather_objects(is_lacking, group)) else distribution


def _tensors_in(sharded_state_dict: Any) -> list[ShardedTensor]:
    return [item for item in nested_values(sharded_state_dict) if isinstance(item, ShardedTensor)]


def _distribute(original: Callable[..., Any], sharded_state_dict: Any, group: Any, distribution: Any) -> None:
    """Wraps Megatron's function that distributes tensors: those that a distribution lacks are left alone.

    A cached distribution lacks tensors that came later, such as the states of an optimizer whose first steps
    were skipped, and those that a load did not request. Megatron would have no rank store them; so the rank
    with the main replica does.
    """
    unknown = _not_distributed(sharded_state_dict, group, distribution)
    original(sharded_state_dict, group, distribution)
    for item, replica_id in unknown:
        item.replica_id = replica_id


def _not_distributed(
    sharded_state_dict: Any, group: Any, distribution: Any
) -> list[tuple[ShardedTensor, Any]]:
    """Returns this rank's tensors that a distribution lacks, with their replica ids."""
    if distribution is None:  # the group has one rank
        return []
    rank, ranks = torch.distributed.get_rank(group), distribution.all_ranks_for_shard
    return [
        (item, item.replica_id)
        for item in _tensors_in(sharded_state_dict)
        if rank not in ranks.get(_sharded_tensor_shard_id(item), ())
    ]
