"""What all ranks must have alike, and how a difference is said.

Ranks of other releases may exchange records of another size, and ranks with other options may make other
collective calls: both would hang until process groups time out. They are compared in the first call of a
world that this package makes (session.py).

Does not belong here: collective calls, and the numbers that show a difference (collectives.py).
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
