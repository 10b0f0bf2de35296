"""Saves of Megatron-FSDP (`--use-megatron-fsdp`) in Megatron's training loop.

Their state dicts have DTensors. Megatron calls that the format "fsdp_dtensor", and hands it to PyTorch's
distributed checkpoints (DCP): to `dcp.save`, or with --async-save to what an "async strategy" has. With
`--ckpt-format datastates`, DCP only plans which rank stores what, and we save that as any other state. The
checkpoint is one of DCP's in our format, as DataStatesWriter saves them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from megatron_datastates.dcp.facts import Facts
from megatron_datastates.dcp.items import PlannedState
from megatron_datastates.files import path_of
from megatron_datastates.mcore.errors import MegatronSaveFailedError
from megatron_datastates.mcore.hooks.attach import replaced
from megatron_datastates.mcore.save.request import make_request, raise_if_failed
from megatron_datastates.mcore.save.strategy import TrainingSaveStrategy
from megatron_datastates.mcore.training.fsdp_plans import planned
from megatron_datastates.mcore.training.fsdp_shards import gathered_at_once
from megatron_datastates.pipeline.publication import Publication

_NOT_PREPARED = "Megatron-FSDP's state dicts are made anew in every save"


class _Writer(FileSystemWriter):
    """DCP's writer; knows the path that it was given, which may be a URL."""

    def __init__(self, path: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(path, *args, **kwargs)
        self.given = path


class _AsyncWriter:
    """In place of a strategy's FileSystemWriterAsync, whose options are not about our saves."""

    def __init__(self, path: str, use_cpu_shm_for_gpu_tensors: bool = False, **options: Any) -> None:
        self.given = path  # Megatron looks for the other one


@contextlib.contextmanager
def saving(strategy: TrainingSaveStrategy) -> Iterator[None]:
    """Wraps a `save_checkpoint` with Megatron-FSDP: `strategy` saves what DCP has planned.

    Raises:
        SaveFailedError: the ranks could not plan the save, or a synchronous one failed; on all ranks.
    """
    from megatron.training import checkpointing

    trainer = threading.get_ident()
    choose = getattr(checkpointing, "get_async_strategy", None)  # before 0.17, all saves are synchronous

    def save(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        writer = kwargs.get("storage_writer")
        if threading.get_ident() != trainer or not isinstance(writer, _Writer):  # of the program's own
            return state_dict_saver.save(state_dict, *args, **kwargs)
        publication = _start(strategy, state_dict, writer.given, "sync")
        publication.wait()
        raise_if_failed(publication)

    def save_state_dict_async_plan(state_dict: Any, writer: _AsyncWriter, *args: Any, **kwargs: Any) -> Any:
        return _start(strategy, state_dict, writer.given, "async")

    def get_async_strategy(*args: Any, **kwargs: Any) -> Any:
        assert choose is not None
        name, modules = choose(*args, **kwargs)
        ours = {
            "FileSystemWriterAsync": _AsyncWriter,
            "save_state_dict_async_plan": save_state_dict_async_plan,
        }
        return name, modules | ours

    def get_save_and_finalize_callbacks(writer: Any, publication: Publication, *args: Any) -> Any:
        kind = getattr(checkpointing.get_args(), "async_strategy", "mcore")
        return make_request(publication, kind, strategy.options.on_failure)

    with contextlib.ExitStack() as stack:
        if choose is not None:
            for function in (get_async_strategy, get_save_and_finalize_callbacks):
                stack.enter_context(replaced(checkpointing, function.__name__, function))
        stack.enter_context(replaced(dcp, "save", save))
        stack.enter_context(replaced(dcp, "FileSystemWriter", _Writer))
        stack.enter_context(gathered_at_once())
        stack.enter_context(_without_collections())
        yield


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Keeps Python's garbage collector away.

    A save makes tens of thousands of objects, which start collections of all objects of the program: each
    takes longer than the save, and finds nothing, since the save's objects go when it is over.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _start(strategy: TrainingSaveStrategy, state_dict: Any, path: Any, mode: str) -> Publication:
    """Starts a save of what DCP plans. Collective.

    Raises:
        SaveFailedError: DCP could not plan it; on all ranks.
    """
    directory = path_of(path)
    try:
        plan, planner = planned(state_dict)
    except CheckpointException as error:
        message = f"saving to {directory} was not planned, and nothing was written: {error}"
        raise MegatronSaveFailedError(message) from error
    meta = StorageMeta(checkpoint_id=str(directory), save_id=uuid.uuid4().hex)
    # Not the planner: it has the state, and the last save is kept until the next one.
    metadata = getattr(planner, "metadata", None)
    facts = functools.partial(_facts, metadata, meta, trust=strategy.options.trust_objects)
    state = PlannedState(plan, planner, strategy.classifier)
    publication = strategy.start_planned(state, directory, mode, facts)
    publication.not_prepared_because = _NOT_PREPARED
    return publication


def _facts(metadata: Metadata | None, meta: StorageMeta, *, trust: bool) -> bytes:
    """Returns what DCP knows of the state; for the coordinator, rank 0, whose planner has the metadata."""
    assert metadata is not None
    return Facts.of(metadata, meta).encode(str(meta.checkpoint_id), trust=trust)
