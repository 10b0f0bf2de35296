"""Ranks of the tests that compare us with torch_dist on Megatron-Core's own models and optimizers.

A state is saved twice, by our strategy and by Megatron's own, and each checkpoint is loaded into fresh
models of another parallel layout. Both must load the same, bit for bit. What belongs here: building, filling,
saving, loading and comparing. What does not: the choice of models and layouts, which is the tests'.

A *layout* is a dict of TransformerConfig's fields; those that parallel_state knows lay out the ranks.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import precision_aware_adam
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import Float16Module
from other_models import BUILDERS
from saving_rank import join, make_directory, report

from megatron_datastates.mcore import DataStatesSaveStrategy

Layout = dict[str, Any]
SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
TINY = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "gated_linear_unit": True,
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "bf16": True,
    "params_dtype": torch.bfloat16,
    "pipeline_dtype": torch.bfloat16,
    "activation_func": torch.nn.functional.silu,
}
VOCABULARY, DIVISIBLE_BY = 100, 8  # padded to 104 rows with one tensor-parallel rank, to 112 with two
FORMATS = ("ours", "stock")
NOT_DISTRIBUTED = "not distributed"
PRECISION_AWARE, REMAINDERS = "precision-aware ", "remainders "
OFFLOADED = "half offloaded "
LAYER_WISE = "layer-wise"
MUON = "muon"
BUCKETS = " beside buckets"  # what Muon does not train has a distributed optimizer, as in Megatron's loop


@dataclass
class Training:
    """One rank's model chunks and, if it has one, their optimizer."""

    chunks: list[Any]
    optimizer: Any
    metadata: dict[str, Any]
    splits_qkv: bool = False

    def sharded(self, *, is_loading: bool = False) -> dict[str, Any]:
        """Returns the sharded state dict, as Megatron's training loop makes it."""
        names = ["model"] if len(self.chunks) == 1 else [f"model{i}" for i in range(len(self.chunks))]
        state = {
            name: chunk.sharded_state_dict(metadata=self.metadata)
            for name, chunk in zip(names, self.chunks, strict=True)
        }
        if self.splits_qkv:
            state = split_qkv(state)
        if self.optimizer is not None:
            state["optimizer"] = self.optimizer.sharded_state_dict(
                state, is_loading=is_loading, metadata=self.metadata
            )
        return state

    def accept(self, loaded: dict[str, Any]) -> None:
        """Puts what was loaded into the models and the optimizer, as Megatron's training loop does."""
        names = [name for name in loaded if name.startswith("model")]
        for name, chunk in zip(names, self.chunks, strict=True):
            # Such a model refuses what it has stored, and Megatron's loop loads it all the same.
            is_fused = any("linear_qkv_down_proj" in name for name, _ in chunk.named_parameters())
            chunk.load_state_dict(loaded[name], strict=not is_fused)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(loaded["optimizer"])

    def leaves(self) -> dict[str, str]:
        """Returns a digest of everything that training continues with, by name."""
        found = dict(leaves([chunk.state_dict() for chunk in self.chunks], "model"))
        for link, chained in enumerate(getattr(self.optimizer, "chained_optimizers", [self.optimizer])):
            inner = getattr(chained, "optimizer", None)
            groups = inner.param_groups if inner is not None else []
            for number, group in enumerate(groups):
                states = [inner.state[param] for param in group["params"]]
                found |= dict(leaves([group, states], f"optimizer.{link}.{number}"))
        return found


def build(layout: Layout, optimizer: str | None, fill: Callable[[torch.Tensor], None]) -> Training:
    """Builds a model in this layout, fills all its tensors, and adds an optimizer.

    `optimizer` is the sharding type of a distributed one, PRECISION_AWARE, REMAINDERS or OFFLOADED + that,
    LAYER_WISE, NOT_DISTRIBUTED, MUON, or LAYER_WISE + " " + MUON, to which BUCKETS may be added.
    """
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        **{name: layout[name] for name in SIZES if name in layout},
        create_gloo_process_groups=optimizer is not None,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    # States follow the groups; the attention here, which never runs, would refuse context parallelism.
    own = ("tied", "context_parallel_size", "split_qkv", "decoupled_lr", "bucket_size", "model")
    options = {name: value for name, value in layout.items() if name not in own}
    kind_of_config = MLATransformerConfig if options.get("multi_latent_attention") else TransformerConfig
    config = kind_of_config(**(TINY | options))
    stages = layout.get("virtual_pipeline_model_parallel_size")
    chunks: list[Any] = [
        build_chunk(config, None if stages is None else stage, layout.get("tied", False), layout.get("model"))
        for stage in range(stages or 1)
    ]
    wrapped = [Float16Module(config, chunk) for chunk in chunks]
    for chunk in chunks:
        for tensor in (*chunk.parameters(), *chunk.buffers()):
            if tensor.is_floating_point():
                fill(tensor.data)
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    if optimizer is None:
        return Training(chunks, None, metadata | groups)
    has_buckets, optimizer = optimizer.endswith(BUCKETS), optimizer.removesuffix(BUCKETS)
    is_muon = optimizer.endswith(MUON)
    is_distributed = optimizer not in (NOT_DISTRIBUTED, LAYER_WISE) and not is_muon
    kind: dict[str, Any] = {"use_distributed_optimizer": is_distributed}
    bucket_size = layout.get("bucket_size")  # Megatron makes one bucket if it does not overlap
    overlap = {"bucket_size": bucket_size, "overlap_grad_reduce": bucket_size is not None}
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **overlap, **kind)
    if optimizer.startswith(PRECISION_AWARE):
        optimizer = optimizer.removeprefix(PRECISION_AWARE)
        kind |= precision_aware_adam.installed(torch.float16)
    if optimizer.startswith(REMAINDERS):
        optimizer = optimizer.removeprefix(REMAINDERS)
        kind |= precision_aware_adam.installed(torch.float32)
    if optimizer.startswith(OFFLOADED):
        optimizer = optimizer.removeprefix(OFFLOADED)
        kind |= {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True}
        kind |= {"optimizer_offload_fraction": 0.5}
    kind |= {"decoupled_lr": layout.get("decoupled_lr"), "min_lr": 0.0}
    if is_muon:
        kind |= {"use_layer_wise_distributed_optimizer": optimizer.startswith(LAYER_WISE)}
    name = MUON if is_muon else "adam"
    config_of_optimizer = OptimizerConfig(
        optimizer=name, lr=1e-2, bf16=True, params_dtype=torch.bfloat16, **kind
    )
    wrapped = (
        with_buckets(config, ddp, wrapped)
        if has_buckets
        else [DistributedDataParallel(config, ddp, chunk) for chunk in wrapped]
    )
    if has_buckets:
        metadata["distrib_optim_sharding_type"] = "dp_reshardable"
    if is_distributed:
        metadata["distrib_optim_sharding_type"] = optimizer
    if optimizer == LAYER_WISE:
        return Training(chunks, layer_wise(config_of_optimizer, wrapped), metadata | groups)
    made = get_megatron_optimizer(config_of_optimizer, wrapped)
    return Training(chunks, made, metadata | groups, layout.get("split_qkv", False))


def split_qkv(nested: Any) -> Any:
    """Returns a sharded state whose fused QKV weights are stored as three tensors, by Megatron's factory."""
    from megatron.core.ssm.mamba_mixer import _split_tensor_factory

    if isinstance(nested, dict):
        return {name: split_qkv(item) for name, item in nested.items()}
    if not getattr(nested, "key", "").endswith("linear_qkv.weight"):
        return nested
    rows = nested.data.shape[0] // 3
    return _split_tensor_factory(nested, [rows, rows, rows], ["query", "key", "value"], 0)


def with_buckets(config: Any, ddp: DistributedDataParallelConfig, chunks: list[Any]) -> list[Any]:
    """Returns wrapped chunks in which only what Muon does not train is in buckets of a distributed optimizer.

    As `wrap_model_chunks_with_ddp` of Megatron's training loop makes them since 0.19.
    """
    from megatron.core.optimizer import layer_wise_optimizer

    ddp.use_distributed_optimizer = True
    layer_wise_optimizer.tag_params_for_buffer_routing(chunks)
    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    compute = layer_wise_optimizer.LayerWiseDistributedOptimizer.compute_full_param_layout
    layouts = [compute(list(chunk.parameters()), ddp.bucket_size, ranks, ddp) for chunk in chunks]
    return [
        DistributedDataParallel(config, ddp, chunk, full_param_layout=layout)
        for chunk, layout in zip(chunks, layouts, strict=True)
    ]


def layer_wise(config: OptimizerConfig, wrapped: list[Any]) -> Any:
    """Returns an optimizer that gives each rank whole parameters, as Megatron makes it for Muon."""
    from megatron.core.optimizer import (
        _get_megatron_optimizer_based_on_param_groups,
        _get_param_groups,
        get_standard_config_overrides,
    )
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    found = _get_param_groups(wrapped, config, get_standard_config_overrides(config))
    optimizer, init_state = _get_megatron_optimizer_based_on_param_groups(
        config, wrapped, found, skip_megatron_wrapping=True
    )
    own = ProcessGroupCollection.use_mpu_process_groups()
    return LayerWiseDistributedOptimizer([optimizer], config, own, [init_state], wrapped)


def build_chunk(config: TransformerConfig, vp_stage: int | None, tied: bool, model: str | None) -> Any:
    """Builds a chunk of a GPT, or of another model of other_models.py."""
    multiple = DIVISIBLE_BY * config.tensor_model_parallel_size
    vocabulary = -(-VOCABULARY // multiple) * multiple
    if model is not None:
        return BUILDERS[model](config, vocabulary)
    layers = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    mtp = None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False, vp_stage=vp_stage)
    virtual = {"ignore_virtual": False, "vp_stage": vp_stage}
    return GPTModel(
        config,
        layers,
        vocab_size=vocabulary,
        max_sequence_length=16,
        pre_process=parallel_state.is_pipeline_first_stage(**virtual),
        post_process=parallel_state.is_pipeline_last_stage(**virtual),
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
    )


def random_values() -> Callable[[torch.Tensor], None]:
    """Returns a filler whose values differ between ranks and replicas, so that it shows which is stored."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return lambda tensor: tensor.copy_(torch.randn(tensor.shape, generator=generator))


def same_values() -> Callable[[torch.Tensor], None]:
    """Returns a filler whose values are the same in all ranks, as those of replicas are in training."""
    generator = torch.Generator().manual_seed(0)
    return lambda tensor: tensor.copy_(torch.randn(tensor.shape, generator=generator))


def step(training: Training, seed: int | None = None) -> None:
    """Takes one step with random gradients, so that the optimizer has moments.

    They differ between ranks, unless there is a `seed`.
    """
    generator = torch.Generator().manual_seed(100 + dist.get_rank() if seed is None else seed)
    for chunk in training.chunks:
        for param in chunk.parameters():
            param.main_grad.copy_(torch.randn(param.main_grad.shape, generator=generator))
    assert training.optimizer.step()[0]


def leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yields (path, text) of every leaf of nested containers; equal texts mean equal bits."""
    if isinstance(value, dict) and value.get("padding") is True:
        return  # of a bucket: nothing reads it, and torch_dist does not define its content
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from leaves(item, f"{path}.{number}")
    elif isinstance(value, torch.Tensor):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        yield path, f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()}"
    elif isinstance(value, io.BytesIO):
        yield path, value.getvalue().hex()
    elif isinstance(value, float):
        yield path, value.hex()
    else:
        yield path, f"{type(value).__name__} {value!r}"


def strategies(name: str, parallel: bool) -> tuple[Any, Any]:
    """Returns a format's (save, load); `parallel` as with --ckpt-fully-parallel-save and -load."""
    save: Any = DataStatesSaveStrategy() if name == "ours" else TorchDistSaveShardedStrategy("torch_dist", 1)
    load: Any = TorchDistLoadShardedStrategy()
    if parallel:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        save = FullyParallelSaveStrategyWrapper(save, group)
        load = FullyParallelLoadStrategyWrapper(load, group)
    return save, load


def save_both(root: str, layout: Layout, optimizer: str | None = None, parallel: bool = False) -> None:
    """Saves one state in both formats, to ROOT/ours and ROOT/stock."""
    training = build(layout, optimizer, random_values())
    if optimizer is not None:
        step(training)
    for name in FORMATS:
        make_directory(Path(root, name))
        dist.barrier()
        # fully_reshardable gathers into fresh memory each time, from the same values.
        dist_checkpointing.save(training.sharded(), str(Path(root, name)), strategies(name, parallel)[0])
    written = {name: {path.suffix for path in Path(root, name).iterdir()} for name in FORMATS}
    assert ".manifest" in written["ours"] and ".distcp" not in written["ours"], written
    assert ".distcp" in written["stock"] and ".manifest" not in written["stock"], written


def load_both(
    root: str, layout: Layout, optimizer: str | None = None, parallel: bool = False
) -> dict[str, str]:
    """Loads both into models that differ everywhere; returns the state after the load, the same for both."""
    became = {}
    for name, before in zip(FORMATS, (3.0, 5.0), strict=True):
        training = build(layout, optimizer, lambda tensor, before=before: tensor.fill_(before))
        loaded = dist_checkpointing.load(
            training.sharded(is_loading=True), str(Path(root, name)), strategies(name, parallel)[1]
        )
        found = dict(leaves(loaded, "loaded"))
        training.accept(loaded)
        became[name] = found | training.leaves()
    ours, stock = became["ours"], became["stock"]
    unequal = [path for path in sorted(ours.keys() | stock.keys()) if ours.get(path) != stock.get(path)]
    lines = [f"{path}: {ours.get(path)}, torch_dist loads {stock.get(path)}" for path in unequal]
    assert not unequal, f"loaded into {layout}: " + "\n".join(lines[:20])
    return stock


def resume(root: str, layout: Layout, optimizer: str, folder: str) -> None:
    """Takes two steps, saving ours after the first; a fresh training takes the second from what was saved."""
    join()
    whole = build(layout, optimizer, same_values())
    step(whole, seed=1)
    make_directory(Path(root))
    dist.barrier()
    dist_checkpointing.save(whole.sharded(), root, strategies("ours", False)[0])
    step(whole, seed=2)
    resumed = build(layout, optimizer, lambda tensor: tensor.fill_(3.0))
    loaded = dist_checkpointing.load(resumed.sharded(is_loading=True), root, strategies("ours", False)[1])
    resumed.accept(loaded)
    step(resumed, seed=2)
    truth, became = whole.leaves(), resumed.leaves()
    unequal = sorted(key for key in truth.keys() | became.keys() if truth.get(key) != became.get(key))
    report(folder, unequal=unequal, compared=sorted(truth))


def reshard(root: str, pairs: list[tuple[Layout, list[Layout]]], optimizer: str | None, folder: str) -> None:
    """Saves each first layout and loads it into each of its others; every second pair fully parallel."""
    join()
    loaded = []
    for number, (saved, others) in enumerate(pairs):
        place = str(Path(root, str(number)))
        save_both(place, saved, optimizer, parallel=number % 2 == 1)
        loaded.append(
            [sorted(load_both(place, other, optimizer, parallel=number % 2 == 1)) for other in others]
        )
    report(folder, loaded=loaded)


def save_several(root: str, layouts: list[Layout], optimizer: str | None, folder: str) -> None:
    """Saves a checkpoint of each format and layout, for `load_several` in other ranks."""
    join()
    for number, layout in enumerate(layouts):
        save_both(str(Path(root, str(number))), layout, optimizer)
    report(folder)


def load_several(root: str, layouts: list[Layout], optimizer: str | None, folder: str) -> None:
    join()
    places = [str(Path(root, str(number))) for number in range(len(layouts))]
    loaded = [
        sorted(load_both(place, layout, optimizer)) for place, layout in zip(places, layouts, strict=True)
    ]
    report(folder, loaded=loaded)
