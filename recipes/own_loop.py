"""A training loop without Megatron's argument parser, saving with megatron_datastates.

    torchrun --nproc-per-node 2 recipes/cpu/run.py recipes/own_loop.py --save CKPT
    torchrun --nproc-per-node 2 recipes/cpu/run.py recipes/own_loop.py --save CKPT --steps 8

The second command resumes where the first stopped. Any program that saves through Megatron-Core's
`torch_dist` strategy (Megatron-Bridge, NeMo, a loop of your own) can use this package in the same way: by one
call of `enable(...)`. The rest is what such a loop does anyway. On a machine with GPUs, leave out
`recipes/cpu/run.py`.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

import megatron_datastates as ds

TOKENS, VOCABULARY = 32, 128


def build_model() -> GPTModel:
    """Builds a tiny GPT, with its tensors split over all ranks."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        tensor_model_parallel_size=dist.get_world_size(),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
    )
    return GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, TOKENS)


def sharded_state(model: GPTModel, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """Returns the state to save: the model's shards, the optimizer's moments of each, and the step."""
    weights = model.sharded_state_dict()
    moments = {}
    for name, parameter in model.named_parameters():
        state, shard = optimizer.state[parameter], weights[name]
        for moment in ("exp_avg", "exp_avg_sq"):
            data = state[moment] if moment in state else torch.zeros_like(parameter)
            moments[f"{moment}.{name}"] = shard.__class__(
                **{**vars(shard), "key": f"optimizer.{moment}.{shard.key}", "data": data}
            )
    return {"model": weights, "optimizer": moments, "step": step}


def load(model: GPTModel, optimizer: torch.optim.Optimizer, directory: Path) -> int:
    """Loads a checkpoint into the model and the optimizer; returns its step."""
    found = dist_checkpointing.load(sharded_state(model, optimizer, 0), str(directory))
    model.load_state_dict(found["model"], strict=False)
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(float(found["step"])),
            "exp_avg": found["optimizer"][f"exp_avg.{name}"],
            "exp_avg_sq": found["optimizer"][f"exp_avg_sq.{name}"],
        }
    return int(found["step"])


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes the tokens and labels of a step, the same on every rank and in every run."""
    tokens = torch.randint(VOCABULARY, (1, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def main(arguments: list[str] | None = None) -> None:
    """Trains, and saves after every step.

    Args:
        arguments: by default those of the command line.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", type=Path, required=True, help="directory of the checkpoints")
    parser.add_argument("--steps", type=int, default=4, help="the last step (default: 4)")
    args = parser.parse_args(arguments)

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(1)
    # The only line about this package. Lazy copies are safe because only the optimizer changes the state.
    ds.enable(lazy=True, staging_memory=64 << 20)

    torch.manual_seed(1)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    queue, begin = AsyncCallsQueue(), 0
    done = sorted(args.save.glob("step_*/metadata.json"))
    if done:
        begin = load(model, optimizer, done[-1].parent)
        print(f"rank {dist.get_rank()}: resumed after step {begin}", flush=True)
    for step in range(begin + 1, args.steps + 1):
        queue.maybe_finalize_async_calls()  # does not wait
        tokens, labels = batch(step)
        positions = torch.arange(TOKENS).unsqueeze(0)
        loss = model(tokens, positions, None, labels=labels).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"rank {dist.get_rank()}: step {step}, loss {loss.item():.6f}", flush=True)
        directory = args.save / f"step_{step:04d}"
        if dist.get_rank() == 0:
            directory.mkdir(parents=True, exist_ok=True)
        request = dist_checkpointing.save(
            sharded_state(model, optimizer, step),
            str(directory),
            TorchDistSaveShardedStrategy(),
            async_sharded_save=True,
        )
        queue.schedule_async_request(request)
    queue.close()  # waits for the last save
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
