"""What every rank of a large Megatron training stores: names, places and sizes, no data.

Follows `--ckpt-fully-parallel-save` and `dp_reshardable`. tests/multirank/test_scale.py compares it with what
real models and optimizers store.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator

from benchmarks.scale.buckets import WHOLE, Bucket, Optimizer, plan_buckets
from benchmarks.scale.models import Model, Parallel, Weight, stage_layers, stage_weights
from megatron_datastates.format.values import Fragment


@dataclasses.dataclass(frozen=True)
class RankState:
    """What one rank stores; `eager` says which fragments are copied before the save returns."""

    fragments: list[Fragment]
    eager: list[bool]
    objects: list[str]


class Group:
    """The data-parallel ranks of one tensor-parallel and one pipeline rank."""

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
        """Returns all parameters that a rank holds, also those that other ranks store."""
        ep, _ = self.parallel.expert_coordinates(self.tp, dp)
        if ep not in self._stages:
            self._stages[ep] = stage_weights(self.model, self.parallel, self.tp, self.pp, ep)
        return self._stages[ep]

    def optimizers(self, dp: int) -> list[tuple[Optimizer, int]]:
        """Returns a rank's optimizers, each with the rank's number in it."""
        if not self.model.experts:
            return [(self._dense, dp)]
        ep, replica = self.parallel.expert_coordinates(self.tp, dp)
        prefix = f"{self._chained[1]}optimizer.distributed.dp_group_idx_{ep + self.parallel.ep * self.pp}"
        return [(self._dense, dp), (Optimizer(prefix, self._expert_buckets, self._replicas), replica)]

    def _optimizer(self, number: int, weights: list[Weight], shards: int, group: int) -> Optimizer:
        prefix = f"{self._chained[number]}optimizer.distributed.dp_group_idx_{group}"
        return Optimizer(prefix, plan_buckets(weights, self.parallel, self.pp, shards), shards)

    def placed(self) -> list[list[Fragment]]:
        """Returns the model's fragments by the rank that stores them.

        Megatron's greedy rule (exchange_utils.py): fragments that the fewest ranks hold are placed first,
        then the largest, each on the rank with the fewest bytes so far.
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
        """Returns the keys of the objects that a rank stores; Megatron does not distribute them."""
        found = [key for o, rank in self.optimizers(dp) if rank == 0 for key in o.objects()]
        _, replica = self.parallel.expert_coordinates(self.tp, dp)
        if self.tp == dp == 0:
            found += self._objects_of_first_rank()
        if replica == 0:
            found += [
                f"{weight.key.removesuffix('weight')}_extra_state"
                f"/shard_{weight.offsets[0][0]}.{weight.offsets[0][1]}_{self.model.layers}.{self.model.experts}"
                for weight in self.weights(dp)
                if weight.is_expert
            ]
        if dp == 0:
            found.append(f"rng_state/shard_{self.pp}.{self.tp}_{self.parallel.pp}.{self.parallel.tp}")
        return found

    def _objects_of_first_rank(self) -> list[str]:
        names = [f"self_attention.{name}" for name in ("core_attention", "linear_proj", "linear_qkv")]
        names += [] if self.model.experts else ["mlp.linear_fc1", "mlp.linear_fc2"]
        layers = self.model.layers
        found = [
            f"decoder.layers.{name}._extra_state/shard_{layer}_{layers}"
            for layer in stage_layers(self.model, self.parallel, self.pp)
            for name in names
        ]
        if self.pp == self.parallel.pp - 1:
            found.append(f"decoder.final_layernorm._extra_state/{WHOLE}")
        if self.pp == 0:
            found.append(f"common_state/{WHOLE}")
        return found


def rank_states(model: Model, parallel: Parallel) -> Iterator[RankState]:
    """Yields what each rank stores, in the order of ranks."""
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
