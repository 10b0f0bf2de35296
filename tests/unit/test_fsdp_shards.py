"""What Megatron-FSDP's shards sum up to; which calls find it out is in tests/multirank/test_dcp.py."""

import random
from collections import defaultdict

import numpy as np

from megatron_datastates.mcore.training.fsdp_shards import _RECORD, sums_of


def by_hand(everyone: list[bytes]) -> dict[int, int]:
    sums: dict[int, int] = defaultdict(int)
    for records in everyone:
        for key, size in np.frombuffer(records, _RECORD).tolist():
            sums[key] += size
    return sums


def test_sizes_are_summed_by_key_whatever_ranks_have() -> None:
    """A rank has records of any of the tensors, in any order, and of some that are not asked for."""
    drawn = random.Random(1)
    extremes = [0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
    for _ in range(300):
        tensors = drawn.sample(extremes, 3) + [drawn.getrandbits(64) for _ in range(drawn.randrange(8))]
        everyone = []
        for _ in range(drawn.randrange(6)):
            those = drawn.sample(tensors, drawn.randint(0, len(tensors)))
            sized = [(key, drawn.choice([1, 7, 1 << 52])) for key in those]
            everyone.append(np.array(sized, _RECORD).tobytes())
        asked = sorted(drawn.sample(tensors, drawn.randint(1, len(tensors))))
        sums = by_hand(everyone)
        assert sums_of(np.array(asked, np.uint64), everyone).tolist() == [sums[key] for key in asked]
