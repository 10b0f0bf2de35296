"""The arguments of a training run that make a model what it is, by Megatron's names.

What belongs here: settling what a run has stored, and writing them for a command line. What does not: which
architectures have which of them (families.py).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_datastates.errors import FormatError, MismatchError

# Arguments that make a model which no table describes, unless they have this value or were not stored.
PLAIN: Mapping[str, Any] = {
    "activation_func_clamp_value": None,
    "apply_residual_connection_post_layernorm": False,
    "attention_output_gate": False,
    "enable_hyper_connections": False,
    "experimental_attention_variant": None,
    "glu_linear_offset": 0.0,
    "heterogeneous_layers_config_encoded_json": None,
    "heterogeneous_layers_config_path": None,
    "hybrid_layer_pattern": None,
    "hybrid_override_pattern": None,
    "linear_attention_freq": None,
    "linear_attention_type": None,
    "moe_apply_probs_on_input": False,
    "moe_latent_size": None,
    "moe_mlp_glu_interleave_size": None,
    "moe_router_enable_expert_bias": False,
    "moe_router_force_biased": None,
    "moe_router_force_load_balancing": False,
    "moe_router_group_topk": None,
    "moe_router_num_groups": None,
    "moe_router_score_function": "softmax",
    "moe_router_topk_limited_devices": None,
    "moe_router_topk_scaling_factor": None,
    "moe_shared_expert_glu_interleave_size": None,
    "mrope_section": None,
    "mtp_num_layers": None,
    "multi_latent_attention": False,
    "no_rope_freq": None,
    "openai_gelu": False,
    "qk_l2_norm": False,
    "quick_geglu": False,
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "spec": None,
    "use_mup": False,
    "window_size": None,
}

# Other values that change nothing.
_ALSO_PLAIN: Mapping[str, Any] = {
    "moe_router_num_groups": 1,  # without moe_router_group_topk, which is looked at, too
    "moe_router_topk_scaling_factor": 1.0,
    "mtp_num_layers": 0,
}

# Tokenizers that have --vocab-size words; others count for themselves. None: an imported model.
_SIZED_BY_ARGUMENT = (None, "NullTokenizer", "NullMultimodalTokenizer", "TikTokenizer")


MOST_LAYERS = 1 << 16  # and heads: a table has a row for each, whatever the tensors are


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """What the tables of architectures look at, with the values that Megatron settles on."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    max_position_embeddings: int
    vocab_size: int  # as the tokenizer has it; 0 where nothing says
    untie_embeddings_and_output_weights: bool
    normalization: str
    norm_epsilon: float
    position_embedding_type: str
    rotary_base: int = 10000
    rotary_seq_len_interpolation_factor: int | None = None
    use_rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    swiglu: bool = False
    squared_relu: bool = False
    bias_gelu_fusion: bool = False  # which approximates gelu by tanh
    add_bias_linear: bool = False
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    apply_layernorm_1p: bool = False
    num_experts: int | None = None
    moe_layer_freq: tuple[int, ...] = ()  # by layer: 1 where it has experts
    moe_ffn_hidden_size: int | None = None
    moe_router_topk: int = 2
    moe_router_pre_softmax: bool = False
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False

    def __post_init__(self) -> None:
        """Raises FormatError if a size is none, or does not fit another."""
        epsilon: Any = self.norm_epsilon
        if not isinstance(epsilon, int | float) or not 0 <= epsilon < 1:
            raise FormatError(f"norm_epsilon is {epsilon!r}, expected a number from 0 to 1")
        fields = dataclasses.fields(self)
        sizes = [field.name for field in fields if field.type == "int"]
        sizes += [
            one.name for one in fields if one.type == "int | None" and getattr(self, one.name) is not None
        ]
        if self.num_experts is not None:
            sizes.append("moe_ffn_hidden_size")
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or value < (name != "vocab_size"):
                raise FormatError(f"{name} is {value!r}, expected a positive integer")
        if self.num_attention_heads % self.num_query_groups:
            raise FormatError(
                f"num_attention_heads is {self.num_attention_heads}, expected a multiple of "
                f"{self.num_query_groups}, the number of query groups"
            )
        if self.num_experts is not None and self.moe_router_topk > self.num_experts:
            raise FormatError(
                f"moe_router_topk is {self.moe_router_topk}, expected at most {self.num_experts}, the number "
                "of experts"
            )

    @property
    def has_experts(self) -> tuple[bool, ...]:
        """Returns, by layer, whether it has experts."""
        return tuple(map(bool, self.moe_layer_freq)) or (False,) * self.num_layers


def unusual(stored: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the arguments that no table describes: (found, expected) by name."""
    arguments = {
        name: (stored[name], plain)
        for name, plain in PLAIN.items()
        if name in stored
        and stored[name] not in (plain, _ALSO_PLAIN.get(name, plain))
        and not (plain is False and stored[name] is None)
    }
    balancing = stored.get("moe_router_load_balancing_type")  # one, or a list of some
    if "sinkhorn" in str(balancing):
        arguments["moe_router_load_balancing_type"] = (balancing, "aux_loss")
    return arguments


def model_arguments(stored: Mapping[str, Any], vocab_size: int = 0) -> Arguments:
    """Returns the arguments of a model, from those that a training run stored.

    Args:
        vocab_size: of the tokenizer, if the caller knows it.

    Raises:
        FormatError: one that every model needs is missing, or is no number.
    """
    get = stored.get
    heads, hidden = _number(stored, "num_attention_heads"), _number(stored, "hidden_size")
    layers, experts = _number(stored, "num_layers"), get("num_experts")
    bias, gated = bool(get("add_bias_linear", True)), bool(get("swiglu"))
    squared = bool(get("squared_relu"))
    shared = get("moe_shared_expert_intermediate_size")
    return Arguments(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=_number(stored, "ffn_hidden_size"),
        num_attention_heads=heads,
        num_query_groups=_number(stored, "num_query_groups") if get("group_query_attention") else heads,
        kv_channels=get("kv_channels") or hidden // heads,
        max_position_embeddings=_number(stored, "max_position_embeddings"),
        vocab_size=vocab_size or _vocab_size(stored),
        untie_embeddings_and_output_weights=bool(get("untie_embeddings_and_output_weights")),
        normalization=str(get("normalization", "LayerNorm")),
        norm_epsilon=get("layernorm_epsilon", get("norm_epsilon", 1e-5)),
        position_embedding_type="rope"
        if get("use_rotary_position_embeddings")
        else str(get("position_embedding_type", "learned_absolute")),
        rotary_base=get("rotary_base", 10000),
        rotary_seq_len_interpolation_factor=get("rotary_seq_len_interpolation_factor"),
        use_rope_scaling=bool(get("use_rope_scaling")),
        rope_scaling_factor=get("rope_scaling_factor", 8.0) if get("use_rope_scaling") else 8.0,
        swiglu=gated,
        squared_relu=squared,
        bias_gelu_fusion=bool(get("bias_gelu_fusion")) and bias and not (gated or squared),
        add_bias_linear=bias,
        add_qkv_bias=bias or bool(get("add_qkv_bias")),
        qk_layernorm=bool(get("qk_layernorm")),
        apply_layernorm_1p=bool(get("layernorm_zero_centered_gamma") or get("apply_layernorm_1p")),
        num_experts=experts,
        moe_layer_freq=_layers_with_experts(get("moe_layer_freq", 1), layers) if experts else (),
        moe_ffn_hidden_size=(get("moe_ffn_hidden_size") or get("ffn_hidden_size")) if experts else None,
        moe_router_topk=get("moe_router_topk", 2),
        moe_router_pre_softmax=bool(get("moe_router_pre_softmax")) and bool(experts),
        moe_shared_expert_intermediate_size=shared if experts else None,
        moe_shared_expert_gate=bool(get("moe_shared_expert_gate")) and bool(shared and experts),
    )


def _number(stored: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = stored.get(name, default)
    if not isinstance(value, int) or value < 1:
        raise FormatError(f"the stored argument {name} is {value!r}, expected a positive number")
    if name in ("num_layers", "num_attention_heads") and value > MOST_LAYERS:
        raise FormatError(f"the stored argument {name} is {value}, expected at most {MOST_LAYERS}")
    return value


def _layers_with_experts(frequency: Any, layers: int) -> tuple[int, ...]:
    """Returns, by layer, 1 where it has experts, as get_gpt_decoder_layer_specs chooses them."""
    if isinstance(frequency, int) and frequency > 0:
        return tuple(int(n % frequency == 0) for n in range(layers))
    if not isinstance(frequency, list) or len(frequency) != layers or any(n not in (0, 1) for n in frequency):
        raise FormatError(
            f"the stored argument moe_layer_freq is {frequency!r}, expected a number, or {layers} that are "
            "0 or 1"
        )
    return tuple(map(int, frequency))


def _vocab_size(stored: Mapping[str, Any]) -> int:
    """Returns the size of the vocabulary without padding; 0 if the arguments leave it to the tokenizer."""
    size, padded = stored.get("vocab_size"), stored.get("padded_vocab_size")
    if not isinstance(size, int) or stored.get("tokenizer_type") not in _SIZED_BY_ARGUMENT:
        return 0
    if stored.get("tokenizer_type") == "NullTokenizer" and "null_tokenizer_eod_id" not in stored:
        size += 1  # before 0.19 it added a token to end documents
    multiple = _number(stored, "make_vocab_size_divisible_by", 1)
    multiple *= _number(stored, "tensor_model_parallel_size", 1)
    fits = isinstance(padded, int) and size <= padded < size + multiple
    return size if padded is None or fits else 0


def command_line(a: Arguments) -> list[str]:
    """Returns Megatron's command line arguments for this model, name and values in one text each."""
    if a.rotary_base != int(a.rotary_base):
        raise MismatchError(
            f"the base of the rotary embeddings is {a.rotary_base}: Megatron takes integers only"
        )
    flags: dict[str, Any] = {
        "num-layers": a.num_layers,
        "hidden-size": a.hidden_size,
        "ffn-hidden-size": a.ffn_hidden_size,
        "num-attention-heads": a.num_attention_heads,
        "group-query-attention": a.num_query_groups != a.num_attention_heads,
        "num-query-groups": a.num_query_groups if a.num_query_groups != a.num_attention_heads else None,
        "kv-channels": a.kv_channels,
        "max-position-embeddings": a.max_position_embeddings,
        "position-embedding-type": a.position_embedding_type,
        "rotary-base": int(a.rotary_base) if a.position_embedding_type == "rope" else None,
        "rotary-seq-len-interpolation-factor": a.rotary_seq_len_interpolation_factor,
        "use-rope-scaling": a.use_rope_scaling,
        "rope-scaling-factor": a.rope_scaling_factor if a.use_rope_scaling else None,
        "normalization": a.normalization,
        "norm-epsilon": a.norm_epsilon,
        "swiglu": a.swiglu,
        "squared-relu": a.squared_relu,
        "no-bias-gelu-fusion": not (a.swiglu or a.bias_gelu_fusion),
        "disable-bias-linear": not a.add_bias_linear,
        "add-qkv-bias": a.add_qkv_bias and not a.add_bias_linear,
        "qk-layernorm": a.qk_layernorm,
        "apply-layernorm-1p": a.apply_layernorm_1p,
        "untie-embeddings-and-output-weights": a.untie_embeddings_and_output_weights,
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
    }
    if a.num_experts:
        layers = f"'{list(a.moe_layer_freq)}'".replace(" ", "")
        flags |= {
            "num-experts": a.num_experts,
            "moe-ffn-hidden-size": a.moe_ffn_hidden_size,
            "moe-router-topk": a.moe_router_topk,
            "moe-router-pre-softmax": a.moe_router_pre_softmax,
            "moe-layer-freq": layers if 0 in a.moe_layer_freq else None,
            "moe-shared-expert-intermediate-size": a.moe_shared_expert_intermediate_size,
            "moe-shared-expert-gate": a.moe_shared_expert_gate,
        }
    given = {name: value for name, value in flags.items() if value is not None and value is not False}
    return [f"--{name}" if value is True else f"--{name} {value}" for name, value in given.items()]


def namespace(a: Arguments) -> argparse.Namespace:
    """Returns the arguments as a training run would store them, for --use-checkpoint-args."""
    values = {name: value for name, value in dataclasses.asdict(a).items() if name != "vocab_size" or value}
    uniform = 0 not in a.moe_layer_freq
    values |= {
        "group_query_attention": a.num_query_groups != a.num_attention_heads,
        "add_position_embedding": True,
        "use_rotary_position_embeddings": False,
        "layernorm_epsilon": a.norm_epsilon,
        "layernorm_zero_centered_gamma": a.apply_layernorm_1p,
        "moe_layer_freq": 1 if uniform else list(a.moe_layer_freq),
        "make_vocab_size_divisible_by": 128,
        "rotary_interleaved": False,
        "rotary_percent": 1.0,
    }
    return argparse.Namespace(**values)
