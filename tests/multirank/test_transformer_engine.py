"""Transformer Engine's own FP8 weights and extra states, saved and loaded as torch_dist does.

These need Transformer Engine and a CUDA device. Without either, these tests do not run:
    test_fp8_weights_and_extra_states_load_as_with_torch_dist
    test_fp8_checkpoint_loads_into_high_precision_weights
What can be shown without Transformer Engine is in test_quantized.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

te = pytest.importorskip("transformer_engine.pytorch")

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy  # noqa: E402
from megatron.core.transformer.utils import sharded_state_dict_default  # noqa: E402

from megatron_datastates.mcore.save.strategy import TrainingSaveStrategy  # noqa: E402

pytestmark = pytest.mark.gpu
PREFIX = "layer."


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A world of this process alone."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def linear(seed: int, *, fp8_weights: bool) -> Any:
    """Returns a layer that ran once in FP8, so that it has scales to remember."""
    torch.manual_seed(seed)
    with te.fp8_model_init(enabled=fp8_weights):
        layer = te.Linear(64, 32, params_dtype=torch.bfloat16, device="cuda")
    with te.fp8_autocast(enabled=True):
        layer(torch.randn(16, 64, dtype=torch.bfloat16, device="cuda")).sum().backward()
    return layer


def sharded(layer: Any) -> dict[str, Any]:
    return dict(sharded_state_dict_default(layer, PREFIX))


def save_both(layer: Any, root: Path) -> dict[str, Path]:
    strategies = {
        "ours": TrainingSaveStrategy(),
        "stock": TorchDistSaveShardedStrategy("torch_dist", 1),
    }
    for name, strategy in strategies.items():
        (root / name).mkdir()
        dist_checkpointing.save(sharded(layer), str(root / name), strategy)
    return {name: root / name for name in strategies}


def loaded(directory: Path, *, fp8_weights: bool) -> dict[str, Any]:
    """Returns a fresh layer's weights, in high precision, and extra state after a load."""
    layer = linear(2, fp8_weights=fp8_weights)
    state = dist_checkpointing.load(sharded(layer), str(directory))
    layer.load_state_dict({key.removeprefix(PREFIX): value for key, value in state.items()})
    weight = layer.weight.dequantize() if fp8_weights else layer.weight.detach()
    return {"weight": weight, "bias": layer.bias.detach(), "extra": layer.get_extra_state()}


@pytest.mark.parametrize("fp8_weights", [True, False])
def test_fp8_weights_and_extra_states_load_as_with_torch_dist(fp8_weights: bool, tmp_path: Path) -> None:
    places = save_both(linear(1, fp8_weights=fp8_weights), tmp_path)
    ours, stock = (loaded(places[name], fp8_weights=fp8_weights) for name in ("ours", "stock"))
    for name in ours:
        assert torch.equal(ours[name], stock[name]), name


def test_fp8_checkpoint_loads_into_high_precision_weights(tmp_path: Path) -> None:
    layer = linear(1, fp8_weights=True)
    places = save_both(layer, tmp_path)
    for place in places.values():
        assert torch.equal(loaded(place, fp8_weights=False)["weight"], layer.weight.dequantize())
