"""A small state of which every byte follows from the iteration, and which iteration a load has found.

What belongs here: the state, asking for it through Megatron and through our reader, and the oracle, which
compares bytes with what they are computed from, knows no checksum and does not ask `verify`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

from megatron_datastates.pipeline.loading.load import Checkpoint
from tests.faults.campaign.specimens import RANKS

COMMON = "common_state/shard_0_1"  # where our strategy keeps the common state since Megatron 0.19
State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Kind:
    """One tensor. Cut along `axis` into a shard for each rank; without one, each rank has all of it."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    axis: int | None = None


# More than a block of 1 MiB in rank 0's file, many small tensors, shards that lie in rows and in columns.
KINDS: dict[str, tuple[Kind, ...]] = {
    "usual": (
        Kind("weight", torch.float32, (8, 1000), 0),
        Kind("columns", torch.float16, (64, 66), 1),
        Kind("large", torch.int16, (580_001,)),
        Kind("wide", torch.float64, (2, 33), 0),
        Kind("bytes", torch.uint8, (2, 77), 0),
        Kind("flags", torch.bool, (10,)),
        Kind("eighth", torch.float8_e4m3fn, (2, 40), 0),
        Kind("complex", torch.complex64, (3,)),
        Kind("numbers", torch.int64, (5,)),
        Kind("scalar", torch.bfloat16, ()),
    ),
    "other": (
        Kind("weight", torch.float32, (10, 900), 0),
        Kind("columns", torch.bfloat16, (66, 64), 1),
        Kind("bytes", torch.uint8, (2, 700), 0),
        Kind("more", torch.int32, (30, 30), 1),
    ),
}


@functools.lru_cache(maxsize=256)
def content(key: str, iteration: int, size: int) -> bytes:
    """Returns bytes that only this key has in this iteration."""
    seed = zlib.crc32(key.encode()) << 32 | iteration
    return np.random.Generator(np.random.Philox(key=seed)).bytes(size)


def element_bytes(kind: Kind, iteration: int) -> bytes:
    """Returns the bytes of the whole tensor's elements, in row-major order."""
    data = content(kind.key, iteration, math.prod(kind.shape) * kind.dtype.itemsize)
    return bytes(byte & 1 for byte in data) if kind.dtype is torch.bool else data


def whole(kind: Kind, iteration: int) -> torch.Tensor:
    data = np.frombuffer(bytearray(element_bytes(kind, iteration)), np.uint8)
    return torch.from_numpy(data).view(kind.dtype).reshape(kind.shape)


def thing(name: str, iteration: int) -> State:
    """Returns what an object holds."""
    array = np.frombuffer(bytearray(content(f"array of {name}", iteration, 800)), "<u4").reshape(20, 10)
    tensor = torch.from_numpy(
        np.frombuffer(bytearray(content(f"tensor of {name}", iteration, 400)), "<i4").copy()
    )
    text = content(f"text of {name}", iteration, 300).hex()
    return {
        "iteration": iteration,
        "name": name,
        "array": array,
        "tensor": tensor,
        "text": [text, None, (1.5,)],
    }


def is_thing(found: Any, name: str, iteration: int) -> bool:
    wanted = thing(name, iteration)
    if not isinstance(found, dict) or found.keys() != wanted.keys():
        return False
    array, tensor = found["array"], found["tensor"]
    return bool(
        isinstance(array, np.ndarray)
        and (array.dtype, array.shape) == (wanted["array"].dtype, wanted["array"].shape)
        and array.tobytes() == wanted["array"].tobytes()
        and isinstance(tensor, torch.Tensor)
        and tensor.dtype == wanted["tensor"].dtype
        and torch.equal(tensor, wanted["tensor"])
        and all(found[part] == wanted[part] for part in ("iteration", "name", "text"))
    )


def names_of_objects() -> list[str]:
    return ["shared", *(f"own{rank}" for rank in range(RANKS))]


def sharded_state(iteration: int, layout: str, ranks: int, rank: int) -> State:
    """Returns what a rank of so many saves, or asks for; Megatron takes it."""
    state: State = {}
    for kind in KINDS[layout]:
        data = whole(kind, iteration)
        if kind.axis is None:
            state[kind.key] = ShardedTensor.from_rank_offsets(kind.key, data, replica_id=rank)
        else:
            part = data.chunk(ranks, kind.axis)[rank].contiguous()
            state[kind.key] = ShardedTensor.from_rank_offsets(kind.key, part, (kind.axis, rank, ranks))
    state["shared"] = ShardedObject("shared", thing("shared", iteration), (1,), (0,), replica_id=rank)
    for n in range(rank * RANKS // ranks, (rank + 1) * RANKS // ranks):
        state[f"own{n}"] = ShardedObject("own", thing(f"own{n}", iteration), (RANKS,), (n,))
    return state | {"iteration": iteration, "common": thing("common", iteration)}


# -- loads of one process -------------------------------------------------------------------------------


def join_alone() -> None:
    """Makes a process group of this process only, which Megatron's load needs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def load_by_megatron(directory: Path, layout: str) -> State:
    """Its public load, into memory that no iteration has. What is there afterwards is loaded or is wrong."""
    blank = sharded_state(0, layout, 1, 0)
    for kind in KINDS[layout]:
        blank[kind.key].data.view(-1).view(torch.uint8).fill_(1)
    return dict(dist_checkpointing.load(blank, str(directory)))


def load_by_reader(checkpoint: Checkpoint) -> State:
    """Returns all that is in the checkpoint, by our own reader, in the form of `load_by_megatron`."""
    keys = list(checkpoint.index.tensors)
    tensors = checkpoint.read_tensors([(key, None, None) for key in keys])
    return dict(zip(keys, tensors, strict=True)) | named(checkpoint.read_objects(checkpoint.index.objects))


def named(objects: Mapping[str, Any]) -> State:
    """Returns objects that are given by their stored keys in the form of `load_by_megatron`."""
    found = {}
    for key, value in objects.items():
        name, shard, *_ = key.replace("/shard_", " ").split(" ")
        if key == COMMON:
            found |= value[0]
        else:
            found[name + shard.split("_")[0] if name == "own" else name] = value[0]
    return found


# -- the oracle -----------------------------------------------------------------------------------------


def iteration_of(found: State, candidates: Iterable[tuple[int, str]]) -> int | None:
    """Returns which (iteration, layout) a state is, bit for bit; None if it is none of them."""
    return next((n for n, layout in candidates if first_difference(found, n, layout) is None), None)


def iterations_of_parts(found: State, candidates: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """Returns, for a message, which iterations each part of a state matches."""
    parts: dict[str, list[int]] = {name: [] for name in found}
    for iteration, layout in candidates:
        dtypes = {kind.key: kind for kind in KINDS[layout]}
        for name, value in found.items():
            if name in dtypes and isinstance(value, torch.Tensor):
                data = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                is_it = data == element_bytes(dtypes[name], iteration)
            else:
                is_it = value == iteration if name == "iteration" else is_thing(value, name, iteration)
            if is_it:
                parts[name].append(iteration)
    return parts


def first_difference(found: State, iteration: int, layout: str) -> str | None:
    """Returns what of a loaded state is not that iteration's."""
    kinds, objects = KINDS[layout], names_of_objects()
    if found.keys() != {*(kind.key for kind in kinds), *objects, "iteration", "common"}:
        return f"its keys are {sorted(found)}"
    for kind in kinds:
        tensor = found[kind.key]
        if not isinstance(tensor, torch.Tensor) or (tensor.dtype, tuple(tensor.shape)) != (
            kind.dtype,
            kind.shape,
        ):
            return f"{kind.key} is {tensor!r}"[:200]
        if tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() != element_bytes(kind, iteration):
            return f"{kind.key} has other bytes"
    if found["iteration"] != iteration:
        return f"its iteration is {found['iteration']!r}"
    wrong = [name for name in [*objects, "common"] if not is_thing(found[name], name, iteration)]
    return f"object {wrong[0]} differs" if wrong else None
