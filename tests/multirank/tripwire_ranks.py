"""Ranks of test_tripwire.py."""

import ctypes
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from saving_rank import assert_loads, failure_of, join, make_directory, report, save, state

import megatron_datastates as ds
from megatron_datastates.config import Options
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.mcore import DataStatesSaveStrategy


def write_early(root: str, begin: int, size: int, options: dict[str, bool], folder: str) -> None:
    """Writes to rank 1's promised tensor, as a fused kernel does, before it is copied."""
    rank, _ = join()
    directory = Path(root, "ck")
    strategy = DataStatesSaveStrategy(
        assume_immutable=True,
        options=Options(lazy_delay=3600.0, slot_size=1 << 20, sample_seed=1, **options),
    )
    make_directory(directory)
    sharded = state(5)
    weight = sharded["weight"].data
    before, version = weight.clone(), weight._version
    request = dist_checkpointing.save(sharded, str(directory), strategy, async_sharded_save=True)
    if rank == 1:
        ctypes.memset(weight.data_ptr() + begin, 0xFF, size)
    error = failure_of(request.execute_sync)
    assert weight._version == version, "the write must not change the version counter"
    assert torch.equal(weight, before) == (rank == 0)
    published = (directory / MANIFEST_NAME).exists()
    save(Path(root, "next"), state(6), strategy, "async")
    assert_loads(Path(root, "next"), 6)
    report(folder, error=error, published=published)


def save_overwritten(directory: str, options: dict[str, bool], folder: str) -> None:
    """Overwrites tensors only after a fence, which raises no alarm."""
    join()
    strategy = DataStatesSaveStrategy(assume_immutable=True, options=Options(slot_size=1 << 20, **options))
    weight = None
    for value in range(3):
        sharded = state(value)
        make_directory(Path(directory, str(value)))
        request = dist_checkpointing.save(
            sharded, str(Path(directory, str(value))), strategy, async_sharded_save=True
        )
        weight = sharded["weight"].data
        ds.fence()
        ctypes.memset(weight.data_ptr(), 0xFF, weight.nbytes)
        request.execute_sync()
        assert_loads(Path(directory, str(value)), value)
    report(folder)
