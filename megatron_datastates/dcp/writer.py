"""Saves of PyTorch's distributed checkpoints (DCP) in our format.

DCP's own collective calls bring the ranks together; nothing here makes one, so that `async_save` may run on a
thread beside the trainer:
  1. Each rank sends its plan; the coordinator draws a save id, and each rank gets it with its final plan
     (`prepare_global_plan`). A planner that caches plans keeps an old id: such a rank draws one of its own.
  2. Each rank writes the items of its plan to one data file, waits until it is durable, and returns what the
     manifest needs (`write_data`; pipeline/external_ranks.py).
  3. DCP gathers these on the coordinator. Only if no rank failed, it calls `finish`: the index and
     the file with DCP's facts are written, then the manifest. Then all ranks return, or all raise DCP's
     CheckpointException.
Nothing is published unless step 3 ends: the checkpoint that was in the directory before stays until then.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import uuid
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from megatron_datastates.dcp.facts import Facts
from megatron_datastates.dcp.items import PlannedState
from megatron_datastates.dcp.paths import directory_of
from megatron_datastates.errors import DataStatesError
from megatron_datastates.format.directory import FILES_OF_TORCH_DIST
from megatron_datastates.format.values import SaveId
from megatron_datastates.option_calls import options_of_call
from megatron_datastates.pipeline.external_ranks import external_rank_saver_for, new_save_id
from megatron_datastates.pipeline.publication import Publication
from megatron_datastates.pipeline.publishing.documents import PublicationExtras
from megatron_datastates.pipeline.saving.milestones import SaveContext
from megatron_datastates.pipeline.saving.records import RankContribution

_PART = "datastates"  # the result of a rank is one for all its items
_newest_lock = threading.Lock()  # async_save plans on threads
_newest: dict[int, int] = {}  # ordinals of this process's saves, by run id, to notice plans that are cached


@dataclasses.dataclass(frozen=True)
class _Assignment:
    """What a rank gets with its final plan."""

    save_id: SaveId
    rank: int
    world_size: int


class DataStatesWriter(StorageWriter):
    """Writes datastates checkpoints for `torch.distributed.checkpoint.save` and `async_save`.

    One object serves any number of saves, one after the other; a save that another one overtakes fails.
    A save into a directory with a checkpoint replaces it once the new one is complete.
    """

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Prepares saves.

        Args:
            path: directory of the checkpoint; a `checkpoint_id` given to a save takes its place.
            options: fields of megatron_datastates.config.Options, as for `ds.save`.

        Raises:
            OptionError: an option that does not exist, or makes no sense.
            DataStatesError: `path` is a URL.
        """
        self._directory = directory_of(path)
        self._options = options_of_call(options, "save")
        self._name = uuid.uuid4().hex  # DCP's own id of the save, for its log
        # On the coordinator, from `prepare_global_plan` and from `write_data` to `finish`:
        self._save_id: SaveId | None = None
        self._publication: Publication | None = None
        self._thread = threading.get_ident()  # of the save that began last: all of DCP's calls are on one

    @property
    def checkpoint_id(self) -> str:
        return str(self._directory)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether it can be the directory of a checkpoint."""
        return FileSystemWriter.validate_checkpoint_id(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepares for another save, into another directory if one is given."""
        if checkpoint_id:
            self._directory = directory_of(checkpoint_id)
        self._name, self._thread = uuid.uuid4().hex, threading.get_ident()

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._name)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begins a save on this rank. Raises DataStatesError if the ranks are not to work together."""
        self._save_id, self._publication, self._thread = None, None, threading.get_ident()
        if not kwargs.get("use_collectives", True):
            raise DataStatesError(
                "DataStatesWriter cannot save with use_collectives=False: without a manifest for all ranks "
                "there is no checkpoint. Leave use_collectives at True"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Adds the save id and the rank's number to every rank's plan. On the coordinator."""
        self._save_id = new_save_id()
        return [
            dataclasses.replace(plan, storage_data=_Assignment(self._save_id, rank, len(plans)))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items; they are durable when this returns.

        Raises:
            SaveFailedError: this rank failed. DCP raises its CheckpointException on all ranks.
            DataStatesError: another save has begun with this object.
        """
        self._require_own_turn()
        context = self._context(plan.storage_data)
        publication = external_rank_saver_for(self._options).write(context, PlannedState(plan, planner))
        if self._save_id is not None and self._is_own_turn():
            self._publication = publication
        save, contribution = publication.save, publication.contribution()
        result = WriteResult(MetadataIndex(_PART), save.file.bytes if save.file else 0, contribution)
        done: Future[list[WriteResult]] = Future()
        done.set_result([result])
        return done

    def _context(self, assigned: object) -> SaveContext:
        if not isinstance(assigned, _Assignment):
            raise DataStatesError(
                f"the final plan of this rank has the storage data {assigned!r}: expected what "
                "DataStatesWriter has put there. A planner's finish_plan has to keep it"
            )
        save_id = self._save_id or assigned.save_id
        with _newest_lock:
            if save_id.ordinal <= _newest.get(save_id.run_id, 0):  # or a save that began later was faster
                save_id = new_save_id()
            _newest[save_id.run_id] = max(save_id.ordinal, _newest.get(save_id.run_id, 0))
        return SaveContext(save_id, self._directory, assigned.rank, assigned.world_size)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publishes the checkpoint. On the coordinator, once all ranks' files are durable.

        Raises:
            SaveFailedError: nothing was published, unless its text says otherwise.
            UnsafeObjectError: a load would refuse DCP's facts; nothing was published.
            DataStatesError: another save has begun with this object.
        """
        self._require_own_turn()
        publication, self._publication = self._publication, None
        assert publication is not None, "DCP calls write_data on the coordinator before finish"
        contributions = [result.storage_data for written in results for result in written]
        assert all(isinstance(one, RankContribution) for one in contributions)
        name, trust = publication.save.context.save_id.dcp_file_name(), self._options.trust_objects
        try:
            facts = Facts.of(metadata, self.storage_meta()).encode(name, trust=trust)
            extras = PublicationExtras(superseded=FILES_OF_TORCH_DIST, dcp_facts=lambda: facts)
            external_rank_saver_for(self._options).publish(publication, contributions, extras)
        except Exception:
            if not publication.keeps_files:
                publication.remove("the save was not published")
            raise

    def __getstate__(self) -> dict[str, Any]:
        # Another process saves with a copy. After a save that failed on another rank, one is still here.
        return {**vars(self), "_save_id": None, "_publication": None}

    def _is_own_turn(self) -> bool:
        return self._thread == threading.get_ident()

    def _require_own_turn(self) -> None:
        # The save that began last has set the directory: this one would write to it.
        if not self._is_own_turn():
            raise DataStatesError(
                f"the DataStatesWriter of this save began another one, to {self._directory}, before this one "
                "was over: nothing was published. Wait for the future of async_save, or give each save a "
                "writer of its own"
            )
