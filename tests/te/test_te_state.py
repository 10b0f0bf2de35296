"""Transformer Engine's real layers, extra states and quantized weights on a CPU, against torch_dist.

A built Transformer Engine imports without a GPU, and its layers can be made, saved and loaded there; they
cannot run. `make test-te` builds it and runs these tests; the kernels are tests/multirank/
test_transformer_engine.py's, on a GPU.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformer_engine.pytorch")

import transformer_engine_torch as tex
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.tensor import (
    Float8Tensor,
    MXFP8Tensor,
    QuantizedTensor,
)

import megatron_datastates as ds
from megatron_datastates.mcore.save.strategy import TrainingSaveStrategy

MXFP8_BLOCK = 32  # elements along a row that share one power of two
Change = Callable[[TransformerEngineBaseModule, torch.Generator], None]


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A world of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def plain(layer: TransformerEngineBaseModule, generator: torch.Generator) -> None:
    """Leaves a layer as it is."""


def scaled(layer: TransformerEngineBaseModule, generator: torch.Generator) -> None:
    """Gives a layer the state of delayed scaling, as after some iterations in FP8."""
    layer.fp8_meta |= {"recipe": DelayedScaling(amax_history_len=4), "fp8_checkpoint": True, "num_gemms": 1}
    layer.init_fp8_meta_tensors(layer.fp8_meta["recipe"])
    for name in ("scaling_fwd", "scaling_bwd"):
        for tensor in (layer.fp8_meta[name].scale, layer.fp8_meta[name].amax_history):
            tensor.copy_(torch.rand(tensor.shape, generator=generator))


def in_float8(layer: TransformerEngineBaseModule, generator: torch.Generator) -> None:
    """Replaces a layer's weight by a Float8Tensor of random codes."""
    weight = layer.weight
    codes = torch.randint(0, 120, weight.shape, generator=generator, dtype=torch.uint8)
    made = Float8Tensor(
        shape=weight.shape, dtype=weight.dtype, data=codes, fp8_scale_inv=torch.tensor([0.375]),
        fp8_dtype=tex.DType.kFloat8E4M3, device="cpu",
    )  # fmt: skip
    replace_weight(layer, made)


def in_mxfp8(layer: TransformerEngineBaseModule, generator: torch.Generator) -> None:
    """Replaces a layer's weight by an MXFP8Tensor of random codes and scales."""
    rows, columns = layer.weight.shape

    def scales(rows: int, columns: int) -> torch.Tensor:  # padded as the kernels want them
        shape = (-(-rows // 128) * 128, -(-columns // MXFP8_BLOCK // 4) * 4)
        return torch.randint(120, 134, shape, generator=generator, dtype=torch.uint8)

    codes = torch.randint(0, 120, (2, rows, columns), generator=generator, dtype=torch.uint8)
    made = MXFP8Tensor(
        shape=(rows, columns), dtype=layer.weight.dtype, rowwise_data=codes[0],
        rowwise_scale_inv=scales(rows, columns), columnwise_data=codes[1],
        columnwise_scale_inv=scales(columns, rows).T.contiguous(), fp8_dtype=tex.DType.kFloat8E4M3,
        quantizer=None, with_gemm_swizzled_scales=False, device="cpu",
    )  # fmt: skip
    replace_weight(layer, made)


def replace_weight(layer: TransformerEngineBaseModule, made: QuantizedTensor) -> None:
    parameter = torch.nn.Parameter(made, requires_grad=False)
    assert isinstance(parameter, QuantizedTensor)
    layer._parameters["weight"] = parameter


def dequantize_mxfp8(tensor: Any, dtype: Any) -> torch.Tensor:
    """Does as the kernel of that name: codes times powers of two (OCP Microscaling Formats 1.0).

    Codes may have further dimensions, as torch_dist's shards of a layer do.
    """
    codes, scales = tensor._rowwise_data, tensor._rowwise_scale_inv
    rows, columns = codes.shape[-2], codes.shape[-1] // MXFP8_BLOCK
    powers = torch.exp2(scales[:rows, :columns].float() - 127).repeat_interleave(MXFP8_BLOCK, 1)
    return (codes.view(torch.float8_e4m3fn).float() * powers).bfloat16()


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the one kernel that saving needs and that has no code for a CPU."""
    monkeypatch.setattr(tex, "dequantize", dequantize_mxfp8)


def build(seed: int, change: Change) -> GPTModel:
    config = TransformerConfig(
        num_layers=2, hidden_size=64, ffn_hidden_size=64, num_attention_heads=4, gated_linear_unit=True,
        normalization="RMSNorm", add_bias_linear=False, use_cpu_initialization=True, bf16=True,
        params_dtype=torch.bfloat16, gradient_accumulation_fusion=False,
    )  # fmt: skip
    model = GPTModel(config, get_gpt_layer_with_transformer_engine_spec(), 100, 32)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    found = [module for module in model.modules() if isinstance(module, TransformerEngineBaseModule)]
    layers = [module for module in found if hasattr(module, "weight")]
    assert len(layers) == 8, "four linear ones in each layer"
    for layer in layers:
        change(layer, generator)
    return model


def save_both(model: GPTModel, root: Path) -> dict[str, Path]:
    strategies = {"ours": TrainingSaveStrategy(), "stock": TorchDistSaveShardedStrategy("torch_dist", 1)}
    for name, strategy in strategies.items():
        (root / name).mkdir()
        dist_checkpointing.save(model.sharded_state_dict(), str(root / name), strategy)
    return {name: root / name for name in strategies}


def loaded(directory: Path, change: Change) -> dict[str, torch.Tensor]:
    """Returns the state of another model after a load, in high precision."""
    model = build(2, change)
    model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), str(directory)))
    return high_precision(model)


def high_precision(model: GPTModel) -> dict[str, torch.Tensor]:
    """Returns all weights, and the tensors in all extra states."""
    found: dict[str, torch.Tensor] = {}
    for key, value in model.state_dict().items():
        if isinstance(value, QuantizedTensor):
            found[key] = value.dequantize()
        elif not key.endswith("_extra_state"):
            found[key] = value
        elif value is not None and value.numel():
            extra = pickle.loads(value.numpy().tobytes())
            found |= {f"{key}.{name}": part for name, part in extra.items() if torch.is_tensor(part)}
    return found


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype and torch.equal(found[key], value), key


@pytest.mark.parametrize("change", [plain, scaled], ids=lambda change: change.__name__)
def test_a_model_with_its_extra_states_loads_as_with_torch_dist(change: Change, tmp_path: Path) -> None:
    model = build(1, change)
    places = save_both(model, tmp_path)
    expected = high_precision(model)
    assert sum("_extra_state." in key for key in expected) == (8 * 4 if change is scaled else 0)
    for place in places.values():
        assert_equal(loaded(place, change), expected)


@pytest.mark.parametrize("change", [in_float8, in_mxfp8], ids=lambda change: change.__name__)
def test_quantized_weights_are_stored_in_high_precision(change: Change, tmp_path: Path) -> None:
    """As torch_dist stores Float8Tensor. It pickles MXFP8Tensor whole, and its own load refuses that."""
    model = build(1, change)
    places = save_both(model, tmp_path)
    weight = model.decoder.layers[1].mlp.linear_fc2.weight
    stored = ds.open(places["ours"]).read_tensor("decoder.layers.mlp.linear_fc2.weight")[1]
    assert stored.dtype == torch.bfloat16 and torch.equal(stored, weight.dequantize())
    for name in ("ours", "stock") if change is in_float8 else ("ours",):
        assert_equal(loaded(places[name], plain), high_precision(model))


def test_a_quantized_weight_that_changes_after_the_save_is_not_torn(tmp_path: Path) -> None:
    """What is saved of it is a copy of its own, so nothing has to wait."""
    model = build(1, in_float8)
    expected = high_precision(model)
    place = tmp_path / "ours"
    place.mkdir()
    request = dist_checkpointing.save(
        model.sharded_state_dict(), str(place), TrainingSaveStrategy(), async_sharded_save=True
    )
    weight = model.decoder.layers[1].mlp.linear_fc2.weight
    weight._data.zero_()
    request.execute_sync()
    key = "decoder.layers.1.mlp.linear_fc2.weight"
    assert torch.equal(loaded(place, plain)[key], expected[key])
