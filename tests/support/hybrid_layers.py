"""A hybrid model of a GPT's layers on a CPU: attention and MLPs, of Megatron's local kinds, one at a time.

Megatron's own description of such a model asks for Transformer Engine.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec

CHOSEN = "TINY_HYBRID"  # an environment variable of tiny runs: the model is one, by --hybrid-layer-pattern


def build_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: TransformerConfig | None = None,
    **kwargs: Any,
) -> Any:
    """Builds the model, as `build_model` of pretrain_tiny.py."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    hybrid_block.TENorm = WrappedTorchNorm  # the last norm, which no description names
    args = get_args()
    return HybridModel(
        config or core_transformer_config_from_args(args),
        ModuleSpec(module=HybridStack, submodules=HybridStackSubmodules(**layers())),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        hybrid_layer_pattern=args.hybrid_layer_pattern,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
    )


def layers() -> dict[str, ModuleSpec]:
    """Returns the descriptions of attention and MLP, for `HybridStackSubmodules`."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_mlp_module_spec
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    whole = get_gpt_layer_local_spec().submodules
    named = {"sharded_state_dict_keys_map": whole.sharded_state_dict_keys_map}  # as in a GPT
    attention = TransformerLayerSubmodules(
        input_layernorm=whole.input_layernorm,
        self_attention=whole.self_attention,
        self_attn_bda=get_bias_dropout_add,
        **named,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=whole.pre_mlp_layernorm,
        mlp=get_mlp_module_spec(use_te=False),
        mlp_bda=get_bias_dropout_add,
        **named,
    )
    return {
        "attention_layer": ModuleSpec(module=TransformerLayer, submodules=attention),
        "mlp_layer": ModuleSpec(module=MLPLayer, submodules=mlp),
    }
