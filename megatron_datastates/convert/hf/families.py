"""The architectures that are known: what Megatron's arguments and config.json say about each.

A family is a table: the arguments that it needs, and how they are written to config.json and read from it.
`read` and `config` are each other's inverses. What they have in common for rotary embeddings is in rope.py;
where a model's weights go, in tensors.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from megatron_datastates.convert.hf.arguments import Arguments, unusual
from megatron_datastates.convert.hf.rope import Config, read_rope, rope_config, rope_needs
from megatron_datastates.errors import UnsupportedFormatError

ABSENT = object()  # in place of the value of a member that config.json must not have
SOME = "a number"  # what a family needs, whatever it is


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture of transformers."""

    model_type: str
    architecture: str
    needs: Callable[[Arguments], Mapping[str, Any]]  # expected arguments, given the others
    config: Callable[[Arguments], Config]
    read: Callable[[Config], Mapping[str, Any]]  # arguments beyond those of `_read_common`

    def differences(self, a: Arguments) -> dict[str, tuple[Any, Any]]:
        """Returns the arguments that this family cannot have: (found, expected) by name."""
        found = ((name, getattr(a, name), expected) for name, expected in self.needs(a).items())
        return {
            name: (value, expected)
            for name, value, expected in found
            if (value is None if expected is SOME else value != expected)
        }


_LLAMA = {"normalization": "RMSNorm", "position_embedding_type": "rope", "swiglu": True}


def _llama_like(a: Arguments) -> dict[str, Any]:
    return {**_LLAMA, **rope_needs(a)}


def _common_config(a: Arguments) -> Config:
    return {
        "hidden_size": a.hidden_size,
        "intermediate_size": a.ffn_hidden_size,
        "num_hidden_layers": a.num_layers,
        "num_attention_heads": a.num_attention_heads,
        "num_key_value_heads": a.num_query_groups,
        "head_dim": a.kv_channels,
        "hidden_act": "silu",
        "max_position_embeddings": a.max_position_embeddings,
        "rms_norm_eps": a.norm_epsilon,
        "tie_word_embeddings": not a.untie_embeddings_and_output_weights,
        **rope_config(a),
    }


def _read_common(config: Config) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
        "max_position_embeddings": config["max_position_embeddings"],
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "norm_epsilon": config["rms_norm_eps"],
        **_LLAMA,
        **read_rope(config),
    }


def _read_llama(config: Config) -> Mapping[str, Any]:
    bias = bool(config.get("attention_bias"))
    return _read_common(config) | {"add_bias_linear": bias, "add_qkv_bias": bias}


def _mixtral_config(a: Arguments) -> Config:
    return _common_config(a) | {
        "intermediate_size": a.moe_ffn_hidden_size,
        "num_local_experts": a.num_experts,
        "num_experts_per_tok": a.moe_router_topk,
        "sliding_window": None,
    }


def _read_mixtral(config: Config) -> Mapping[str, Any]:
    common = _read_common(config)
    return common | {
        "num_experts": config["num_local_experts"],
        "moe_layer_freq": (1,) * common["num_layers"],
        "moe_ffn_hidden_size": config["intermediate_size"],
        "moe_router_topk": config["num_experts_per_tok"],
    }


def _qwen_moe_config(a: Arguments) -> Config:
    return _common_config(a) | {
        "num_experts": a.num_experts,
        "num_experts_per_tok": a.moe_router_topk,
        "moe_intermediate_size": a.moe_ffn_hidden_size,
        "norm_topk_prob": not a.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [n for n, has in enumerate(a.has_experts) if not has],
        "use_sliding_window": False,
    }


def _read_qwen_moe(config: Config) -> dict[str, Any]:
    common, step = _read_common(config), config.get("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    layers = range(common["num_layers"])
    return common | {
        "num_experts": config["num_local_experts" if "num_local_experts" in config else "num_experts"],
        "moe_layer_freq": tuple(int(n not in dense and (n + 1) % step == 0) for n in layers),
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
    }


def _qwen2_moe_config(a: Arguments) -> Config:
    shared = a.moe_shared_expert_intermediate_size
    return _qwen_moe_config(a) | {"shared_expert_intermediate_size": shared, "qkv_bias": True}


def _read_qwen2_moe(config: Config) -> Mapping[str, Any]:
    return _read_qwen_moe(config) | {
        "add_qkv_bias": True,
        "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
    }


_ACTIVATIONS = {  # squared_relu, bias_gelu_fusion
    (True, False): "relu2",
    (False, True): "gelu_new",
    (False, False): "gelu",
}


def _gpt2_config(a: Arguments) -> Config:
    return {
        "n_embd": a.hidden_size,
        "n_inner": a.ffn_hidden_size,
        "n_layer": a.num_layers,
        "n_head": a.num_attention_heads,
        "n_positions": a.max_position_embeddings,
        "activation_function": _ACTIVATIONS[a.squared_relu, a.bias_gelu_fusion],
        "layer_norm_epsilon": a.norm_epsilon,
        "tie_word_embeddings": not a.untie_embeddings_and_output_weights,
    }


def _read_gpt2(config: Config) -> Mapping[str, Any]:
    kinds = {name: kind for kind, name in _ACTIVATIONS.items()} | {"gelu_pytorch_tanh": (False, True)}
    name, heads, hidden = config.get("activation_function", "gelu_new"), config["n_head"], config["n_embd"]
    if name not in kinds:
        raise UnsupportedFormatError(f"config.json: Megatron has no activation_function {name!r}")
    squared, fused = kinds[name]
    return {
        "num_layers": config["n_layer"],
        "hidden_size": hidden,
        "ffn_hidden_size": config.get("n_inner") or 4 * hidden,
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "kv_channels": hidden // heads,
        "max_position_embeddings": config["n_positions"],
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", True),
        "normalization": "LayerNorm",
        "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "position_embedding_type": "learned_absolute",
        "squared_relu": squared,
        "bias_gelu_fusion": fused,
        "add_bias_linear": True,
        "add_qkv_bias": True,
    }


def _gpt2_needs(a: Arguments) -> Mapping[str, Any]:
    return {
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
        "swiglu": False,
        "add_bias_linear": True,
        "qk_layernorm": False,
        "num_experts": None,
        "num_query_groups": a.num_attention_heads,
        "kv_channels": a.hidden_size // a.num_attention_heads,
    }


_DENSE = {"num_experts": None}
_EXPERTS = {"num_experts": SOME}
_NO_BIAS = {"add_bias_linear": False, "add_qkv_bias": False}
_QKV_BIAS = {"add_bias_linear": False, "add_qkv_bias": True}

FAMILIES = (
    Family(
        "llama",
        "LlamaForCausalLM",
        lambda a: _llama_like(a) | _DENSE | {"add_qkv_bias": a.add_bias_linear, "qk_layernorm": False},
        lambda a: _common_config(a) | dict.fromkeys(("attention_bias", "mlp_bias"), a.add_bias_linear),
        _read_llama,
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        lambda a: _llama_like(a) | _DENSE | _QKV_BIAS | {"qk_layernorm": False},
        lambda a: _common_config(a) | {"use_sliding_window": False},
        lambda config: _read_common(config) | {"add_qkv_bias": True},
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        lambda a: _llama_like(a) | _DENSE | _NO_BIAS | {"qk_layernorm": True},
        lambda a: _common_config(a) | {"attention_bias": False, "use_sliding_window": False},
        lambda config: _read_common(config) | {"qk_layernorm": True},
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        lambda a: {
            **(_llama_like(a) | _EXPERTS | _NO_BIAS),
            "moe_shared_expert_intermediate_size": None,
            "qk_layernorm": False,
            "moe_router_pre_softmax": False,
            "moe_layer_freq": (1,) * a.num_layers,
        },
        _mixtral_config,
        _read_mixtral,
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        lambda a: {
            **(_llama_like(a) | _EXPERTS | _NO_BIAS),
            "qk_layernorm": True,
            "moe_shared_expert_intermediate_size": None,
        },
        lambda a: _qwen_moe_config(a) | {"attention_bias": False},
        lambda config: _read_qwen_moe(config) | {"qk_layernorm": True},
    ),
    Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        lambda a: {
            **(_llama_like(a) | _EXPERTS | _QKV_BIAS),
            "qk_layernorm": False,
            "moe_shared_expert_intermediate_size": SOME,
            "moe_shared_expert_gate": True,
        },
        _qwen2_moe_config,
        _read_qwen2_moe,
    ),
    Family("gpt2", "GPT2LMHeadModel", _gpt2_needs, _gpt2_config, _read_gpt2),
)


def family_of(a: Arguments, stored: Mapping[str, Any]) -> Family:
    """Returns the family of a model. Raises UnsupportedFormatError with the arguments that differ from it."""
    strange = unusual(stored)
    found = [(family, family.differences(a)) for family in FAMILIES]
    nearest, differences = min(found, key=lambda one: (len(one[1]), "num_experts" in one[1]))
    differing = strange | differences
    if not differing:
        return nearest
    known = ", ".join(family.model_type for family in FAMILIES)
    raise UnsupportedFormatError(
        f"unknown architecture; known are {known}. The model differs from {nearest.model_type} in "
        f"its arguments: {differences_text(differing)}"
    )


def differences_text(differing: Mapping[str, tuple[Any, Any]]) -> str:
    """Returns, for a message, what was found in place of what."""
    return ", ".join(
        f"{name} is {found!r}, {'and must be left out' if expected is ABSENT else f'not {expected!r}'}"
        for name, (found, expected) in differing.items()
    )
