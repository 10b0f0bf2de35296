"""Ranks of test_fences.py: ways in which the source of a slow lazy copy changes.

Each change is made by Megatron's own code, to tensors that hold one value before it and others after it.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
)
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from saving_rank import MCORE_QUEUE, failure_of, join, make_directory, report, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_datastates.config import Options
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.mcore import DataStatesSaveStrategy

# The copy of a rank's state begins at a poll or fence, and takes most of a second.
SLOW = Options(copy_limit=4_000_000, lazy_delay=3600.0)
VALUE, ELEMENTS = 3.0, 300_000


class ThroughPointers(torch.optim.Optimizer):
    """An optimizer that writes as fused ones do, without changing version counters."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for number, param in enumerate(group["params"]):
                version = param._version
                if number % 2:
                    param.data.fill_(-7)
                else:
                    ctypes.memset(param.data_ptr(), 0x40, param.numel() * param.element_size())
                assert param._version == version


def parameters(count: int = 2, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    found = []
    for _ in range(count):
        param = torch.nn.Parameter(torch.full((ELEMENTS,), VALUE, dtype=dtype))
        param.main_grad = torch.ones_like(param)  # type: ignore[attr-defined]
        param.grad = torch.ones_like(param)
        param.tensor_model_parallel = False  # type: ignore[attr-defined]
        found.append(param)
    return found


def config(**changes: Any) -> OptimizerConfig:
    return OptimizerConfig(optimizer="adam", lr=0.5, clip_grad=0.0, **changes)


def plain(kind: Callable[..., torch.optim.Optimizer]) -> tuple[list[torch.nn.Parameter], Callable[[], Any]]:
    params = parameters()
    return params, FP32Optimizer(kind(params), config(), lambda *_: None).step


def adam(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.5)


def mixed() -> tuple[list[torch.nn.Parameter], Callable[[], Any]]:
    params = parameters(dtype=torch.bfloat16)
    return params, Float16OptimizerWithFloat16Params(
        adam(params), config(bf16=True, params_dtype=torch.bfloat16), None, lambda *_: None
    ).step


def fsdp2() -> tuple[list[torch.Tensor], Callable[[], Any]]:
    """Returns what a rank has of a model of FSDP2's, and a whole iteration, which also gathers it twice."""
    model = torch.nn.Sequential(torch.nn.Linear(600, 1000, False), torch.nn.Linear(1000, 600, False))
    for whole in model.bfloat16().parameters():
        torch.nn.init.constant_(whole, VALUE)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    params = list(model.parameters())
    for param in params:
        param.tensor_model_parallel = False  # type: ignore[attr-defined]
    optimizer = Float16OptimizerWithFloat16Params(
        adam(params), config(bf16=True, params_dtype=torch.bfloat16), None, lambda *_: None
    )

    def iterate() -> Any:
        model(torch.ones(1, 600, dtype=torch.bfloat16)).sum().backward()
        return optimizer.step()

    return [param.to_local().detach() for param in params], iterate


def chained() -> tuple[list[torch.nn.Parameter], Callable[[], Any]]:
    parallel_state.initialize_model_parallel()
    params = parameters()
    links = [FP32Optimizer(adam([param]), config(), lambda *_: None) for param in params]
    for link in links:
        link.grad_stats_parallel_group = dist.group.WORLD
    return params, ChainedOptimizer(links).step


def hybrid() -> tuple[list[torch.nn.Parameter], Callable[[], Any]]:
    """Returns an optimizer that steps pinned copies of the parameters on the host."""
    params = parameters()
    with pretended_device(params):
        optimizer = HybridDeviceOptimizer(
            [{"params": params}],
            offload_fraction=1.0,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=torch.optim.AdamW,
            overlap_cpu_optimizer_d2h_h2d=False,
            pin_cpu_grads=False,
            lr=0.5,
        )
    copies = [
        param
        for inner in optimizer.cpu_optimizers
        for group in inner.param_groups
        for param in group["params"]
    ]
    return copies, FP32Optimizer(optimizer, config(), lambda *_: None).step


def layer_wise() -> tuple[list[torch.nn.Parameter], Callable[[], Any]]:
    """Returns an optimizer with one parameter, owned by rank 0; rank 1 only receives the new values."""
    parallel_state.initialize_model_parallel()
    params = parameters(1)
    optimizer = LayerWiseDistributedOptimizer(
        [FP32Optimizer(adam(params), config(), lambda *_: None)],
        config(),
        ProcessGroupCollection.use_mpu_process_groups(),
    )
    # NCCL gathers parts of unequal sizes, gloo does not.
    torch.distributed.all_gather = _gather_unequal
    return params, optimizer.step


def _gather_unequal(parts: list[torch.Tensor], own: torch.Tensor, group: Any = None) -> None:
    for rank, part in enumerate(parts):
        dist.broadcast(part, rank)


def graph_replay() -> tuple[list[torch.nn.Parameter], Callable[[], Any]]:
    """Returns an optimizer captured in a CUDA graph, whose replay calls no Python."""
    from megatron.core.optimizer.optimizer_cuda_graph import OptimizerCudaGraphWrapper

    params = parameters()
    wrapper = OptimizerCudaGraphWrapper(lambda: None)
    replay = ThroughPointers(params)
    OptimizerCudaGraphWrapper.curr_iteration = 5  # later than the iteration of the capture
    OptimizerCudaGraphWrapper.cuda_graph = SimpleNamespace(
        replay=type(replay).step.__wrapped__.__get__(replay)
    )
    return params, wrapper


def optimizer_offload() -> tuple[list[torch.nn.Parameter], Callable[[], Any]]:
    """Offloads an optimizer, whose freed memory torch's allocator may then reuse."""
    params = parameters()
    optimizer = FP32Optimizer(adam(params), config(), lambda *_: None)

    def offload() -> list[torch.Tensor]:
        freed = [param.data for param in params]
        with pretended_device(params):
            optimizer.offload_to_cpu()
        assert not {param.data_ptr() for param in params} & {memory.data_ptr() for memory in freed}
        return [memory.fill_(-7) for memory in freed]

    return params, offload


@contextlib.contextmanager
def pretended_device(tensors: list[torch.nn.Parameter]) -> Iterator[None]:
    """Makes these tensors claim to be CUDA tensors, which are copied when moved to the host."""
    real, on_device = torch.Tensor.cpu, {id(tensor) for tensor in tensors}
    torch.Tensor.is_cuda = property(lambda self: id(self) in on_device)  # type: ignore[assignment,misc]
    torch.Tensor.cpu = torch.Tensor.clone  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        del torch.Tensor.is_cuda
        torch.Tensor.cpu = real  # type: ignore[method-assign]


def buffer_offload() -> tuple[list[torch.nn.Parameter], Callable[[], Any]]:
    """Offloads the buffer that parameters are views of: its storage is resized to zero, then refilled."""
    whole = torch.full((2 * ELEMENTS,), VALUE)
    params = [torch.nn.Parameter(part) for part in whole.chunk(2)]
    buffer = object.__new__(_ParamAndGradBuffer)
    buffer.param_data, buffer.param_data_cpu, buffer.grad_data = whole, torch.full_like(whole, -7), None
    buffer.grad_data_size = 0

    def offload() -> None:
        buffer.offload_to_cpu()
        buffer.param_data_cpu.fill_(-7)
        buffer.reload_from_cpu()

    return params, offload


def staging() -> tuple[list[torch.nn.Parameter], Callable[[], Any]]:
    """Makes FP8 parameters as before 0.19, whose new values reach their buffer only in the next iteration."""
    whole = torch.full((2 * ELEMENTS,), VALUE)
    params = [torch.nn.Parameter(part) for part in whole.chunk(2)]
    ranges = {
        id(param): SimpleNamespace(start=n * ELEMENTS, end=(n + 1) * ELEMENTS)
        for n, param in enumerate(params)
    }
    optimizer = object.__new__(DistributedOptimizer)
    optimizer.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
    optimizer.model_float16_groups = [params]
    optimizer.shard_fp32_from_float16_groups = [[torch.full((ELEMENTS,), -7.0) for _ in params]]
    optimizer.model_param_gbuf_map = dict.fromkeys(params, (0, None, 0))
    optimizer.buffers = [SimpleNamespace(buckets=[SimpleNamespace(param_data=whole)])]
    optimizer._get_model_param_range_map = lambda param: {"gbuf_world_in_bucket": ranges[id(param)]}
    return params, lambda: optimizer._copy_main_params_to_param_buffer()


def loading(formats: str) -> tuple[list[torch.nn.Parameter], Callable[[], Any]]:
    """Loads into the tensors that are being saved."""
    directory = Path(ROOT[0], "earlier")
    other = parameters()
    for param in other:
        param.data.fill_(-7)
    save(directory, sharded(other), DataStatesSaveStrategy() if formats == "ours" else None, "sync")
    params = parameters()
    return params, lambda: dist_checkpointing.load(sharded(params), str(directory))


ROOT: list[str] = []
CHANGES: dict[str, Callable[[], tuple[Sequence[torch.Tensor], Callable[[], Any]]]] = {
    "torch": lambda: plain(adam),
    "through pointers": lambda: plain(ThroughPointers),
    "mixed precision": mixed,
    "FSDP2": fsdp2,
    "chained": chained,
    "hybrid": hybrid,
    "layer-wise": layer_wise,
    "graph replay": graph_replay,
    "optimizer offload": optimizer_offload,
    "buffer offload": buffer_offload,
    "staging": staging,
    "load": lambda: loading("ours"),
    "load of torch_dist": lambda: loading("stock"),
}


def sharded(params: Sequence[torch.Tensor]) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return {
        str(number): ShardedTensor.from_rank_offsets(str(number), param, (0, rank, ranks), replica_id=0)
        for number, param in enumerate(params)
    }


def change_during_slow_copy(directory: str, change: str, fenced: bool, folder: str) -> None:
    """Saves, changes everything being saved, and reports what the checkpoint holds."""
    join()
    ROOT[:] = [directory]
    params, act = CHANGES[change]()
    place = Path(directory, "saved")
    make_directory(place)
    strategy = DataStatesSaveStrategy(assume_immutable=True, options=SLOW)
    request = dist_checkpointing.save(
        sharded(params), str(place), strategy, async_sharded_save=True, **MCORE_QUEUE
    )
    job = request.async_fn.publication.save
    at_return = job.times()["staging"]
    if not fenced:
        FENCE.wait = lambda reason: None  # type: ignore[method-assign]
    freed = act()
    watched = freed if isinstance(freed, list) else params
    fence = job.fence_seconds
    error = failure_of(request.execute_sync)
    same = None
    if error is None:
        loaded = dist_checkpointing.load(
            sharded([torch.nn.Parameter(torch.zeros_like(param.detach())) for param in params]), str(place)
        )
        same = all(bool((found == VALUE).all()) for found in loaded.values())
    report(
        folder,
        lazy=at_return == 0,
        fence=fence,
        changed=[bool((tensor != VALUE).all()) for tensor in watched],
        error=error,
        published=(place / "datastates.manifest").exists(),
        same=same,
    )
