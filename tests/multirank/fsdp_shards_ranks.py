"""Ranks that find out where the shards of Megatron-FSDP's tensors lie."""

import random
from typing import Any

import torch
import torch.distributed as dist
from restart_ranks import begin_anew
from saving_rank import join, report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from megatron_datastates.pipeline.publishing import collectives


def shards_at_once(folder: str) -> None:
    """Compares where shards lie with what Megatron-FSDP finds out tensor by tensor. On four ranks."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
        gather_and_compute_chunk_metadata,
    )

    from megatron_datastates.mcore.training.fsdp_shards import chunks_of

    rank, _ = join()
    line, grid = (
        init_device_mesh("cpu", (4,)),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "dp")),
    )
    ordered = init_device_mesh("cpu", (2, 2))
    ordered._shard_order = [1, 0]  # type: ignore[attr-defined]
    sharded = [
        (line, [Shard(0)]),
        (line, [Shard(1)]),
        (line, [Replicate()]),
        (grid, [Replicate(), Shard(0)]),
        (grid, [Shard(0), Shard(0)]),
        (grid, [Shard(1), Shard(0)]),
        (grid, [_StridedShard(0, split_factor=2), Shard(0)]),
        (grid, [Shard(0), _StridedShard(0, split_factor=2)]),
        (ordered, [Shard(0), Shard(0)]),
    ]
    state: dict[str, Any] = {"model": {}, "optimizer": {"state": {}}, "iteration": 3}
    sizes, whole = random.Random(rank), {"shape": torch.Size([9, 9]), "stride": (9, 1)}
    for number, (mesh, placements) in enumerate(sharded):
        for name in (f"b{number}", f"a{number}"):
            local = torch.zeros(sizes.randrange(4), sizes.randrange(4))
            tensor = DTensor.from_local(local, mesh, placements, run_check=False, **whole)
            state["model"][name] = tensor
            if name.startswith("a"):
                state["optimizer"]["state"][name] = {"exp_avg": tensor.detach().clone(), "step": 1}
    found = chunks_of(state)
    tensors = [*state["model"].values(), *(one["exp_avg"] for one in state["optimizer"]["state"].values())]
    assert len(found) == len(tensors) == 27
    for tensor in tensors:
        expected, chunk = gather_and_compute_chunk_metadata(tensor), found[id(tensor)]
        assert (tuple(chunk.offsets), tuple(chunk.sizes)) == (expected.offsets, expected.sizes)
    report(folder, offsets=[list(found[id(tensor)].offsets) for tensor in tensors])


def shards_that_a_rank_lacks(folder: str) -> None:
    """A rank without elements of a parameter may have no state of it at all."""
    from megatron_datastates.mcore.training.fsdp_shards import chunks_of

    rank, ranks = join()
    mesh, rows = init_device_mesh("cpu", (ranks,)), [2, 0, 3][rank]

    def tensor() -> DTensor:
        whole = {"shape": torch.Size([5, 2]), "stride": (2, 1)}
        return DTensor.from_local(torch.zeros(rows, 2), mesh, (Shard(0),), run_check=False, **whole)

    state = {"model": {"w": tensor()}, "state": {"w": {"exp_avg": tensor()}} if rows else {}}
    found = chunks_of(state)
    report(folder, offsets=sorted(list(chunk.offsets) for chunk in found.values()))


def shards_of_a_group_that_a_rank_lacks(folder: str) -> None:
    """Of four ranks, two share rows of a grid's first column; the second has no tensor of them."""
    from megatron_datastates.mcore.training.fsdp_shards import chunks_of

    rank, _ = join()
    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    whole = {"run_check": False, "shape": torch.Size([4, 2]), "stride": (2, 1)}
    state = {"w": DTensor.from_local(torch.zeros(1, 2), line, [Shard(0)], **whole)}
    if rank != 2:
        state["v"] = DTensor.from_local(torch.zeros(2, 2), grid, [Shard(0), Replicate()], **whole)
    try:
        found: Any = [list(chunk.offsets) for chunk in chunks_of(state).values()]
    except RuntimeError as error:
        found = str(error)
    report(folder, found=found)


def shards_of_several_groups(folder: str) -> None:
    """One of four ranks has a tensor more, so that it sees the two groups in another order."""
    from megatron_datastates.mcore.training.fsdp_shards import chunks_of

    rank, _ = join()
    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    whole = {"run_check": False, "shape": torch.Size([4, 2]), "stride": (2, 1)}
    state = {
        "v": DTensor.from_local(torch.zeros(2, 2), grid, [Replicate(), Shard(0)], **whole),
        "w": DTensor.from_local(torch.zeros(1, 2), line, [Shard(0)], **whole),
    }
    if rank == 3:
        state["a"] = DTensor.from_local(torch.zeros(0, 2), line, [Shard(0)], **whole)
    found = chunks_of(state)
    report(folder, offsets=[list(found[id(state[name])].offsets) for name in "vw"])


def shards_in_later_calls(folder: str) -> None:
    """Finds out again and again where shards lie, and reports what it took. On four ranks."""
    from megatron_datastates.mcore.training import fsdp_shards

    gathered: list[bytes] = []
    agreed: list[int] = []

    def gather_objects(value: bytes, group: dist.ProcessGroup | None = None) -> list[Any]:
        if group is not None:  # not the world, in which ranks compare their groups
            gathered.append(value)
        return original(value, group)

    def max_now(values: list[int]) -> list[int]:
        agreed.append(len(values))
        return collectives.max_now(values)

    original, fsdp_shards.gather_objects = fsdp_shards.gather_objects, gather_objects
    fsdp_shards.max_now = max_now
    rank, _ = join()
    calls: dict[str, Any] = {}

    def look(name: str, rows: int = 1, placement: Any = None) -> None:
        """Looks at a tensor sharded over all ranks, and at one sharded over both dimensions of a grid."""
        whole = {"run_check": False, "shape": torch.Size([9, 9]), "stride": (9, 1)}
        tensors = [
            DTensor.from_local(torch.zeros(rows, 2), line, [placement or Shard(0)], **whole),
            DTensor.from_local(torch.zeros(2, 1), grid, [Shard(1), Shard(0)], **whole),
        ]
        gathered.clear()
        agreed.clear()
        try:
            found = fsdp_shards.chunks_of({"w": tensors[0], "v": tensors[1]})
            result: Any = [list(found[id(tensor)].offsets) for tensor in tensors]
        except (RuntimeError, ValueError) as error:
            result = f"{type(error).__name__}: {error}"
        calls[name] = result, sorted(map(len, gathered)), agreed.copy()

    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    look("first")
    look("again")
    look("a rank has more rows", rows=3 if rank == 1 else 1)
    look("again with more rows", rows=3 if rank == 1 else 1)
    look("a rank has no rows", rows=0 if rank == 2 else 1)
    look("a rank fails", placement=Partial() if rank == 1 else None)
    look("after it")
    look("again after it")
    look("a rank fails in another way", placement=Shard(2) if rank == 3 else None)
    look("after that")
    begin_anew("another", [0, 1, 2, 3])
    line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    look("another world")
    look("again there")
    report(folder, calls=calls)
