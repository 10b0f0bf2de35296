"""Saves of Megatron-FSDP (`--use-megatron-fsdp`) in Megatron's training loop.

Their state dicts have DTensors. Megatron calls that the format "fsdp_dtensor", and hands it to PyTorch's
distributed checkpoints (DCP): to `dcp.save`, or with --async-save to what an "async strategy" has. In both,
DCP plans which rank stores what. With `--ckpt-format datastates`, our save of the plan starts where DCP would
write. The checkpoint is one of DCP's in our format, as DataStatesWriter saves them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from megatron_datastates.dcp.facts import Facts
from megatron_datastates.dcp.items import PlannedState
from megatron_datastates.errors import SaveFailedError
from megatron_datastates.files import path_of
from megatron_datastates.mcore.errors import MegatronSaveFailedError
from megatron_datastates.mcore.hooks.attach import replaced
from megatron_datastates.mcore.save.request import make_request, raise_if_failed
from megatron_datastates.mcore.save.strategy import TrainingSaveStrategy
from megatron_datastates.mcore.training.fsdp_shards import gathered_at_once
from megatron_datastates.pipeline.publication import Publication

_NOT_PREPARED = "Megatron-FSDP's state dicts are made anew in every save"


@contextlib.contextmanager
def saving(strategy: TrainingSaveStrategy) -> Iterator[None]:
    """Wraps a `save_checkpoint` with Megatron-FSDP: what DCP has planned, `strategy` saves.

    Raises:
        SaveFailedError: the ranks could not plan the save, or a synchronous one failed; on all ranks.
    """
    from megatron.training import checkpointing

    choose = getattr(checkpointing, "get_async_strategy", None)  # before 0.17, all saves are synchronous

    class AsyncWriter(_Writer):
        def __init__(self, path: str, use_cpu_shm_for_gpu_tensors: bool = False, **options: Any) -> None:
            super().__init__(strategy, "async", path)  # none of these is about ours; Megatron looks for one

    def get_async_strategy(*args: Any, **kwargs: Any) -> Any:
        assert choose is not None
        name, modules = choose(*args, **kwargs)
        ours = {"FileSystemWriterAsync": AsyncWriter, "save_state_dict_async_plan": _plan}
        return name, modules | ours

    def get_save_and_finalize_callbacks(writer: _Writer, *args: Any) -> Any:
        kind = getattr(checkpointing.get_args(), "async_strategy", "mcore")
        return make_request(writer.publication, kind, strategy.options.on_failure)

    trainer = threading.get_ident()

    class Chosen(FileSystemWriter):
        """Other threads of the program may save with DCP meanwhile."""

        def __new__(cls, path: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == trainer:
                return _Writer(strategy, "sync", path)
            return FileSystemWriter(path, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        if choose is not None:
            for function in (get_async_strategy, get_save_and_finalize_callbacks):
                stack.enter_context(replaced(checkpointing, function.__name__, function))
        stack.enter_context(replaced(dcp, "FileSystemWriter", Chosen))
        stack.enter_context(gathered_at_once())
        try:
            yield
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            ours = next((cause for cause in causes if isinstance(cause, SaveFailedError)), None)
            if ours is not None:
                raise ours from ours.__cause__
            message = f"the save was not planned, and nothing was written: {error}"
            raise MegatronSaveFailedError(message) from error


def _plan(state_dict: Any, writer: _Writer, *args: Any, planner: SavePlanner, **kwargs: Any) -> None:
    save(state_dict, storage_writer=writer, planner=planner)


class _Writer(StorageWriter):
    """Starts a save of what DCP has planned. A synchronous one is published once `write_data` returns.

    Attributes:
        publication: the save, once it has started.
    """

    publication: Publication

    def __init__(self, strategy: TrainingSaveStrategy, mode: str, path: str) -> None:
        self._strategy, self._mode, self._directory = strategy, mode, path_of(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return bool(FileSystemWriter.validate_checkpoint_id(checkpoint_id))

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=str(self._directory), save_id=uuid.uuid4().hex)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Starts the save.

        Raises:
            SaveFailedError: it is a synchronous one, and failed; on all ranks.
        """
        strategy = self._strategy
        state = PlannedState(plan, planner, strategy.classifier)
        # Of the coordinator's planner, which is rank 0's.
        facts = functools.partial(self._facts, getattr(planner, "metadata", None))
        publication = strategy.start_planned(state, self._directory, self._mode, facts)
        publication.not_prepared_because = _NOT_PREPARED
        self.publication = publication
        if self._mode == "sync":
            raise_if_failed(publication, publication.wait())
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def _facts(self, metadata: Metadata | None) -> bytes:
        assert metadata is not None
        found = Facts.of(metadata, self.storage_meta())
        return found.encode(str(self._directory), trust=self._strategy.options.trust_objects)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass  # the save publishes itself
