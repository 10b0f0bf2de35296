"""One rank that makes the model of Megatron's arguments, saves it, or computes what it predicts.

What belongs here: Megatron's end of the comparison with transformers. What does not: choosing architectures,
exporting and comparing. The arguments are parsed, and the model is built, as `pretrain_gpt.py` does.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import argument_utils, get_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.initialize import initialize_megatron

from megatron_datastates.mcore import DataStatesSaveStrategy

SEED = 1234


def build(arguments: list[str]) -> Any:
    """Builds this rank's part of the model."""
    sys.argv = ["pretrain_gpt.py", *arguments]
    args = parse_and_validate_args()
    initialize_megatron()
    config = argument_utils.gpt_config_from_args(get_args() or args)
    config.parallel_output = False
    model = config.get_builder_cls()(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    return model.eval()


def fill(model: Any) -> None:
    """Fills all weights with random numbers; those of norms are around 1, and replicas are equal."""
    generator = torch.Generator().manual_seed(SEED + parallel_state.get_model_parallel_group().rank())
    shared = torch.Generator().manual_seed(SEED)
    for name, tensor in model.named_parameters():
        is_split = getattr(tensor, "tensor_model_parallel", False) or ".experts." in name
        values = torch.randn(tensor.shape, generator=generator if is_split else shared)
        is_norm = tensor.dim() == 1 and name.endswith("weight")
        tensor.data.copy_(1 + 0.3 * values if is_norm else 0.3 * values)


def sharded(model: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """Returns the model's sharded state, with the common state that a load by Megatron's loop reads."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return model.sharded_state_dict(metadata=metadata | {"dp_cp_group": group})


def save(arguments: list[str], root: str, metadata: dict[str, Any]) -> None:
    """Saves a random model in both formats, to ROOT/datastates and ROOT/torch_dist."""
    model = build(arguments)
    fill(model)
    common = {"args": get_args(), "checkpoint_version": 3.0, "iteration": 1}
    strategies = {
        "datastates": DataStatesSaveStrategy(),
        "torch_dist": TorchDistSaveShardedStrategy("torch_dist", 1),
    }
    for name, strategy in strategies.items():
        if dist.get_rank() == 0:
            Path(root, name).mkdir(parents=True)
        dist.barrier()
        state = {"model": sharded(model, metadata), **common}
        dist_checkpointing.save(state, str(Path(root, name)), strategy, content_metadata=metadata)


def predict(
    arguments: list[str], checkpoint: str, tokens: list[list[int]], file: str, metadata: dict[str, Any]
) -> None:
    """Loads a checkpoint into one whole model, and saves its logits to a file."""
    model = build(arguments)
    state = dist_checkpointing.load({"model": sharded(model, metadata)}, checkpoint)
    model.load_state_dict(state["model"])
    batch = torch.tensor(tokens)
    positions = torch.arange(batch.shape[1]).expand_as(batch)
    mask = torch.ones(1, 1, batch.shape[1], batch.shape[1]).triu(1).bool()
    with torch.no_grad():
        logits = model(batch, positions, mask)
    torch.save(logits.float(), file)
