"""Models of large trainings, how ranks share them, and the parameters that each rank holds: shapes, no data.

What belongs here: arithmetic after Megatron's own, for models of equal layers (Transformer Engine's or local
ones), with tensor, pipeline and expert parallelism. Ranks are in Megatron's default order, tp-ep-dp-pp;
experts have a tensor-parallel size of 1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from megatron_datastates.format.values import Fragment

_DTYPE = "bfloat16"


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a transformer of equal layers without biases, with RMSNorm and rotary positions."""

    name: str
    layers: int
    hidden: int
    ffn: int  # of one expert, if there are experts
    heads: int
    groups: int  # of keys and values
    vocabulary: int
    gated: bool = True  # SwiGLU
    experts: int = 0
    vocabulary_divisor: int = 128  # --make-vocab-size-divisible-by


@dataclasses.dataclass(frozen=True)
class Parallel:
    """How ranks share a model."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    bucket_elements: int | None = None  # --ddp-bucket-size; None: Megatron's default

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def expert_coordinates(self, tp: int, dp: int) -> tuple[int, int]:
        """Returns the expert-parallel rank, and the rank among those that hold the same experts."""
        replica, ep = divmod(tp + self.tp * dp, self.ep)
        return ep, replica


@dataclasses.dataclass(frozen=True)
class Weight:
    """One parameter on one rank: one shard of a global tensor, or two (SwiGLU's first matrix)."""

    key: str
    global_shape: tuple[int, ...]
    shape: tuple[int, ...]  # of each shard, with the axes of layers and experts
    offsets: tuple[tuple[int, ...], ...]  # of each shard
    is_expert: bool = False
    is_split: bool = True  # over tensor-parallel ranks

    @property
    def elements(self) -> int:
        return len(self.offsets) * math.prod(self.shape)

    def fragments(self) -> Iterator[Fragment]:
        """Yields each shard as it is stored."""
        for offset in self.offsets:
            yield Fragment(self.key, _DTYPE, self.global_shape, offset, self.shape)


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of a global tensor: this rank's position on it, counted in shards, and their number."""

    position: int
    count: int


def _vector(key: str, size: int, layer: tuple[Axis, ...] = ()) -> Weight:
    counts, at = tuple(a.count for a in layer), tuple(a.position for a in layer)
    shape = (*(1 for _ in layer), size)
    return Weight(key, (*counts, size), shape, ((*at, 0),), is_split=False)


def _matrix(
    key: str, sizes: tuple[int, int], split: int, part: Axis, layer: tuple[Axis, ...] = (), halves: int = 1
) -> Weight:
    """Returns `part` of a matrix cut along axis `split`, of each of `halves` equal parts of the axis."""
    shape = list(sizes)
    shape[split] //= part.count * halves
    at = [[0, 0] for _ in range(halves)]
    for half in range(halves):
        at[half][split] = (half * part.count + part.position) * shape[split]
    counts, place = tuple(a.count for a in layer), tuple(a.position for a in layer)
    offsets = tuple((*place, *one) for one in at)
    return Weight(key, counts + sizes, (*(1 for _ in layer), *shape), offsets)


def _padded_vocabulary(model: Model, tp: int) -> int:
    multiple = model.vocabulary_divisor * tp
    return -(-model.vocabulary // multiple) * multiple


def stage_weights(model: Model, parallel: Parallel, tp: int, pp: int, ep: int) -> list[Weight]:
    """Returns the parameters of one rank, in the order of named_parameters of Megatron's local layers."""
    part = Axis(tp, parallel.tp)
    vocabulary = (_padded_vocabulary(model, parallel.tp), model.hidden)
    weights = []
    if pp == 0:
        weights.append(_matrix("embedding.word_embeddings.weight", vocabulary, 0, part))
    for layer in stage_layers(model, parallel, pp):
        weights += _layer_weights(model, part, Axis(layer, model.layers), Axis(ep, parallel.ep))
    if pp == parallel.pp - 1:
        weights.append(_vector("decoder.final_layernorm.weight", model.hidden))
        weights.append(_matrix("output_layer.weight", vocabulary, 0, part))
    return weights


def stage_layers(model: Model, parallel: Parallel, pp: int) -> range:
    """Returns the layers of a pipeline stage."""
    each = model.layers // parallel.pp
    return range(pp * each, (pp + 1) * each)


def _layer_weights(model: Model, part: Axis, layer: Axis, ep: Axis) -> list[Weight]:
    prefix, at = "decoder.layers.", (layer,)
    qkv = model.hidden + 2 * model.groups * (model.hidden // model.heads)
    weights = [
        _vector(f"{prefix}self_attention.linear_qkv.layer_norm_weight", model.hidden, at),
        _matrix(f"{prefix}self_attention.linear_proj.weight", (model.hidden, model.hidden), 1, part, at),
        _matrix(f"{prefix}self_attention.linear_qkv.weight", (qkv, model.hidden), 0, part, at),
        _vector(f"{prefix}mlp.linear_fc1.layer_norm_weight", model.hidden, at),
    ]
    if not model.experts:
        return weights + _mlp(model, f"{prefix}mlp.", part, at)
    router = Weight(
        f"{prefix}mlp.router.weight",
        (layer.count, model.experts, model.hidden),
        (1, model.experts, model.hidden),
        ((layer.position, 0, 0),),
        is_split=False,
    )
    each = model.experts // ep.count
    for expert in range(ep.position * each, (ep.position + 1) * each):
        mlp = _mlp(model, f"{prefix}mlp.experts.experts.", Axis(0, 1), (layer, Axis(expert, model.experts)))
        weights += [dataclasses.replace(weight, is_expert=True) for weight in mlp]
    return [*weights[:4], router, *weights[4:]]


def _mlp(model: Model, prefix: str, part: Axis, at: tuple[Axis, ...]) -> list[Weight]:
    halves = 2 if model.gated else 1
    return [
        _matrix(f"{prefix}linear_fc1.weight", (halves * model.ffn, model.hidden), 0, part, at, halves),
        _matrix(f"{prefix}linear_fc2.weight", (model.hidden, model.ffn), 1, part, at),
    ]
