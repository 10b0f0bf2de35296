"""What all ranks must have alike, and how one sum shows whether they do.

Ranks of other releases may exchange records of another size, and ranks with other options may make other
collective calls: both would hang until process groups time out. They are compared in the first call of a
world that this package makes (session.py).

Belongs here: what is compared, and the text of a difference. Does not belong here: collective calls.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping, Sequence

from megatron_datastates.config import Options
from megatron_datastates.pipeline.publishing.polls import Flags
from megatron_datastates.pipeline.saving.records import RECORD_BYTES

_PACKAGE = "megatron_datastates"  # imported by name: import-linter follows all that it offers to programs
TERMS = 5  # numbers that `terms_of` returns


def facts_of(options: Options) -> dict[str, str]:
    """Returns what a rank must have as all others have it, as text, by what people call it."""
    version = importlib.import_module(_PACKAGE).__version__
    release = f"{version} (records of {RECORD_BYTES} bytes, {len(Flags._fields)} flags)"
    named = {f"--datastates-{name.replace('_', '-')}": text for name, text in options.of_all_ranks().items()}
    return {_PACKAGE: release, **named}


def digest_of(facts: Mapping[str, str]) -> bytes:
    """Returns a digest that is the same for the same facts only."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()


def difference(of_ranks: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    """Returns the text of an error: how the first rank that differs from rank 0 does.

    Args:
        of_ranks: each rank's node and facts; not all facts are the same.
    """
    (node, first), others = of_ranks[0], [facts != of_ranks[0][1] for _, facts in of_ranks]
    rank = others.index(True)
    other_node, other = of_ranks[rank]
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    lines = [f"{name} is {other.get(name)!r}, not {first.get(name)!r}" for name in names]
    return (
        f"ranks differ: on rank {rank} (node {other_node}), {'; '.join(lines)} as on rank 0 (node {node}); "
        f"{sum(others)} of {len(others)} ranks are not as rank 0. Start all with the same installation of "
        "megatron_datastates, arguments and MEGATRON_DATASTATES_* variables"
    )


def terms_of(digest: bytes) -> list[int]:
    """Returns what ranks add up to see whether all have the same digest (`are_equal`)."""
    # Of 20 bits each, so that the squares of millions of ranks add up to less than 63 bits.
    numbers = [int.from_bytes(digest[at : at + 3], "little") >> 4 for at in (0, 3)]
    return [1, *numbers, *(number * number for number in numbers)]


def are_equal(sums: Sequence[int]) -> bool:
    """Returns whether all digests were equal. Ranks that added zeros do not count.

    Numbers are if and only if the square of their sum is their count times the sum of their squares.
    """
    count, one, other, one_squared, other_squared = sums
    return one * one == count * one_squared and other * other == count * other_squared
