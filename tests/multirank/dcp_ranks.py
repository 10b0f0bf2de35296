"""Ranks of test_dcp.py: FSDP2 and other DTensors on gloo, saved by DCP's own writer and by ours."""

import hashlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from saving_rank import clear_faults, join, report, set_faults
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megatron_datastates.dcp import DataStatesReader, DataStatesWriter
from megatron_datastates.pipeline.loading.load import Checkpoint

warnings.filterwarnings("ignore", category=UserWarning, module="torch")
BATCH = 5


class Net(torch.nn.Module):
    """Has shards of different sizes, ranks with none, a frozen parameter, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(11, 7)
        self.norm = torch.nn.BatchNorm1d(7)
        self.inner = torch.nn.Linear(7, 5)
        self.outer = torch.nn.Linear(5, 3)
        self.table.weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(torch.relu(self.inner(self.norm(self.table(tokens)))))
        return out


def build(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Returns a sharded model, and its optimizer with state."""
    torch.manual_seed(seed)
    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model.inner, model.outer, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for step in range(2):
        train(model, optimizer, seed + step)
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    tokens = torch.randint(0, 11, (BATCH,), generator=torch.Generator().manual_seed(seed))
    model(tokens).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    parameters, optimizers = get_state_dict(model, optimizer)
    return {"model": parameters, "optim": optimizers, "extra": {"step": step, "notes": ["a", {"b": 1.5}]}}


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields all values of nested dictionaries, lists and tuples, with their paths."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{name}/{key}")
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            yield from leaves(item, f"{name}/{at}")
    else:
        yield name, value


def bits(value: Any) -> Any:
    """Returns what two equal values have in common: of tensors, all bits of this rank's part."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return str(value.dtype), tuple(value.shape), hashlib.sha256(data).hexdigest()
    return value


def assert_same(found: Any, wanted: Any) -> None:
    ours, theirs = dict(leaves(found)), dict(leaves(wanted))
    assert ours.keys() == theirs.keys()
    different = [key for key in ours if bits(ours[key]) != bits(theirs[key])]
    assert not different, different


def digest(state: Any) -> str:
    """Returns a digest of the whole state, which every rank computes of full tensors."""
    found = hashlib.sha256()
    for key, value in sorted(leaves(state)):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found.update(repr((key, bits(whole))).encode())
    return found.hexdigest()


def save_fsdp(directory: str, reference: str, folder: str) -> None:
    """Trains, and saves the same state with DCP's writer and with ours."""
    join()
    state = state_of(*build(1), 2)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(reference))
    dcp.save(state, storage_writer=DataStatesWriter(directory))
    report(folder, digest=digest(state), files=sorted(os.listdir(directory)))


def reshard_fsdp(directory: str, reference: str, target: str, folder: str) -> None:
    """Loads the state with this number of ranks from both checkpoints, trains on, saves it again."""
    join()
    reports = []
    for reader in (dcp.FileSystemReader(reference), DataStatesReader(directory)):
        model, optimizer = build(5)
        state = state_of(model, optimizer, 0)
        before = digest(state)
        dcp.load(state, storage_reader=reader)
        assert digest(state) != before
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        loaded = digest(state_of(model, optimizer, state["extra"]["step"]))
        reports.append((state, loaded, model, optimizer))
    (theirs, *_), (ours, loaded, model, optimizer) = reports
    assert_same(ours, theirs)
    dcp.save(ours, storage_writer=DataStatesWriter("/nowhere"), checkpoint_id=target)
    for _, _, each, its_optimizer in reports:
        train(each, its_optimizer, 9)
    assert_same(state_of(model, optimizer, 3), state_of(*reports[0][2:], 3))
    report(folder, digest=loaded)


def save_meshes(directory: str, reference: str, folder: str) -> None:
    """Saves tensors on a mesh of two axes: sharded twice, sharded and replicated, replicated; plain ones."""
    join()
    state = mesh_state(2, 2)
    for writer in (dcp.FileSystemWriter(reference), DataStatesWriter(directory)):
        dcp.save(state, storage_writer=writer)
    stored = [r.read_metadata() for r in (dcp.FileSystemReader(reference), DataStatesReader(directory))]
    for key, known in stored[0].state_dict_metadata.items():
        ours = stored[1].state_dict_metadata[key]
        if hasattr(known, "properties"):
            vars(known.properties).pop("strides", None)  # of torch 2.15, which nothing reads
        for field in ("properties", "size", "chunks"):
            assert getattr(ours, field, None) == getattr(known, field, None), (key, field)
    assert stored[0].state_dict_metadata.keys() == stored[1].state_dict_metadata.keys()
    assert stored[0].planner_data == stored[1].planner_data
    report(folder, files=sorted(os.listdir(directory)))


def load_meshes(directory: str, reference: str, rows: int, columns: int, folder: str) -> None:
    """Loads them on a mesh of another form from both."""
    join()
    found = []
    for reader in (dcp.FileSystemReader(reference), DataStatesReader(directory)):
        state = {key: torch.zeros_like(value) for key, value in mesh_state(rows, columns).items()}
        dcp.load(state, storage_reader=reader)
        found.append(state)
    assert_same(found[1], found[0])
    assert_same(found[1], mesh_state(rows, columns))
    report(folder)


def mesh_state(rows: int, columns: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (rows, columns), mesh_dim_names=("a", "b"))
    whole = torch.arange(7 * 9, dtype=torch.float64).reshape(7, 9)
    placements = {
        "both": (Shard(0), Shard(1)),
        "twice": (Shard(0), Shard(0)),
        "hybrid": (Replicate(), Shard(0)),
        "columns": (Shard(1), Replicate()),
        "replicated": (Replicate(), Replicate()),
    }
    state: dict[str, torch.Tensor] = {
        f"{name}.weight": distribute_tensor(whole + n, mesh, how)
        for n, (name, how) in enumerate(placements.items())
    }
    state["few"] = distribute_tensor(torch.arange(3.0).bfloat16(), mesh, (Shard(0), Shard(0)))
    state["none"] = distribute_tensor(torch.empty(0, 4), mesh, (Shard(0), Replicate()))
    state["plain"], state["scalar"] = torch.arange(10, dtype=torch.int16), torch.tensor(-0.0)
    state["strided"] = (torch.arange(24.0).reshape(4, 6).t()[::2] * (1 - 2j)).conj()
    return state


def failure_of(action: Any) -> list[str]:
    """Returns the texts of the errors in DCP's exception, by rank."""
    try:
        action()
    except CheckpointException as error:
        return [f"{rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()]
    raise AssertionError("no error")


def fail_on_one_rank(directory: str, plan: str, failing: int, folder: str) -> None:
    """Saves, fails to save over it as one rank fails, and saves once more."""
    join()
    writer = DataStatesWriter(directory)
    dcp.save({"w": _sharded(1)}, storage_writer=writer)
    set_faults(plan, failing)
    broken = DataStatesWriter(directory)
    clear_faults()
    texts = failure_of(lambda: dcp.save({"w": _sharded(2)}, storage_writer=broken))
    assert torch.equal(_loaded(directory), _sharded(1).full_tensor())
    left = sorted(os.listdir(directory))
    dist.barrier()
    dcp.save({"w": _sharded(3)}, storage_writer=writer)
    assert torch.equal(_loaded(directory), _sharded(3).full_tensor())
    report(folder, texts=texts, left=left, files=sorted(os.listdir(directory)))


def _sharded(value: int) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.full((8, 1000), float(value)), mesh, (Shard(0),))


def _loaded(directory: str) -> torch.Tensor:
    state = {"w": _sharded(0)}
    dcp.load(state, storage_reader=DataStatesReader(directory))
    return state["w"].full_tensor()


def fail_to_load(directory: str, folder: str) -> None:
    """Loads from a directory without a checkpoint, and from one that is damaged."""
    rank, _ = join()
    dcp.save({"w": _sharded(1)}, storage_writer=DataStatesWriter(directory))
    nothing = failure_of(lambda: _loaded(f"{directory}-not"))
    (path,) = Path(directory).glob("data-00001-*.bin")
    if rank == 0:
        data = bytearray(path.read_bytes())
        data[5000] ^= 1
        path.write_bytes(data)
    dist.barrier()
    damaged = failure_of(lambda: _loaded(directory))
    dist.barrier()
    if rank == 0:
        Path(directory, "datastates.manifest").unlink()
    dist.barrier()
    report(folder, nothing=nothing, damaged=damaged, unpublished=failure_of(lambda: _loaded(directory)))


def load_different_saves(directory: str, folder: str) -> None:
    """Loads where each rank sees another save under the same name, as in directories of nodes."""
    rank, _ = join()
    opening = Checkpoint.open
    for seen in range(2):
        dcp.save({"w": _sharded(seen)}, storage_writer=DataStatesWriter(f"{directory}-{seen}"))
    Checkpoint.open = lambda path, *rest: opening(f"{path}-{rank}", *rest)  # type: ignore[method-assign]
    texts = failure_of(lambda: _loaded(directory))
    Checkpoint.open = lambda path, *rest: opening(f"{path}-1", *rest)  # type: ignore[method-assign]
    assert torch.equal(_loaded(directory), _sharded(1).full_tensor())
    Checkpoint.open = opening  # type: ignore[method-assign]
    assert torch.equal(
        _loaded(f"{directory}-{rank}"), torch.cat([torch.full((4, 1000), float(n)) for n in (0, 1)])
    )
    report(folder, texts=texts)


def async_saves(directory: str, how: str, folder: str) -> None:
    """Saves asynchronously while the state changes and other collective calls run."""
    join()
    writer, kind = DataStatesWriter(directory), AsyncCheckpointerType(how)
    model, optimizer = build(1)
    for step in range(2):
        state = state_of(model, optimizer, step)
        wanted = digest(state)
        saving = dcp.async_save(
            state, checkpoint_id=f"{directory}/{step}", storage_writer=writer, async_checkpointer_type=kind
        )
        train(model, optimizer, step)
        saving.result()
        assert digest(state_of(model, optimizer, step)) != wanted
        found = state_of(*build(5), -1)
        dcp.load(found, storage_reader=DataStatesReader(f"{directory}/{step}"))
        assert digest(found) == wanted
    report(folder)


def some_ranks(directory: str, folder: str) -> None:
    """Saves and loads on ranks 1 and 2 of 3, and then on rank 2 alone."""
    rank, _ = join()
    group = dist.new_group([1, 2])
    if rank:
        state = {"mine": torch.arange(5.0), f"of {rank}": torch.full((3,), float(rank)), "n": 4}
        dcp.save(state, storage_writer=DataStatesWriter(directory), process_group=group)
        blank = {key: torch.zeros_like(v) if isinstance(v, torch.Tensor) else 0 for key, v in state.items()}
        dcp.load(blank, storage_reader=DataStatesReader(directory), process_group=group)
        assert_same(blank, state)
    dist.barrier()
    if rank == 2:
        dcp.save({"w": torch.ones(3)}, storage_writer=DataStatesWriter(f"{directory}-alone"), no_dist=True)
        alone = {"w": torch.zeros(3)}
        dcp.load(alone, storage_reader=DataStatesReader(f"{directory}-alone"), no_dist=True)
        assert torch.equal(alone["w"], torch.ones(3))
    report(folder)


def one_tensor(directory: str, folder: str) -> None:
    """Saves what one rank alone has to store: DCP's planner leaves replicas out on the others."""
    join()
    dcp.save({"w": torch.arange(4.0)}, storage_writer=DataStatesWriter(directory))
    into = {"w": torch.zeros(4)}
    dcp.load(into, storage_reader=DataStatesReader(directory))
    assert_same(into["w"], torch.arange(4.0))
    assert sum(name.startswith("data-") for name in os.listdir(directory)) == 1
    report(folder)


def planners(directory: str, folder: str) -> None:
    """Saves with a planner that caches its plans, and with one that does not flatten."""
    join()
    for step, name in enumerate(("a", "b", "a")):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        state = {"w": _sharded(step), "step": step}
        dcp.save(state, storage_writer=DataStatesWriter(f"{directory}/{name}"), planner=planner)
        blank = {"w": _sharded(9), "step": 9}
        dcp.load(blank, storage_reader=DataStatesReader(f"{directory}/{name}"))
        assert_same(blank, {"w": _sharded(step), "step": step})
    state = {"w": _sharded(4), "inner": {"list": [1, torch.ones(2)]}}
    writer = DataStatesWriter(f"{directory}/flat")
    dcp.save(state, storage_writer=writer, planner=DefaultSavePlanner(flatten_state_dict=False))
    blank = {"w": _sharded(0), "inner": None}
    reader = DataStatesReader(f"{directory}/flat")
    dcp.load(blank, storage_reader=reader, planner=DefaultLoadPlanner(False, False))
    assert_same(blank, state)
    report(folder, files=sorted(os.listdir(f"{directory}/a")))


def uneven_shards(directory: str, reference: str, rows: list[int], saves: bool, folder: str) -> None:
    """Saves, or loads, a DTensor of Megatron-FSDP's, of which each rank has any number of rows."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
        preprocess_state_dict_for_uneven_dtensor,
    )

    rank, ranks = join()
    whole = torch.arange(sum(rows) * 4.0).reshape(-1, 4)
    own = whole.split(rows)[rank].clone()
    found = []
    for writer, reader in (
        (dcp.FileSystemWriter(reference), dcp.FileSystemReader(reference)),
        (DataStatesWriter(directory), DataStatesReader(directory)),
    ):
        tensor = DTensor.from_local(
            own if saves else torch.zeros_like(own),
            init_device_mesh("cpu", (ranks,)),
            (Shard(0),),
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
        state = preprocess_state_dict_for_uneven_dtensor({"model": {"w": tensor}, "iteration": 3})
        if saves:
            dcp.save(state, storage_writer=writer)
        else:
            dcp.load(state, storage_reader=reader)
            assert torch.equal(state["model"]["w"].to_local(), own)
        found.append(state)
    assert_same(*found)
    report(folder)


def die(directory: str, plan: str, dying: int, folder: str) -> None:
    """Saves, and saves over it; one rank is killed in the middle."""
    join()
    dcp.save({"w": _sharded(1)}, storage_writer=DataStatesWriter(directory))
    set_faults(plan, dying)
    dcp.save({"w": _sharded(2)}, storage_writer=DataStatesWriter(directory))


def load_value(directory: str, value: int, folder: str) -> None:
    join()
    assert torch.equal(_loaded(directory), _sharded(value).full_tensor())
    dcp.save({"w": _sharded(3)}, storage_writer=DataStatesWriter(directory))
    assert torch.equal(_loaded(directory), _sharded(3).full_tensor())
    report(folder)
