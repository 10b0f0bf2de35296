"""Multi-latent attention of Megatron-Core on a CPU.

Its local attention cannot have values of another size than keys, and only the layers of Transformer Engine
have one down projection in place of two. What belongs here: both, for local layers.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention

# An environment variable of tiny runs: the layers are adapted; "fused" as by --mla-down-proj-fusion.
CHOSEN = "TINY_LATENT_ATTENTION"


class Attention(DotProductAttention):  # type: ignore[misc]
    """Megatron's local attention, with values of another size than keys."""

    def __init__(
        self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def adapt(attention: Any, *, fused: bool) -> None:
    """Changes the description of a local layer's attention."""
    attention.submodules.core_attention = Attention
    if fused:
        from megatron.core.transformer.multi_latent_attention import FusedMLASelfAttention

        attention.module = FusedMLASelfAttention
        attention.submodules.linear_qkv_down_proj = ColumnParallelLinear


def install(*, fused: bool) -> None:
    """From now on, Megatron describes local layers so."""
    describe = gpt_layer_specs.get_gpt_layer_local_submodules

    def described(*args: Any, **kwargs: Any) -> Any:
        layer = describe(*args, **kwargs)
        adapt(layer.self_attention, fused=fused)
        return layer

    gpt_layer_specs.get_gpt_layer_local_submodules = described
