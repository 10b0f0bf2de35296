"""Megatron-Core's models other than plain GPT, for model_ranks.py: a hybrid of Mamba and attention, LLaVA,
and a GPT with multi-latent attention, whose down projections are two parameters or one.

They never run forwards here, so the kernels of `mamba_ssm` and `causal_conv1d` are absent; one norm
has weights. What belongs here: building a chunk of a model. What does not: saving, loading, comparing.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import hybrid_layers
import latent_attention
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec

Absent = dict[str, dict[str, Any]]


class GatedNorm(torch.nn.Module):
    """The weights of `mamba_ssm.ops.triton.layernorm_gated.RMSNorm`, which is a Triton kernel besides."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, *, dtype: torch.dtype, **ignored: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))


def kernel(*arguments: Any) -> None:
    raise AssertionError("no kernel runs in these tests")


MAMBA: Absent = {
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": GatedNorm},
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba_chunk_scan_combined": kernel,
        "mamba_split_conv1d_scan_combined": kernel,
    },
    "einops": {"rearrange": kernel, "repeat": kernel},
}


def install(absent: Absent) -> None:
    """Makes these modules importable, with these contents."""
    for name, contents in absent.items():
        parents = name.split(".")
        for depth in range(1, len(parents) + 1):
            path = ".".join(parents[:depth])
            if path not in sys.modules:
                module = sys.modules[path] = ModuleType(path)
                module.__spec__ = importlib.machinery.ModuleSpec(path, None)
                module.__path__ = []
        vars(sys.modules[name]).update(contents)


def stage_of_pipeline(vp_stage: int | None) -> dict[str, bool]:
    where: dict[str, Any] = {"ignore_virtual": False, "vp_stage": vp_stage}
    return {
        "pre_process": parallel_state.is_pipeline_first_stage(**where),
        "post_process": parallel_state.is_pipeline_last_stage(**where),
    }


def build_hybrid(config: TransformerConfig, vocabulary: int) -> torch.nn.Module:
    """Builds a HybridModel of Mamba mixers, attention and MLPs, of Megatron's local kinds of layers.

    Megatron's own description of such a model asks for Transformer Engine.
    """
    assert "megatron.core.ssm.mamba_mixer" not in sys.modules or "mamba_ssm" in sys.modules
    install(MAMBA)
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    hybrid_block.TENorm = WrappedTorchNorm  # the last norm, which no description names
    mixer = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    mamba = MambaLayerSubmodules(
        norm=WrappedTorchNorm,
        mixer=ModuleSpec(module=MambaMixer, submodules=mixer),
        mamba_bda=get_bias_dropout_add,
    )
    layers = HybridStackSubmodules(
        mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba), **hybrid_layers.layers()
    )
    return HybridModel(
        config,
        ModuleSpec(module=HybridStack, submodules=layers),
        vocab_size=vocabulary,
        max_sequence_length=16,
        hybrid_layer_pattern="M*-M",
        **stage_of_pipeline(None),
    )


def build_llava(config: TransformerConfig, vocabulary: int) -> torch.nn.Module:
    """Builds a LLaVAModel as `pretrain_vlm.py` does: the first stage has the vision model."""
    from megatron.core.models.multimodal.llava_model import LLaVAModel
    from megatron.core.models.multimodal.llava_spec import decoder_model_with_local_default_spec
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
    from megatron.core.transformer.mlp import MLPSubmodules

    alone = {"pipeline_model_parallel_size": 1, "num_layers": 2}
    vision = dataclasses.replace(config, **alone)
    vision.vision_model_type = "internvit"  # CLIP has a norm that asks for Transformer Engine
    projection = dataclasses.replace(config, **alone)
    place = stage_of_pipeline(None)
    return LLaVAModel(
        language_transformer_config=config,
        language_transformer_layer_spec=decoder_model_with_local_default_spec(),
        language_vocab_size=vocabulary,
        language_max_sequence_length=64,
        vision_transformer_config=vision,
        vision_transformer_layer_spec=get_vit_layer_with_local_spec(),
        drop_vision_class_token=False,
        vision_projection_config=projection,
        vision_projection_layer_spec=MLPSubmodules(
            linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear
        ),
        language_position_embedding_type="rope",
        add_encoder=place["pre_process"],
        img_h=28,
        img_w=28,
        **place,
    )


def build_mla(config: TransformerConfig, vocabulary: int, *, fused: bool = False) -> torch.nn.Module:
    """Builds a GPTModel with multi-latent attention; `fused`: its down projections are one parameter."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    layer = get_gpt_layer_local_spec(
        multi_latent_attention=True, qk_layernorm=True, normalization=config.normalization
    )
    latent_attention.adapt(layer.submodules.self_attention, fused=fused)
    return GPTModel(
        config,
        layer,
        vocab_size=vocabulary,
        max_sequence_length=16,
        position_embedding_type="rope",
        **stage_of_pipeline(None),
    )


BUILDERS: dict[str, Callable[[TransformerConfig, int], torch.nn.Module]] = {
    "hybrid": build_hybrid,
    "llava": build_llava,
    "mla": build_mla,
    "fused mla": functools.partial(build_mla, fused=True),
}
