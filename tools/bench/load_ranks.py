"""The ranks of load.py: a world of processes that save and load the same states in either format.

A world imports Megatron once and is then told what to do, job by job. States are made of ShardedTensors with
the shapes of a Llama-like model; every element is a function of its key and its place in the global
tensor, so that any rank can check what it has loaded, in whatever sharding.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import importlib
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import machine
import numpy as np
import torch
import torch.distributed as dist

HIDDEN, FFN, VOCABULARY = 2048, 5632, 32000
LAYER_WEIGHTS = (4 * HIDDEN + 3 * FFN) * HIDDEN
LAYER_BYTES = 6 * LAYER_WEIGHTS  # weights in bfloat16, one state in float32
BUCKET_STATES = 3
SMALL_WEIGHTS = 7  # of a layer
STATES = {"": torch.bfloat16, "optimizer.state.exp_avg.": torch.float32}


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How a state is cut, and so what it is: `data` cuts buckets of an optimizer, the others a model.

    `small`: the model's tensors are small, and each layer's have keys of their own.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 0
    small: bool = False

    @property
    def ranks(self) -> int:
        return self.data or self.tensor * self.pipeline


@dataclasses.dataclass(frozen=True)
class Job:
    """What every rank of a world does."""

    verb: str  # save or load
    directory: str
    sharding: Sharding
    layers: int
    backend: str = ""  # of a save: datastates or torch_dist
    check: bool = False  # compare every element that was loaded
    forget: bool = False  # first, what this process has kept of checkpoints that it read


@dataclasses.dataclass(frozen=True)
class Told:
    """What a rank tells of its job."""

    seconds: float  # from the moment that all ranks began
    bytes: int  # of its tensors
    peak_bytes: int = 0  # growth of resident memory beyond the targets, at its highest
    bytes_read: int = 0  # from disk, as our reader counts them


class World:
    """Processes of one gloo world, ready for jobs."""

    def __init__(self, ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="datastates-world-")
        self._pipes, self._processes = [], []
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            arguments = (rank, ranks, self._folder.name, theirs)
            process = context.Process(target=_serve, args=arguments)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def do(self, job: Job) -> list[Told]:
        """Raises RuntimeError if a rank failed."""
        for pipe in self._pipes:
            pipe.send(job)
        told = [pipe.recv() for pipe in self._pipes]
        failed = [text for text in told if isinstance(text, str)]
        if failed:
            raise RuntimeError(failed[0])
        return told

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it has ended by itself
                pipe.send(None)
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def _serve(rank: int, ranks: int, folder: str, pipe: Connection) -> None:
    warnings.simplefilter("ignore")  # of others' modules, in every load
    if not torch.cuda.is_available():  # torch_dist's save asks for a device
        sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "cpu"))
        importlib.import_module("stand_ins").install()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["MEGATRON_DATASTATES_STAGING_MEMORY"] = "64MiB"  # saves are not what is measured
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    while (job := _next_job(pipe)) is not None:
        try:
            pipe.send(_load(job) if job.verb == "load" else _save(job))
        except Exception as error:
            pipe.send(f"rank {rank}, {job}: {error!r}")
        gc.collect()  # states of gigabytes are held by cycles of DCP's planners
        ctypes.CDLL(None).malloc_trim(0)
    dist.destroy_process_group()


def _next_job(pipe: Connection) -> Job | None:
    try:
        job: Job | None = pipe.recv()
    except EOFError:  # whoever gave the jobs is gone
        return None
    return job


# -- jobs -----------------------------------------------------------------------------------------------


def _save(job: Job) -> Told:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    from megatron_datastates.mcore import DataStatesSaveStrategy

    state = make_state(job.sharding, job.layers)
    for tensor in _tensors(state):
        _fill(tensor)
    Path(job.directory).mkdir(parents=True, exist_ok=True)
    strategy = DataStatesSaveStrategy() if job.backend == "datastates" else TorchDistSaveShardedStrategy()
    dist.barrier()
    begin = time.perf_counter()
    dist_checkpointing.save({"state": state, "iteration": 1}, job.directory, strategy)
    return Told(time.perf_counter() - begin, _bytes(state))


def _load(job: Job) -> Told:
    from megatron.core import dist_checkpointing

    from megatron_datastates.mcore.load import opening
    from megatron_datastates.pipeline import load

    if job.forget:
        opening.forget()
        load._decoded.clear()
    state = make_state(job.sharding, job.layers)
    targets = list(_tensors(state))
    for tensor in targets:
        tensor.data.view(torch.uint8).fill_(0xA5)  # resident before anything is measured
    before = machine.status_bytes("VmRSS")
    machine.reset_peak()
    dist.barrier()
    begin = time.perf_counter()
    dist_checkpointing.load({"state": state}, job.directory)
    seconds = time.perf_counter() - begin
    peak = machine.status_bytes("VmHWM") - before
    if job.check:
        for tensor in targets:
            _check(tensor)
    return Told(seconds, _bytes(state), peak, _take_bytes_read(job.directory))


def _take_bytes_read(directory: str) -> int:
    """What loads of it have read from disk; it counts from zero again."""
    from megatron_datastates.mcore.load import opening
    from megatron_datastates.pipeline import runs

    if not runs.is_ours(directory):
        return 0
    checkpoint = opening.open_checkpoint(directory)  # the one that was loaded from is still open
    read, checkpoint.bytes_read = checkpoint.bytes_read, 0
    return read


# -- states ---------------------------------------------------------------------------------------------


def make_state(sharding: Sharding, layers: int) -> dict[str, Any]:
    """This rank's ShardedTensors, their memory not yet filled."""
    rank = dist.get_rank()
    if sharding.data:
        return dict(_buckets(sharding, layers, rank))
    if sharding.small:
        return dict(_small_model(sharding, layers, rank))
    return dict(_model(sharding, layers, rank % sharding.tensor, rank // sharding.tensor))


def _model(sharding: Sharding, layers: int, tensor: int, stage: int) -> Iterator[tuple[str, Any]]:
    mine = range(layers // sharding.pipeline * stage, layers // sharding.pipeline * (stage + 1))
    parts: tuple[tuple[str, tuple[int, int], int, int], ...] = (
        # key, shape, axis that tensor parallelism cuts, shards of one rank (SwiGLU: gate and up)
        ("self_attention.linear_qkv.weight", (3 * HIDDEN, HIDDEN), 0, 1),
        ("self_attention.linear_proj.weight", (HIDDEN, HIDDEN), 1, 1),
        ("mlp.linear_fc1.weight", (2 * FFN, HIDDEN), 0, 2),
        ("mlp.linear_fc2.weight", (HIDDEN, FFN), 1, 1),
    )
    for prefix, dtype in STATES.items():
        for layer, (key, shape, axis, shards) in itertools.product(mine, parts):
            name = f"{prefix}decoder.layers.{key}"
            for shard in range(shards):
                cut = (1 + axis, shard * sharding.tensor + tensor, shards * sharding.tensor)
                local = [size // (cut[2] if d == axis else 1) for d, size in enumerate(shape)]
                yield f"{name}.{layer}.{shard}", _sharded(name, local, dtype, (0, layer, layers), cut)
        norm = f"{prefix}decoder.layers.input_layernorm.weight"
        for layer in mine:
            yield (
                f"{norm}.{layer}",
                _sharded(norm, [HIDDEN], dtype, (0, layer, layers), replica_id=(0, tensor, 0)),
            )
        if stage == 0:
            local = [VOCABULARY // sharding.tensor, HIDDEN]
            name = f"{prefix}embedding.word_embeddings.weight"
            yield name, _sharded(name, local, dtype, (0, tensor, sharding.tensor), prepended=0)


def _small_model(sharding: Sharding, layers: int, rank: int) -> Iterator[tuple[str, Any]]:
    for (prefix, dtype), layer, part in itertools.product(
        STATES.items(), range(layers), range(SMALL_WEIGHTS)
    ):
        name, cut = f"{prefix}decoder.layers.{layer}.weight{part}", (0, rank, sharding.tensor)
        yield name, _sharded(name, [64 // sharding.tensor, 64], dtype, cut, prepended=0)


def _sharded(
    key: str,
    local: Sequence[int],
    dtype: torch.dtype,
    *cuts: tuple[int, int, int],
    prepended: int = 1,
    replica_id: Any = 0,
) -> Any:
    from megatron.core.dist_checkpointing import ShardedTensor

    memory = torch.empty(tuple(local), dtype=dtype)
    return ShardedTensor.from_rank_offsets(
        key, memory, *cuts, replica_id=replica_id, prepend_axis_num=prepended
    )


def _buckets(sharding: Sharding, layers: int, rank: int) -> Iterator[tuple[str, Any]]:
    """One bucket a layer, as `dp_reshardable` saves them: a rank's part of it, cut where parameters end."""
    from megatron.core.dist_checkpointing import ShardedTensor

    sizes = [3 * HIDDEN * HIDDEN, HIDDEN * HIDDEN, 2 * FFN * HIDDEN, FFN * HIDDEN, HIDDEN]
    ends = list(itertools.accumulate(sizes))
    share = -(-ends[-1] // (64 * sharding.data)) * 64  # the last rank's is padded
    begin, end = min(rank * share, ends[-1]), min((rank + 1) * share, ends[-1])
    cuts = [begin, *(cut for cut in ends if begin < cut < end), end]
    for bucket, kind in itertools.product(range(layers), range(BUCKET_STATES)):
        key = f"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_{bucket}.state_{kind}"
        for a, b in itertools.pairwise(cuts):
            yield (
                f"{key}.{a}",
                ShardedTensor(
                    key, torch.empty(b - a), torch.float32, (b - a,), (ends[-1],), (a,), None, replica_id=0
                ),
            )


def _tensors(state: dict[str, Any]) -> Iterator[Any]:
    return iter(state.values())


def _bytes(state: dict[str, Any]) -> int:
    return sum(tensor.data.nbytes for tensor in _tensors(state))


def _rows(tensor: Any) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
    """Rows of a shard (integers of its element's size), with what every element has to be."""
    kind = {2: np.int16, 4: np.int32}[tensor.data.element_size()]
    lines = tensor.data.view(getattr(torch, np.dtype(kind).name)).reshape(-1, tensor.local_shape[-1])
    salt = zlib.crc32(tensor.key.encode())
    offsets, shape = tensor.global_offset, tensor.global_shape
    local = (1,) * tensor.prepend_axis_num + tuple(tensor.local_shape)  # Megatron reshapes `data`
    across = np.arange(local[-1], dtype=np.int64) + offsets[-1]
    for line, place in zip(lines, np.ndindex(*local[:-1]), strict=True):
        first = 0
        for at, offset, size in zip(place, offsets, shape, strict=False):
            first = first * size + at + offset
        yield line, ((first * shape[-1] + across) * 2654435761 + salt).astype(kind)


def _fill(tensor: Any) -> None:
    for line, expected in _rows(tensor):
        line.copy_(torch.from_numpy(expected))


def _check(tensor: Any) -> None:
    for line, expected in _rows(tensor):
        if not np.array_equal(line.numpy(), expected):
            raise ValueError(f"{tensor.key} at {tensor.global_offset} was not loaded as it was saved")
