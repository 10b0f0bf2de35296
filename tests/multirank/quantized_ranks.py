"""Ranks of test_quantized.py: quantized tensors and extra states, without Transformer Engine.

What belongs here: stand-ins for its quantized tensors and its extra states, and a module around them.
Megatron recognizes quantized tensors by Transformer Engine's class; `pretend_transformer_engine` replaces it
by the stand-in, so that Megatron's own code for them runs.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, fp8_utils, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import torch as megatron
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import sharded_state_dict_default
from model_ranks import FORMATS, leaves, strategies
from saving_rank import join, make_directory, report
from torch.utils._pytree import tree_map_only

from megatron_datastates.mcore.save.strategy import TrainingSaveStrategy

ROWS, COLUMNS = 8, 96


class Quantized(torch.Tensor):
    """One byte per element and one scale, which claims to be bfloat16 on a GPU, as TE's QuantizedTensor does.

    It has no storage of its own; only its parts have.
    """

    codes: torch.Tensor
    scale: float

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: float) -> Quantized:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.bfloat16, device="cuda")
        made.codes, made.scale = codes, scale
        return made

    def dequantize(self) -> torch.Tensor:
        return (self.codes.float() * self.scale).bfloat16()

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> Quantized:
        self.codes.copy_((source.float() / self.scale).round().clamp(-128, 127).to(torch.int8))
        return self

    def __getitem__(self, index: int) -> Quantized:
        return Quantized(self.codes[index], self.scale)

    def __repr__(self, **ignored: object) -> str:
        return f"Quantized({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("detach", "view", "slice", "alias", "split", "clone"):
            parts = func(args[0].codes, *args[1:], **(kwargs or {}))
            if isinstance(parts, (list, tuple)):
                return [cls(part, args[0].scale) for part in parts]
            return cls(parts, args[0].scale)
        plain, options = tree_map_only(cls, cls.dequantize, (args, kwargs or {}))
        return func(*plain, **options)


class OwnParameter(torch.nn.Parameter):
    """A subclass that is not quantized, as Megatron has some: its `dequantize` is every tensor's."""


def pretend_transformer_engine() -> None:
    fp8_utils.FP8_TENSOR_CLASS = Quantized
    fp8_utils.HAVE_TE_FP8_TENSOR_CLASS = True
    fp8_utils.is_te_min_version = lambda *version: True
    megatron.HAVE_TE, megatron.Float8Tensor = True, Quantized


def quantized(seed: int | None) -> Quantized:
    """Returns a tensor with codes from a seed, or all 1."""
    if seed is None:
        return Quantized(torch.ones((ROWS, COLUMNS), dtype=torch.int8), 0.25)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (ROWS, COLUMNS), generator=generator, dtype=torch.int8)
    return Quantized(codes, 0.25)


def weights(seed: int | None, make: Any) -> dict[str, Any]:
    """Returns quantized shards of Megatron's kinds: split along rows, one layer of several, a SwiGLU pair."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    seeds = [None] * 3 if seed is None else [seed + 3 * rank + i for i in range(3)]
    row, layer, pair = (make(quantized(s)) for s in seeds)
    gated = ShardedTensor.from_rank_offsets("fc1", pair, (0, rank, ranks))
    factory: ShardedTensorFactory = apply_swiglu_sharded_factory(gated, ())
    return {
        "row": ShardedTensor.from_rank_offsets("row", row, (0, rank, ranks)),
        "layer": ShardedTensor.from_rank_offsets("layers", layer, (0, rank, ranks), prepend_axis_num=1),
        "fc1": factory,
    }


def bits(loaded: dict[str, Any]) -> dict[str, str]:
    """Describes quantized tensors by their codes, others by their bits."""
    parts = {
        name: value.codes if isinstance(value, Quantized) else value
        for name, value in loaded.items()
        if isinstance(value, torch.Tensor)
    }
    return dict(leaves(parts, "loaded"))


def save_quantized(root: str, folder: str) -> None:
    join()
    for name in FORMATS:
        make_directory(Path(root, name))
        dist.barrier()
        strategy = strategies(name, parallel=False)[0] if name == "stock" else TrainingSaveStrategy()
        dist_checkpointing.save(weights(1, lambda tensor: tensor), str(Path(root, name)), strategy)
    report(folder)


TARGETS: dict[str, Callable[[Quantized], torch.Tensor]] = {
    "unrecognized": lambda tensor: tensor,  # as with Transformer Engine missing: the reader copies
    "streamed": lambda tensor: tensor,
    "dequantized before": lambda tensor: tensor,
    "fully parallel": lambda tensor: tensor,
    "of the stored dtype": Quantized.dequantize,
    "of another dtype": lambda tensor: tensor.dequantize().float(),
}


def load_quantized(root: str, folder: str) -> None:
    """Loads into every target from both formats."""
    join()
    parallel_state.initialize_model_parallel()
    for target, make in TARGETS.items():
        if target != "unrecognized":
            pretend_transformer_engine()
        found = {}
        for name in FORMATS:
            load = strategies(name, parallel=target == "fully parallel")[1]
            if target == "dequantized before":
                load.stream_ckpt_dequant = False
            found[name] = bits(dist_checkpointing.load(weights(None, make), str(Path(root, name)), load))
        assert found["ours"] == found["stock"], target
        blank = bits({name: make(quantized(None)) for name in ("row", "layer", "fc1")})
        assert not found["ours"].items() & blank.items(), f"{target}: nothing was loaded"
    ours, stock = (dist_checkpointing.load_plain_tensors(str(Path(root, name))) for name in FORMATS)
    assert dict(leaves(ours, "")) == dict(leaves(stock, ""))
    report(folder, dtypes=sorted({str(value.dtype) for value in ours.values()}))


def subclass_keeps_its_dtype(root: str, folder: str) -> None:
    join()
    rank = dist.get_rank()

    def state(value: float) -> dict[str, Any]:
        data = OwnParameter(torch.full((4, 5), value, dtype=torch.bfloat16))
        return {"weight": ShardedTensor.from_rank_offsets("weight", data, replica_id=rank)}

    stored = {}
    for name in FORMATS:
        make_directory(Path(root, name))
        dist.barrier()
        dist_checkpointing.save(state(3), str(Path(root, name)), strategies(name, parallel=False)[0])
        stored[name] = dict(leaves(dist_checkpointing.load_plain_tensors(str(Path(root, name))), ""))
    report(folder, **stored)


class Layer(torch.nn.Module):
    """A layer with an extra state in one of the forms that Transformer Engine's versions use."""

    def __init__(self, form: str, value: int | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3, 5), float(value or 0)))
        self.form, self.value = form, value

    def get_extra_state(self) -> Any:
        if self.value is None:
            return None
        pickled = pickle.dumps({"scale": self.value, "amax_history": [self.value] * 3})
        if self.form == "tensor":  # Transformer Engine 2
            return torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
        if self.form == "empty":  # 2, when FP8 is off
            return torch.empty(0, dtype=torch.uint8)
        if self.form == "bytes":
            return pickled
        stream = io.BytesIO()  # 1
        torch.save({"scale": torch.full((2,), float(self.value)), "extra": pickled}, stream)
        return stream

    def set_extra_state(self, state: Any) -> None:
        self.value = state


FORMS = ("tensor", "empty", "bytes", "stream", "none")


def extra_states(root: str, folder: str) -> None:
    """Saves and loads one layer of each form per pipeline stage, all layers' objects under one key."""
    rank, ranks = join()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=ranks)

    def state(value: int | None) -> tuple[list[Layer], dict[str, Any]]:
        layers = [Layer(form, None if form == "none" else value) for form in FORMS]
        return layers, {
            form: sharded_state_dict_default(layer, f"{form}.layers.", ((0, rank, ranks),))
            for form, layer in zip(FORMS, layers, strict=True)
        }

    found = {}
    for name in FORMATS:
        make_directory(Path(root, name))
        dist.barrier()
        save, load = strategies(name, parallel=False)
        dist_checkpointing.save(state(7 + rank)[1], str(Path(root, name)), save)
        layers, blank = state(None)
        loaded = dist_checkpointing.load(blank, str(Path(root, name)), load)
        for form, layer in zip(FORMS, layers, strict=True):
            prefix = f"{form}.layers."
            layer.load_state_dict({key.removeprefix(prefix): item for key, item in loaded[form].items()})
        found[name] = dict(leaves([layer.value for layer in layers], "extra")) | dict(
            leaves(loaded, "loaded")
        )
    assert found["ours"] == found["stock"]
    wanted = [Layer(form, 7 + rank).get_extra_state() for form in FORMS[:3]]
    expected = dict(leaves(wanted, "extra"))
    assert expected.items() <= found["ours"].items()
    report(folder, objects=[key for key in found["ours"] if "_extra_state" in key])
