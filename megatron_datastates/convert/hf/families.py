"""The architectures that are known: what Megatron's arguments and config.json say about each.

A family is a table: the arguments that it needs, and how they are written to config.json and read from it.
`read` and `config` are each other's inverses. Where its weights go is in tensors.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from megatron_datastates.convert.hf.arguments import MOST_LAYERS, Arguments, unusual
from megatron_datastates.errors import FormatError, UnsupportedFormatError

Config = dict[str, Any]
_ABSENT = object()  # in place of the value of a member that config.json must not have
SOME = "a number"  # what a family needs, whatever it is

# Members of config.json that change no result of the model, or only the training.
_NEUTRAL = {
    "_name_or_path", "architectures", "attention_dropout", "attn_pdrop", "auto_map", "bos_token_id",
    "chunk_size_feed_forward", "dtype", "embd_pdrop", "embedding_dropout", "eos_token_id",
    "gradient_checkpointing", "id2label", "initializer_range", "is_encoder_decoder", "label2id",
    "layer_types", "max_window_layers", "model_type", "n_ctx", "output_attentions", "output_hidden_states",
    "output_router_logits", "pad_token_id", "pretraining_tp", "problem_type", "resid_pdrop",
    "residual_dropout", "return_dict", "router_aux_loss_coef", "router_jitter_noise", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params", "torch_dtype", "transformers_version", "use_cache",
    # Read whole by the tables, however they are written:
    "activation_function", "decoder_sparse_step", "head_dim", "mlp_only_layers", "n_inner",
    "num_key_value_heads", "rope_parameters", "rope_scaling", "rope_theta", "vocab_size",
}  # fmt: skip
# Others that no family's table lists: what they must be, if they are there.
_NEEDED: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "qkv_bias": (True,),
    "reorder_and_upcast_attn": (False,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "sliding_window": (None, 0),
    "use_mrope": (False,),
    "use_sliding_window": (False, None),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}


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


def _rope(a: Arguments) -> Config:
    scaling: Config | None = None
    if a.use_rope_scaling:  # Megatron fixes all but the factor
        scaling = {"rope_type": "llama3", "factor": a.rope_scaling_factor, "low_freq_factor": 1.0,
                   "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    elif a.rotary_seq_len_interpolation_factor:
        scaling = {"rope_type": "linear", "factor": float(a.rotary_seq_len_interpolation_factor)}
    return {"rope_theta": float(a.rotary_base), "rope_scaling": scaling}


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0 or value % 1 != 0:
        raise UnsupportedFormatError(
            f"config.json: {name} is {value!r}: Megatron takes whole numbers above 0"
        )
    return int(value)


def _read_rope(config: Config) -> Mapping[str, Any]:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise FormatError(f"config.json: rope_scaling is {scaling!r}, expected an object")
    base: Any = scaling.get("rope_theta", config.get("rope_theta", config.get("_default_rope_theta", 10000)))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    found: dict[str, Any] = {"rotary_base": _whole("rope_theta", base)}
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    known = scaling.keys() <= {"rope_theta", "rope_type", "type", "factor", *fixed}
    if kind == "default" and known:
        return found
    if kind == "linear" and known:
        factor = _whole("the factor of rope_scaling", scaling["factor"])
        return found | {"rotary_seq_len_interpolation_factor": factor}
    if kind == "llama3" and known and all(scaling.get(name) == value for name, value in fixed.items()):
        return found | {"use_rope_scaling": True, "rope_scaling_factor": float(scaling["factor"])}
    raise UnsupportedFormatError(
        f"config.json: Megatron has no rotary embeddings with rope_scaling {scaling!r}: expected linear, or "
        f"llama3 with {fixed}"
    )


def _llama_like(a: Arguments) -> Mapping[str, Any]:
    needs: dict[str, Any] = {"normalization": "RMSNorm", "position_embedding_type": "rope", "swiglu": True}
    # pretrain_gpt.py ignores --rope-scaling-factor (seen up to 0.19): the model is trained with 8.
    return needs | ({"rope_scaling_factor": 8.0} if a.use_rope_scaling else {})


def _dense(a: Arguments) -> Mapping[str, Any]:
    return {"num_experts": None}


def _plain_bias(a: Arguments) -> Mapping[str, Any]:
    return {"add_bias_linear": False, "add_qkv_bias": False}


def _experts(a: Arguments) -> Mapping[str, Any]:
    return {"num_experts": SOME}


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
        **_rope(a),
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
        "normalization": "RMSNorm",
        "norm_epsilon": config["rms_norm_eps"],
        "position_embedding_type": "rope",
        "swiglu": True,
        **_read_rope(config),
    }


def _llama_config(a: Arguments) -> Config:
    return _common_config(a) | {"attention_bias": a.add_bias_linear, "mlp_bias": a.add_bias_linear}


def _read_llama(config: Config) -> Mapping[str, Any]:
    bias = bool(config.get("attention_bias"))
    return _read_common(config) | {"add_bias_linear": bias, "add_qkv_bias": bias}


def _read_qwen2(config: Config) -> Mapping[str, Any]:
    return _read_common(config) | {"add_qkv_bias": True}


def _qwen3_config(a: Arguments) -> Config:
    return _common_config(a) | {"attention_bias": False, "use_sliding_window": False}


def _read_qwen3(config: Config) -> Mapping[str, Any]:
    return _read_common(config) | {"qk_layernorm": True}


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
        "num_experts": config["num_experts"],
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


def _read_qwen3_moe(config: Config) -> Mapping[str, Any]:
    return _read_qwen_moe(config) | {"qk_layernorm": True}


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


def _together(*needs: Callable[[Arguments], Mapping[str, Any]], **others: Any) -> Any:
    """Returns needs that are all of these."""
    return lambda a: {name: value for need in needs for name, value in need(a).items()} | others


_WITHOUT_SHARED = {"moe_shared_expert_intermediate_size": None}

FAMILIES = (
    Family(
        "llama",
        "LlamaForCausalLM",
        lambda a: {**_llama_like(a), **_dense(a), "add_qkv_bias": a.add_bias_linear, "qk_layernorm": False},
        _llama_config,
        _read_llama,
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        _together(_llama_like, _dense, add_bias_linear=False, add_qkv_bias=True, qk_layernorm=False),
        lambda a: _common_config(a) | {"use_sliding_window": False},
        _read_qwen2,
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        _together(_llama_like, _dense, _plain_bias, qk_layernorm=True),
        _qwen3_config,
        _read_qwen3,
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        lambda a: {
            **_together(_llama_like, _experts, _plain_bias, **_WITHOUT_SHARED)(a),
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
        _together(_llama_like, _experts, _plain_bias, qk_layernorm=True, **_WITHOUT_SHARED),
        lambda a: _qwen_moe_config(a) | {"attention_bias": False},
        _read_qwen3_moe,
    ),
    Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        _together(
            _llama_like,
            _experts,
            add_bias_linear=False,
            add_qkv_bias=True,
            qk_layernorm=False,
            moe_shared_expert_intermediate_size=SOME,
            moe_shared_expert_gate=True,
        ),
        _qwen2_moe_config,
        _read_qwen2_moe,
    ),
    Family("gpt2", "GPT2LMHeadModel", _gpt2_needs, _gpt2_config, _read_gpt2),
)
# Other names of an architecture in config.json.
_SAME_AS = {"mistral": "llama"}
# What tables are made as long as.
_COUNTS = ("num_hidden_layers", "n_layer", "num_attention_heads", "n_head", "num_key_value_heads")
_DIVISORS = ("num_attention_heads", "n_head")  # of the hidden size
_DEFAULT_ROPE_THETA = {"mixtral": 1000000}


def family_of(a: Arguments, stored: Mapping[str, Any]) -> Family:
    """Returns the family of a model. Raises UnsupportedFormatError with the arguments that differ from it."""
    strange = unusual(stored)
    nearest = min(FAMILIES, key=lambda family: len(family.differences(a)))
    differing = strange | nearest.differences(a)
    if not differing:
        return nearest
    known = ", ".join(family.model_type for family in FAMILIES)
    raise UnsupportedFormatError(
        f"unknown architecture; known are {known}. The model differs from {nearest.model_type} in "
        f"its arguments: {_text(differing)}"
    )


def _text(differing: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(
        f"{name} is {found!r}, {'and must be left out' if needed is _ABSENT else f'not {needed!r}'}"
        for name, (found, needed) in differing.items()
    )


def config_json(family: Family, a: Arguments, dtype: str) -> Config:
    """Returns what config.json says, with the names that transformers 4 and 5 read.

    No special tokens: those of the tokenizer are not known here, and a default would be another model's.
    """
    start = {"architectures": [family.architecture], "model_type": family.model_type}
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return start | family.config(a) | {"vocab_size": a.vocab_size, **tokens, "torch_dtype": dtype}


def read_config(config: Config) -> tuple[Family, Arguments]:
    """Returns the family and the arguments that config.json describes.

    Raises:
        UnsupportedFormatError: it describes a model that is not known; the message has what differs.
        FormatError: it is damaged.
    """
    kind = config.get("model_type")
    family = next((one for one in FAMILIES if one.model_type == _SAME_AS.get(str(kind), kind)), None)
    if family is None:
        known = ", ".join([*(one.model_type for one in FAMILIES), *_SAME_AS])
        raise UnsupportedFormatError(
            f"config.json: model_type is {kind!r}, which is not known: expected one of {known}"
        )
    for name in _COUNTS:
        if isinstance(config.get(name), int) and config[name] > MOST_LAYERS:
            raise FormatError(f"config.json: {name} is {config[name]}, expected at most {MOST_LAYERS}")
    for name in _DIVISORS:
        if config.get(name) == 0:
            raise FormatError(f"config.json: {name} is 0, expected a positive integer")
    default = {"_default_rope_theta": _DEFAULT_ROPE_THETA.get(family.model_type, 10000)}
    try:
        a = Arguments(**family.read(config | default), vocab_size=config["vocab_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"config.json lacks or mistakes a member: {error}") from error
    differing = family.differences(a)
    if differing:
        raise UnsupportedFormatError(f"config.json describes a model that is not known: {_text(differing)}")
    _refuse_differences(config, family.config(a))
    return family, a


def _refuse_differences(config: Config, ours: Config) -> None:
    """Refuses members of config.json that the arguments do not say, or do not say so."""
    differing: dict[str, tuple[Any, Any]] = {}
    for name, value in config.items():
        if name in _NEUTRAL:
            continue
        unused = name == "sliding_window" and not config.get("use_sliding_window", True)
        expected = (ours[name],) if name in ours else _NEEDED.get(name, (_ABSENT,))
        if value not in expected and not unused:
            differing[name] = (value, expected[0])
    if differing:
        raise UnsupportedFormatError(f"config.json describes a model that is not known: {_text(differing)}")
