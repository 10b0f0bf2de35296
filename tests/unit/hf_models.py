"""Small random checkpoints with the keys, shapes and arguments of Megatron's models."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import megatron_datastates as ds
from megatron_datastates.convert.hf.arguments import Arguments, model_arguments, namespace
from megatron_datastates.convert.hf.families import family_of
from megatron_datastates.convert.hf.tensors import EXPERTS, LAYERS, entries
from megatron_datastates.format.directory import COMMON_STATE_KEY
from tests.unit.command import run
from tests.unit.states import SMALL

LLAMA: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 8,
    "ffn_hidden_size": 12,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 4,
    "max_position_embeddings": 32,
    "vocab_size": 11,
    "untie_embeddings_and_output_weights": True,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "position_embedding_type": "rope",
    "swiglu": True,
}
MIXTRAL = LLAMA | {"num_experts": 3, "moe_layer_freq": (1, 1), "moe_ffn_hidden_size": 6}
GPT2 = LLAMA | {
    "num_query_groups": 4,
    "kv_channels": 2,
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "swiglu": False,
    "add_bias_linear": True,
    "add_qkv_bias": True,
}


def arguments(values: dict[str, Any], **others: Any) -> argparse.Namespace:
    """Returns what a training run stores for a model; `others` are stored as they are."""
    stored = namespace(Arguments(**values))
    vars(stored).update(others)
    return stored


def state(stored: argparse.Namespace, *, apart: bool = False) -> dict[str, torch.Tensor]:
    """Returns random weights in bfloat16, with two rows of padding.

    Args:
        apart: each layer and expert has keys of its own, and so have the halves of gated layers, as with
            Megatron's singleton_local_shards.
    """
    a = model_arguments(vars(stored))
    found: dict[str, Any] = {}
    for number, (place, made) in enumerate(entries(family_of(a, vars(stored)).model_type, a)):
        rows = place.shape[0] + (2 if place.padded else 0)
        generator = torch.Generator().manual_seed(number)
        tensor = torch.randn(rows, *place.shape[1:], generator=generator).bfloat16()
        name = place.names[0]
        if place.layer is None:
            found[name] = tensor
        elif apart:
            own = name.replace(EXPERTS, f"{EXPERTS}{place.expert}.") if place.expert is not None else name
            key = f"{LAYERS}{place.layer}.{own}"
            is_gated = a.swiglu and len(made) == 2
            parts = (
                zip((f"{key}_w", f"{key}_v"), tensor.chunk(2), strict=True) if is_gated else [(key, tensor)]
            )
            found |= dict(parts)
        else:
            found.setdefault(LAYERS + name, {}).setdefault(place.layer, []).append(tensor)
    return {key: _stack(one) if isinstance(one, dict) else one for key, one in found.items()}


def _stack(layers: dict[int, list[torch.Tensor]]) -> torch.Tensor:
    each = [torch.stack(layer) if len(layer) > 1 else layer[0] for layer in layers.values()]
    return torch.stack(each)


def save(directory: Path, stored: argparse.Namespace, weights: dict[str, torch.Tensor]) -> Path:
    """Saves a checkpoint, with its common state as Megatron's training loop stores it."""
    common = {"args": stored, "checkpoint_version": 3.0, "iteration": 1}
    ds.save({**weights, COMMON_STATE_KEY: [common]}, directory, **SMALL)
    return directory


def exported(checkpoint: Path, target: Path, *options: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of `datastates export --hf`."""
    code, out, err = run("export", checkpoint, target, "--hf", *options)
    assert code == 0, out + err
    return {name: one for file in target.glob("*.safetensors") for name, one in load_file(file).items()}
