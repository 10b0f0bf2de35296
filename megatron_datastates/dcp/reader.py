"""Loads of PyTorch's distributed checkpoints (DCP) from our format: those of DCP's saves and all others."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from megatron_datastates.dcp.facts import read_facts
from megatron_datastates.dcp.paths import directory_of
from megatron_datastates.dcp.reading import CheckpointReader
from megatron_datastates.errors import StorageError
from megatron_datastates.format.values import SaveId
from megatron_datastates.option_calls import options_of_call
from megatron_datastates.pipeline.load_report import reported_load
from megatron_datastates.pipeline.loading.load import Checkpoint


class _Opened(NamedTuple):
    """What a rank has opened, as it says with its plan."""

    path: str  # ranks may load from a directory each
    save_id: SaveId
    index_sha256: str  # a removal of keys replaces the index alone


class DataStatesReader(CheckpointReader):
    """Reads datastates checkpoints for `torch.distributed.checkpoint.load`, on any number of ranks.

    Every byte is checked, and objects are unpickled with the allow list. One object serves any number of
    loads, one after the other.
    """

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Prepares loads; opens nothing.

        Args:
            path: directory of the checkpoint; a `checkpoint_id` given to a load takes its place.
            options: fields of megatron_datastates.config.Options, as for `ds.load`.

        Raises:
            OptionError: an option that does not exist, or makes no sense.
            DataStatesError: `path` is a URL.
        """
        super().__init__(directory_of(path))
        self._failure = ""  # of this load's first attempt to open the checkpoint
        self._options = options_of_call(options, "load")

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(directory_of(checkpoint_id) if checkpoint_id else None)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Opens the checkpoint and returns DCP's metadata of it.

        Raises:
            NotACheckpointError: no checkpoint was published there, or DCP has saved one in its place.
            FormatError, UnsupportedFormatError, CorruptDataError, StorageError: it cannot be used.
        """
        if "rank" not in kwargs:
            self._failure = ""
            try:
                return self._open()
            except Exception as error:
                self._failure = (
                    f"{type(error).__name__}: {error}"  # the error itself would keep tensors alive
                )
                raise
        # DCP asks for metadata of one rank after it has caught an error, which it does not show. It catches
        # any Exception here, too. With an answer, this rank would go on without the others, who wait for it.
        try:
            found = self._open()
            if self._failure:
                raise StorageError(
                    f"{self.path} could be opened only at the second attempt: load again. At the first one: "
                    f"{self._failure}"
                )
            return found
        except Exception as error:
            raise CheckpointException("read metadata", {kwargs["rank"]: _wrap_exception(error)}) from error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        manifest = self.checkpoint.manifest
        opened = _Opened(str(self.path), manifest.save_id, manifest.index.sha256)
        return dataclasses.replace(plan, storage_data=opened)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Compares what ranks have opened, on the coordinator; DCP raises its error on all ranks.

        Raises:
            StorageError: ranks have opened different saves in one directory.
        """
        first: dict[str, _Opened] = {}
        for plan in plans:
            opened = plan.storage_data
            if isinstance(opened, _Opened) and first.setdefault(opened.path, opened) != opened:
                raise StorageError(
                    f"loading {opened.path}: ranks have opened different checkpoints there: a job saved to "
                    "it meanwhile, or the ranks see different storage. Load it again while no job saves there"
                )
        return plans

    def _open(self) -> Metadata:
        path = Path(self.path)
        self.checkpoint = Checkpoint.open(path, self._options)
        facts = read_facts(self.checkpoint)
        known = self.stored_metadata(facts.complete)
        planner_data = {key: (key,) for key in known} if facts.planner_data is None else facts.planner_data
        found = Metadata(known, planner_data, storage_data={}, storage_meta=facts.stored_meta(self.load_id))
        if hasattr(found, "version"):  # since torch 2.8
            found.version = facts.version
        return found

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads this rank's part; raises as CheckpointReader.read_data. The report counts from here."""
        with reported_load(self.path, lambda: self._options) as tracker:
            tracker.follow(self.checkpoint)
            return super().read_data(plan, planner)
