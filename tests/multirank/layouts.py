"""Models and layouts for model_ranks.py: fields of TransformerConfig, and `tied`."""

from typing import Any

Layout = dict[str, Any]

DENSE: Layout = {}
TP2: Layout = {"tensor_model_parallel_size": 2}
PP2: Layout = {"pipeline_model_parallel_size": 2}
CP2: Layout = {"context_parallel_size": 2}
VPP2: Layout = PP2 | {"virtual_pipeline_model_parallel_size": 2}
EXPERTS: Layout = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 16,
    "moe_layer_freq": [1, 0, 1, 1],
    "moe_token_dispatcher_type": "allgather",
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "add_bias_linear": False,
}
EP2: Layout = {"expert_model_parallel_size": 2}
EP4: Layout = {"expert_model_parallel_size": 4}
TP2_OF_EXPERTS: Layout = TP2 | {"expert_tensor_parallel_size": 2}
TP1_OF_EXPERTS: Layout = TP2 | {"expert_tensor_parallel_size": 1}
MLA: Layout = {
    "model": "mla",
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "rope_type": "rope",
    "qk_layernorm": True,
}
FUSED_MLA: Layout = MLA | {"model": "fused mla"}  # stored as MLA: a parameter's rows have two names
