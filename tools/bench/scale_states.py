"""What every rank of a large Megatron training would store: names, places and sizes, no data.

What belongs here: arithmetic after Megatron's own, for models of equal layers (Transformer Engine's or local
ones), tensor, pipeline and expert parallelism, the distributed optimizer's buckets (`dp_reshardable`) and
`--ckpt-fully-parallel-save`. Buckets come from Megatron's own planner. tests/multirank/test_scale.py compares
it all with what real models and optimizers store. What does not: measuring.

Ranks are in Megatron's default order, tp-ep-dp-pp; experts have a tensor-parallel size of 1.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_datastates.format.values import OPTIMIZER_MAP_NAME, Fragment

STATES = ("param", "exp_avg", "exp_avg_sq")
_DTYPE = "bfloat16"
_BUFFER = "gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)"
_WHOLE = "shard_0_1"


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a transformer whose layers are equal, without biases; RMSNorm, rotary positions."""

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

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(tp, pp, dp) ranks of a global rank."""
        dp, tp = divmod(rank % (self.tp * self.dp), self.tp)
        return tp, rank // (self.tp * self.dp), dp

    def expert_coordinates(self, tp: int, dp: int) -> tuple[int, int]:
        """(expert-parallel rank, rank among its replicas)."""
        replica, ep = divmod(tp + self.tp * dp, self.ep)
        return ep, replica


@dataclasses.dataclass(frozen=True)
class Weight:
    """One parameter on one rank: shards of one shape (two for SwiGLU's first matrix) of a global tensor."""

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
        for offset in self.offsets:
            yield Fragment(self.key, _DTYPE, self.global_shape, offset, self.shape)


class Axis(NamedTuple):
    """Of a global tensor: this rank's position on it, in steps of its shards, among so many."""

    position: int
    count: int


def _vector(key: str, size: int, layer: tuple[Axis, ...] = ()) -> Weight:
    counts, at = tuple(a.count for a in layer), tuple(a.position for a in layer)
    shape = (*(1 for _ in layer), size)
    return Weight(key, (*counts, size), shape, ((*at, 0),), is_split=False)


def _matrix(
    key: str, sizes: tuple[int, int], split: int, part: Axis, layer: tuple[Axis, ...] = (), halves: int = 1
) -> Weight:
    """`part` of a matrix, cut along axis `split`; of each of `halves` equal parts of that axis."""
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
    """The parameters of one rank, in the order of named_parameters of Megatron's local layers."""
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
    """The layers of a pipeline stage."""
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


# -- the optimizer's buckets ------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Of a bucket: what one rank stores of one parameter, or of the padding behind it. Elements."""

    start: int
    size: int
    is_padding: bool


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Of a distributed optimizer's buffer; ranks hold equal ranges of it."""

    starts: list[int]  # of parameters, elements
    ends: list[int]
    elements: int  # padded to a multiple of the ranks
    unpadded: int

    def pieces(self, rank: int, ranks: int) -> Iterator[Piece]:
        """What a rank stores, as DistributedOptimizer.sharded_param_state_dp_reshardable does."""
        each = self.elements // ranks
        first, end = rank * each, (rank + 1) * each
        at = first
        for i in range(bisect.bisect_right(self.ends, first), len(self.starts)):
            start = max(self.starts[i], first)
            if start >= end:
                break
            if start > at:
                yield Piece(at, start - at, True)
            at = min(self.ends[i], end)
            yield Piece(start, at - start, False)
        if at < end and at < self.unpadded:
            yield Piece(at, end - at, True)


def plan_buckets(weights: Sequence[Weight], parallel: Parallel, pp: int, shards: int) -> list[Bucket]:
    """By Megatron's planner, as with --overlap-grad-reduce. A later stage has one bucket (as there)."""
    size = parallel.bucket_elements or max(40_000_000, 1_000_000 * parallel.dp)
    params = [torch.empty(weight.elements, device="meta") for weight in weights]
    layout = DistributedOptimizer._compute_per_buffer_param_layout(
        params, size if pp == 0 else None, shards, DistributedDataParallelConfig()
    )
    buckets = [
        Bucket([], [], end - start, unpadded)
        for (start, end), unpadded in zip(
            layout.bucket_indices, layout.per_bucket_numel_unpadded, strict=True
        )
    ]
    for start, end, number in layout.param_index_map.values():  # in the order of the buffer
        buckets[number].starts.append(start - layout.bucket_indices[number][0])
        buckets[number].ends.append(end - layout.bucket_indices[number][0])
    return buckets


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """One distributed optimizer of a rank, whose state `shards` ranks share."""

    prefix: str
    buckets: list[Bucket]
    shards: int

    def fragments(self, rank: int) -> Iterator[tuple[Fragment, bool]]:
        """What a rank stores, and whether it is padding (which is made anew at every save)."""
        for number, bucket in enumerate(self.buckets):
            keys = [f"{self.prefix}.{_BUFFER}.bucket_idx_{number}.{state}" for state in STATES]
            for piece in bucket.pieces(rank, self.shards):
                for key in keys:
                    yield (
                        Fragment(key, "float32", (bucket.unpadded,), (piece.start,), (piece.size,)),
                        piece.is_padding,
                    )

    def elements(self, rank: int) -> int:
        return sum(piece.size for bucket in self.buckets for piece in bucket.pieces(rank, self.shards))

    def objects(self) -> list[str]:
        names = ("optimizer", "per_bucket_numel", "per_bucket_numel_unpadded", OPTIMIZER_MAP_NAME)
        return [f"{self.prefix}.{name}/{_WHOLE}" for name in names]


# -- ranks ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RankState:
    """What one rank stores."""

    fragments: list[Fragment]
    eager: list[bool]
    objects: list[str]


class Group:
    """The ranks with one tensor-parallel and one pipeline rank: they share what they hold alike."""

    def __init__(self, model: Model, parallel: Parallel, tp: int, pp: int) -> None:
        self.model, self.parallel, self.tp, self.pp = model, parallel, tp, pp
        self._stages: dict[int, list[Weight]] = {}
        self._chained = ("chained_0.", "chained_1.") if model.experts else ("", "")
        dense = [weight for weight in self.weights(0) if not weight.is_expert]
        self._dense = self._optimizer(0, dense, parallel.dp, tp + parallel.tp * pp)
        self._replicas = parallel.tp * parallel.dp // parallel.ep  # of an expert
        self._expert_buckets: list[Bucket] = []
        if model.experts:
            experts = [weight for weight in self.weights(0) if weight.is_expert]
            self._expert_buckets = plan_buckets(experts, parallel, pp, self._replicas)

    def weights(self, dp: int) -> list[Weight]:
        """All parameters of one of the ranks, those that others store included."""
        ep, _ = self.parallel.expert_coordinates(self.tp, dp)
        if ep not in self._stages:
            self._stages[ep] = stage_weights(self.model, self.parallel, self.tp, self.pp, ep)
        return self._stages[ep]

    def optimizers(self, dp: int) -> list[tuple[Optimizer, int]]:
        """Of one of the ranks, each with its rank in it."""
        if not self.model.experts:
            return [(self._dense, dp)]
        ep, replica = self.parallel.expert_coordinates(self.tp, dp)
        prefix = f"{self._chained[1]}optimizer.distributed.dp_group_idx_{ep + self.parallel.ep * self.pp}"
        return [(self._dense, dp), (Optimizer(prefix, self._expert_buckets, self._replicas), replica)]

    def _optimizer(self, number: int, weights: list[Weight], shards: int, group: int) -> Optimizer:
        prefix = f"{self._chained[number]}optimizer.distributed.dp_group_idx_{group}"
        return Optimizer(prefix, plan_buckets(weights, self.parallel, self.pp, shards), shards)

    def placed(self) -> list[list[Fragment]]:
        """The model's fragments that each rank stores: Megatron's greedy distribution (exchange_utils.py).

        What fewest ranks hold is placed first, then what is largest, on the rank that has least yet.
        """
        ranks = self.parallel.dp
        loads = [sum(12 * o.elements(rank) for o, rank in self.optimizers(dp)) for dp in range(ranks)]
        found: list[list[Fragment]] = [[] for _ in range(ranks)]
        dense = [w for w in self.weights(0) if not w.is_expert and (w.is_split or self.tp == 0)]
        held = [
            (self._holders(ep), self._experts(ep))
            for ep in range(self.tp, self.parallel.ep, self.parallel.tp)
        ]
        held = sorted((pair for pair in held if pair[1]), key=lambda pair: len(pair[0]))
        for holders, weights in [*held, (list(range(ranks)), dense)]:
            heap = [(loads[dp], dp) for dp in holders]
            heapq.heapify(heap)
            shards = [fragment for weight in weights for fragment in weight.fragments()]
            for fragment in sorted(shards, key=lambda f: (-f.bytes, f.key, f.offset)):
                load, dp = heap[0]
                found[dp].append(fragment)
                loads[dp] = load + fragment.bytes
                heapq.heapreplace(heap, (loads[dp], dp))
        return found

    def _holders(self, ep: int) -> list[int]:
        ranks = range(self.parallel.dp)
        return [dp for dp in ranks if self.parallel.expert_coordinates(self.tp, dp)[0] == ep]

    def _experts(self, ep: int) -> list[Weight]:
        holders = self._holders(ep)
        return [weight for weight in self.weights(holders[0]) if weight.is_expert] if holders else []

    def objects(self, dp: int) -> list[str]:
        """The objects that one of the ranks stores; they are not distributed."""
        found = [key for o, rank in self.optimizers(dp) if rank == 0 for key in o.objects()]
        _, replica = self.parallel.expert_coordinates(self.tp, dp)
        layers = self.model.layers
        if self.tp == dp == 0:
            names = [
                "self_attention.core_attention",
                "self_attention.linear_proj",
                "self_attention.linear_qkv",
            ]
            names += [] if self.model.experts else ["mlp.linear_fc1", "mlp.linear_fc2"]
            for layer in stage_layers(self.model, self.parallel, self.pp):
                found += [f"decoder.layers.{name}._extra_state/shard_{layer}_{layers}" for name in names]
            if self.pp == self.parallel.pp - 1:
                found.append(f"decoder.final_layernorm._extra_state/{_WHOLE}")
            if self.pp == 0:
                found.append(f"common_state/{_WHOLE}")
        if replica == 0:
            found += [
                f"{weight.key.removesuffix('weight')}_extra_state"
                f"/shard_{weight.offsets[0][0]}.{weight.offsets[0][1]}_{layers}.{self.model.experts}"
                for weight in self.weights(dp)
                if weight.is_expert
            ]
        if dp == 0:
            found.append(f"rng_state/shard_{self.pp}.{self.tp}_{self.parallel.pp}.{self.parallel.tp}")
        return found


def rank_states(model: Model, parallel: Parallel) -> Iterator[RankState]:
    """What each rank stores, from rank 0 on."""
    for pp in range(parallel.pp):
        groups = [Group(model, parallel, tp, pp) for tp in range(parallel.tp)]
        placed = [group.placed() for group in groups]
        for dp in range(parallel.dp):
            for group, of_group in zip(groups, placed, strict=True):
                fragments, eager = list(of_group[dp]), [False] * len(of_group[dp])
                for optimizer, rank in group.optimizers(dp):
                    for fragment, is_padding in optimizer.fragments(rank):
                        fragments.append(fragment)
                        eager.append(is_padding)
                yield RankState(fragments, eager, group.objects(dp))
