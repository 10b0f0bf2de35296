"""Ranks of test_loading.py: requests for fewer keys, or other shapes or dtypes, than were saved.

Everything is saved in both formats and requested from both: torch_dist's answer is the expected one.
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from model_ranks import FORMATS, leaves, strategies
from saving_rank import failure_of, join, make_directory, report, set_faults, state

from megatron_datastates import on_report
from megatron_datastates.engine.reader import Reader
from megatron_datastates.errors import DataStatesError
from megatron_datastates.mcore import DataStatesSaveStrategy, enable
from megatron_datastates.mcore.load.state import opened
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.providers import ObjectSource
from megatron_datastates.providers.base import StateReader

ROWS, COLUMNS = 12, 36  # of every global tensor: 1, 2 and 3 ranks can cut them along either axis
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128),
)
Request = Callable[[], dict[str, Any]]


def whole(dtype: torch.dtype) -> torch.Tensor:
    """Returns the global tensor of a dtype, filled with random bits."""
    generator = torch.Generator().manual_seed(DTYPES.index(dtype))
    values = 2 if dtype is torch.bool else 256
    size = ROWS * COLUMNS * dtype.itemsize
    raw = torch.randint(0, values, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(ROWS, COLUMNS)


def shard(key: str, tensor: torch.Tensor, axis: int, **how: Any) -> ShardedTensor:
    """Returns this rank's part of a global tensor that is split along one axis."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = tensor.chunk(ranks, axis)[rank].clone()
    return ShardedTensor.from_rank_offsets(key, data, (axis, rank, ranks), **how)


def blank(key: torch.dtype, dtype: torch.dtype | None = None, rows: int = ROWS, **how: Any) -> ShardedTensor:
    """Requests this rank's columns of a tensor that was saved by rows."""
    return shard(str(key), torch.ones(rows, COLUMNS).to(dtype or key), axis=1, **how)


def load_both(root: str, request: Request) -> list[dict[str, Any]]:
    """Returns what each format loads for a request."""
    return [
        dist_checkpointing.load(request(), str(Path(root, name)), strategies(name, parallel=False)[1])
        for name in FORMATS
    ]


def load_equal(root: str, request: Request) -> dict[str, Any]:
    """Returns what our checkpoint loads, after checking that torch_dist's loads the same."""
    ours, stock = load_both(root, request)
    assert dict(leaves(ours, "")) == dict(leaves(stock, "")), (ours, stock)
    return ours


def assert_columns(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Checks that `found` is this rank's part of `wanted`, bit for bit."""
    columns = wanted.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()
    assert found.dtype == columns.dtype
    assert torch.equal(found.contiguous().view(torch.uint8), columns.view(torch.uint8))


def save_everything(root: str, folder: str) -> None:
    join()
    rank = dist.get_rank()
    for name in FORMATS:
        make_directory(Path(root, name))
        dist.barrier()
        saved: dict[str, Any] = {str(dtype): shard(str(dtype), whole(dtype), axis=0) for dtype in DTYPES}
        saved["rng"] = ShardedObject("rng", [1, 2], (1,), (0,), replica_id=rank)
        saved["iteration"] = 7
        dist_checkpointing.save(saved, str(Path(root, name)), strategies(name, parallel=False)[0])
    report(folder)


def load_some_keys(root: str, folder: str) -> None:
    join()
    one = load_equal(root, lambda: {"any name": blank(torch.float32)})
    assert one.keys() == {"any name", "iteration"}
    assert_columns(one["any name"], whole(torch.float32))
    nested = load_equal(
        root,
        lambda: {
            "model": {"layers": [blank(torch.bfloat16), blank(torch.int64)]},
            "rng": ShardedObject("rng", None, (1,), (0,), replica_id=dist.get_rank()),
        },
    )
    assert_columns(nested["model"]["layers"][0], whole(torch.bfloat16))
    assert_columns(nested["model"]["layers"][1], whole(torch.int64))
    assert nested["rng"] == [1, 2]
    report(folder)


def load_plain(root: str, folder: str) -> None:
    join()
    ours, stock = (dist_checkpointing.load_plain_tensors(str(Path(root, name))) for name in FORMATS)
    assert dict(leaves(ours, "")) == dict(leaves(stock, ""))
    wanted = {str(dtype): whole(dtype) for dtype in DTYPES} | {"iteration": 7}
    assert dict(leaves(ours, "")) == dict(leaves(wanted, ""))
    report(folder)


class Count:
    """A state provider."""

    name = "count"

    def __init__(self) -> None:
        self.value, self.restored = 1, 0

    def entries(self) -> Iterator[ObjectSource]:
        if dist.get_rank() == 0:
            yield ObjectSource("value", self.value)

    def restore(self, reader: StateReader) -> None:
        self.value = reader.read_object("value")
        self.restored += 1


def look_and_load(root: str, folder: str) -> None:
    """Looks at a checkpoint with a state provider, and then loads it, while the run has gone on."""
    join()
    directory, count, found = Path(root), Count(), []
    enable(providers=[count])
    make_directory(directory)
    dist.barrier()
    dist_checkpointing.save(state(3), str(directory), DataStatesSaveStrategy())
    count.value = 1000
    for load in (
        lambda: dist_checkpointing.load_plain_tensors(str(directory)),
        lambda: dist_checkpointing.load_common_state_dict(str(directory)),
        lambda: dist_checkpointing.load(state(-1), str(directory)),
    ):
        load()
        found.append(count.value)
    report(folder, found=found)


def load_in_parallel(root: str, folder: str) -> None:
    """Loads fully parallel, which calls the base strategy once for objects and once for tensors."""
    join()
    directory, count = Path(root), Count()
    enable(providers=[count])
    make_directory(directory)
    dist.barrier()
    dist_checkpointing.save(state(3), str(directory), DataStatesSaveStrategy())
    base = TorchDistLoadShardedStrategy()
    chosen = FullyParallelLoadStrategyWrapper(base)
    dist_checkpointing.load(state(-1), str(directory), chosen)
    report(folder, restored=count.restored, kept=[base.cached_global_metadata, chosen.cached_global_metadata])


def load_copies(root: str, folder: str) -> None:
    """Loads what both ranks request and what one does, in three ways; reports how much how, and of objects.

    They are: as by default, without the metadata of all ranks, and fully parallel.
    """
    join()
    directory = Path(root)
    make_directory(directory)
    dist.barrier()
    own = whole(torch.int64)

    def request() -> dict[str, Any]:
        copy = ShardedTensor.from_rank_offsets("copy", own.clone(), replica_id=dist.get_rank())
        return {"copy": copy, "own": shard("own", own, 0)}

    dist_checkpointing.save(request(), str(directory), DataStatesSaveStrategy())
    checkpoint = Checkpoint.open(directory)
    objects = [checkpoint.object_entry(key)[1].bytes for key in checkpoint.objects]
    read, found = Checkpoint.read, list[int]()

    def noting(self: Checkpoint, scheduled: Any, *others: Any) -> None:
        items = list(scheduled)
        found.extend(item.bytes for item in items if item.through_cache)
        read(self, items, *others)

    Checkpoint.read = noting  # type: ignore[method-assign]
    cached = []
    parallel = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy())
    for chosen, is_validated in ((None, True), (None, False), (parallel, False)):
        blank_request = request()
        for name in ("copy", "own"):
            blank_request[name].data.zero_()
        loaded = dist_checkpointing.load(
            blank_request, str(directory), chosen, validate_access_integrity=is_validated
        )
        assert torch.equal(loaded["copy"], own)
        assert torch.equal(loaded["own"], own.chunk(dist.get_world_size())[dist.get_rank()])
        cached.append(list(found))
        found.clear()
    report(folder, cached=cached, copy=own.nbytes, objects=objects)


def load_other_shapes(root: str, folder: str) -> None:
    """Loads fewer and more rows than were saved: the missing ones are zeros."""
    join()
    for rows in (ROWS - 5, ROWS + 5):
        how = {"rows": rows, "allow_shape_mismatch": True}
        found = load_equal(root, lambda how=how: {"w": blank(torch.int32, **how)})  # type: ignore[misc]
        wanted = torch.zeros((rows, COLUMNS), dtype=torch.int32)
        wanted[:ROWS] = whole(torch.int32)[:rows]
        assert_columns(found["w"], wanted)
    report(folder)


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Makes all NaNs equal: in torch, the bits of a converted NaN depend on its place in memory."""
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not parts.is_floating_point():
        return tensor
    return parts.double().nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=-torch.inf)


def fits(tensor: torch.Tensor, wanted: torch.dtype) -> bool:
    """Returns whether integers stay what they are; True of all other conversions."""
    if any(dtype.is_floating_point or dtype.is_complex for dtype in (tensor.dtype, wanted)):
        return True
    return wanted is torch.bool or torch.equal(tensor.to(wanted).to(torch.int64), tensor.to(torch.int64))


def load_other_dtypes(root: str, folder: str) -> None:
    """Converts every pair of dtypes as torch_dist does, but where torch cannot, or integers do not fit."""
    join()
    converted, refused = [], []
    for stored, wanted in itertools.product(DTYPES, DTYPES):
        request = functools.partial(lambda *pair: {"w": blank(*pair)}, stored, wanted)
        if not fits(whole(stored), wanted):
            error = failure_of(functools.partial(dist_checkpointing.load, request(), str(Path(root, "ours"))))
            assert error is not None and f"has values that {wanted} does not have" in error, error
            refused.append(f"{stored} to {wanted}")
        elif torch.can_cast(stored, wanted):
            ours, stock = (answer["w"] for answer in load_both(root, request))
            assert ours.dtype == stock.dtype == wanted
            assert_columns(numbers(ours), numbers(whole(stored).to(wanted)))
            assert dict(leaves(numbers(ours), "")) == dict(leaves(numbers(stock), "")), (stored, wanted)
            converted.append(f"{stored} to {wanted}")
        else:
            error = failure_of(functools.partial(dist_checkpointing.load, request(), str(Path(root, "ours"))))
            assert error is not None and f"is {str(stored)[6:]} in this checkpoint" in error, error
            refused.append(f"{stored} to {wanted}")
    report(folder, converted=converted, refused=refused)


def load_with_reports(root: str, reports: str, folder: str) -> None:
    """Loads twice, the second time slowly on rank 1, and once more while rank 1 cannot read."""
    join()
    os.environ["MEGATRON_DATASTATES_REPORT_FILE"] = reports
    directory, shown = str(Path(root, "ours")), blank(torch.float32)
    heard: list[dict[str, Any]] = []
    on_report(heard.append)
    dist_checkpointing.load({"w": blank(torch.float32)}, directory)
    if dist.get_rank() == 1:
        read = Reader.read
        Reader.read = lambda *args, **kwargs: (time.sleep(0.5), read(*args, **kwargs))[1]  # type: ignore
    dist_checkpointing.load({"w": blank(torch.float32)}, directory)
    assert [one["rank"] for one in heard] == [dist.get_rank()] * 2, "every rank reports its own times"
    set_faults("read:1:EIO", 1)
    error = failure_of(lambda: dist_checkpointing.load({"w": blank(torch.float32)}, directory))
    assert error is not None
    report(folder, tensor_bytes=shown.data.nbytes, slow=heard[1])


def found_by_load(iteration: int) -> Any:
    """Returns what our `load_checkpoint` returns around one that loads this iteration, or its error."""
    from megatron_datastates.mcore.training.load import wrap_load_checkpoint

    def original() -> tuple[int, int]:
        dist.barrier()  # stands for Megatron's first collective call
        return iteration, 0

    try:
        return wrap_load_checkpoint(original)
    except DataStatesError as error:
        return f"{type(error).__name__}: {error}"


def load_chosen(runs: list[str], forbidden_rank: int, folder: str) -> None:
    """Calls our `load_checkpoint` with --ckpt-step 5 where each rank sees a run of its own.

    `forbidden_rank`: may not look there; -1 for none.
    """
    from megatron.training import global_vars

    rank, _ = join()
    global_vars._GLOBAL_ARGS = SimpleNamespace(
        load=runs[rank], ckpt_step=5, ckpt_backend="datastates", finetune=False
    )
    if rank == forbidden_rank:
        Path.exists = forbidden  # type: ignore[method-assign, assignment]
    report(folder, found=found_by_load(5))


def load_with_near_tiers(run: str, tiers: list[str], folder: str) -> None:
    """Calls our `load_checkpoint` where each node's environment names its near tier, or none."""
    from megatron.training import global_vars

    rank, _ = join()
    global_vars._GLOBAL_ARGS = SimpleNamespace(load=run, ckpt_backend="datastates", finetune=False)
    os.environ |= {"MEGATRON_DATASTATES_NEAR": tiers[rank], "EMPTY": ""}
    report(folder, found=found_by_load(0))


def look_at_format(root: str, folder: str) -> None:
    """Calls our `_load_base_checkpoint` where one rank cannot look into the directory."""
    from megatron_datastates.mcore.training.load import (
        wrap_get_checkpoint_format,
        wrap_load_base_checkpoint,
    )

    rank, _ = join()
    args = SimpleNamespace(ckpt_backend="datastates")

    def format_of(directory: str, args: object) -> str:
        if rank == 1:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), directory)
        return "torch_dist"

    def original(load_dir: str, args: object, rank0: bool) -> str:
        return str(wrap_get_checkpoint_format(format_of, load_dir, args))

    with opened(in_training_loop=True, directory=None):
        error = failure_of(lambda: wrap_load_base_checkpoint(original, root, args, True))
    report(folder, error=error)


def forbidden(path: Path) -> bool:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
