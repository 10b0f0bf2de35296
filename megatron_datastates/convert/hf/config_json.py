"""Writes and reads config.json: which family a model is of, and whether its arguments say all of it.

A member that is not known is refused, because it may change what the model computes. What each architecture
has is in families.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_datastates.convert.hf.arguments import MOST_LAYERS, Arguments
from megatron_datastates.convert.hf.families import ABSENT, FAMILIES, Family, differences_text
from megatron_datastates.convert.hf.rope import Config
from megatron_datastates.errors import FormatError, UnsupportedFormatError

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
    "sliding_window": (None,),
    "use_mrope": (False,),
    "use_sliding_window": (False, None),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}
# Second names: transformers 5 saves the number of experts of Qwen 3 under Mixtral's.
_ALIASES = {"num_local_experts": "num_experts"}
# Other names of an architecture in config.json.
_SAME_AS = {"mistral": "llama"}
# What tables are made as long as.
_COUNTS = ("num_hidden_layers", "n_layer", "num_attention_heads", "n_head", "num_key_value_heads")
_DIVISORS = ("num_attention_heads", "n_head", "decoder_sparse_step")
# What transformers takes for members that config.json lacks, where that is not the same for all families.
_ASSUMED: Mapping[str, Config] = {"mistral": {"sliding_window": 4096}, "mixtral": {"rope_theta": 1000000}}
_UNKNOWN = "config.json describes a model that is not known"


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
    kind = str(config.get("model_type"))
    family = next((one for one in FAMILIES if one.model_type == _SAME_AS.get(kind, kind)), None)
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
    complete = {**_ASSUMED.get(kind, {}), **config}
    try:
        a = Arguments(**family.read(complete), vocab_size=config["vocab_size"])
        ours = family.config(a)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise FormatError(f"config.json lacks a member, or has a wrong value of one: {error}") from error
    differing = family.differences(a) or _differences(complete, ours)
    if differing:
        assumed = [name for name in differing if name in complete and name not in config]
        hint = f" (transformers assumes so where {', '.join(assumed)} is missing)" if assumed else ""
        raise UnsupportedFormatError(f"{_UNKNOWN}: {differences_text(differing)}{hint}")
    return family, a


def _differences(config: Config, ours: Config) -> dict[str, tuple[Any, Any]]:
    """Returns the members that the arguments do not say, or do not say so: (found, expected) by name."""
    differing: dict[str, tuple[Any, Any]] = {}
    # The other families have no such switch: transformers does not look at it there.
    no_windows = config["model_type"].startswith("qwen") and not config.get("use_sliding_window", True)
    for name, value in config.items():
        if name in _NEUTRAL or (name == "sliding_window" and no_windows):
            continue
        own = name if name in ours else _ALIASES.get(name, name)
        expected = (ours[own],) if own in ours else _NEEDED.get(name, (ABSENT,))
        if value not in expected:
            differing[name] = (value, expected[0])
    return differing
