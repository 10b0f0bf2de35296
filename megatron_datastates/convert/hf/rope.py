"""Rotary embeddings: what Megatron's arguments and config.json say about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_datastates.convert.hf.arguments import Arguments
from megatron_datastates.errors import FormatError, UnsupportedFormatError

Config = dict[str, Any]
# What Megatron fixes of llama3's scaling: all but the factor.
_FIXED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_DEFAULT_THETA = 10000


def rope_config(a: Arguments) -> Config:
    """Returns the members of config.json, with the names that transformers 4 and 5 read."""
    scaling: Config | None = None
    if a.use_rope_scaling:
        scaling = {"rope_type": "llama3", "factor": float(a.rope_scaling_factor), **_FIXED}
    elif a.rotary_seq_len_interpolation_factor:
        scaling = {"rope_type": "linear", "factor": float(a.rotary_seq_len_interpolation_factor)}
    return {"rope_theta": float(a.rotary_base), "rope_scaling": scaling}


def rope_needs(a: Arguments) -> Mapping[str, Any]:
    """Returns the arguments without which config.json cannot say what the embeddings are."""
    if not a.use_rope_scaling:
        return {}
    # pretrain_gpt.py ignores --rope-scaling-factor (seen up to 0.19): the model is trained with 8. Megatron
    # applies both kinds of scaling where both are given, and transformers has no such embeddings.
    return {"rope_scaling_factor": 8.0, "rotary_seq_len_interpolation_factor": None}


def read_rope(config: Config) -> Mapping[str, Any]:
    """Returns Megatron's arguments.

    Raises:
        UnsupportedFormatError: Megatron has no such embeddings.
        FormatError: the scaling is no object.
    """
    # transformers 4 knows rope_scaling alone, and 5 prefers it.
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise FormatError(f"config.json: the scaling of rotary embeddings is {scaling!r}, expected an object")
    base = scaling.get("rope_theta", config.get("rope_theta", _DEFAULT_THETA))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    found: dict[str, Any] = {"rotary_base": _whole("rope_theta", base)}
    known = scaling.keys() <= {"rope_theta", "rope_type", "type", "factor", *_FIXED}
    if kind == "default" and known:
        return found
    if kind == "linear" and known:
        factor = _whole("the factor of rope_scaling", scaling["factor"])
        return found | {"rotary_seq_len_interpolation_factor": factor}
    if kind == "llama3" and known and all(scaling.get(name) == value for name, value in _FIXED.items()):
        return found | {"use_rope_scaling": True, "rope_scaling_factor": float(scaling["factor"])}
    raise UnsupportedFormatError(
        f"config.json: Megatron has no rotary embeddings with rope_scaling {scaling!r}: expected linear, or "
        f"llama3 with {_FIXED}"
    )


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0 or value % 1 != 0:
        raise UnsupportedFormatError(
            f"config.json: {name} is {value!r}: Megatron takes whole numbers above 0"
        )
    return int(value)
