"""The sizes of Megatron's parallel groups: stored with each checkpoint, and compared by a load."""

from __future__ import annotations


def parallel_sizes() -> dict[str, int]:
    """Returns the sizes of Megatron's parallel groups; empty if they are not initialized."""
    from megatron.core import parallel_state as state

    if not state.model_parallel_is_initialized():
        return {}
    sizes = {
        "tensor": state.get_tensor_model_parallel_world_size,
        "pipeline": state.get_pipeline_model_parallel_world_size,
        "data": state.get_data_parallel_world_size,
        "context": state.get_context_parallel_world_size,
        "expert": state.get_expert_model_parallel_world_size,
    }
    return {name: int(size()) for name, size in sizes.items()}
