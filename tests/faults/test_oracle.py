"""The campaign's judge: what it takes for an iteration, and what it does not."""

import math
from typing import Any

import numpy as np
import pytest

from tests.faults.campaign import oracle

CANDIDATES = [1, 2, 3]


def loaded(iteration: int, rank: int, ranks: int) -> dict[str, Any]:
    """Returns what a load of that iteration returns on a rank."""
    found: dict[str, Any] = {
        kind.name: oracle.tensor(kind, iteration, rank, ranks).detach().clone() for kind in oracle.KINDS
    }
    names = ["shared", "common", *(f"own{piece}" for piece in oracle.pieces(rank, ranks))]
    return found | {name: oracle.thing(name, iteration) for name in names} | {"iteration": iteration}


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2), (3, 4)])
def test_one_iteration_is_whole(rank: int, ranks: int) -> None:
    verdict = oracle.decide(loaded(2, rank, ranks), CANDIDATES, rank, ranks)
    assert verdict == oracle.Verdict("whole", 2)


@pytest.mark.parametrize(
    "name", ["weight", "same", "quantized", "turned", "shared", "own1", "common", "iteration"]
)
def test_one_item_of_another_iteration_is_a_mixture(name: str) -> None:
    found = loaded(2, 0, 2) | {name: loaded(3, 0, 2)[name]}
    verdict = oracle.decide(found, CANDIDATES, 0, 2)
    assert verdict.what == "violated" and "mixed" in verdict.why


@pytest.mark.parametrize(
    "kind", [kind for kind in oracle.KINDS if kind.name != "nothing"], ids=lambda k: k.name
)
def test_one_bit_in_any_tensor_is_torn(kind: oracle.Kind) -> None:
    found = loaded(2, 0, 2)
    data = found[kind.name].contiguous()
    oracle.memory(data)[-1] ^= 0x40
    found[kind.name] = data
    verdict = oracle.decide(found, CANDIDATES, 0, 2)
    assert verdict.what == "violated" and f"{kind.name} is of no iteration" in verdict.why


def test_half_of_a_tensor_of_another_iteration_is_torn() -> None:
    found = loaded(2, 0, 2)
    found["weight"][1:] = loaded(3, 0, 2)["weight"][1:]
    assert oracle.decide(found, CANDIDATES, 0, 2).what == "violated"


def test_an_iteration_that_nobody_saved_is_torn() -> None:
    assert oracle.decide(loaded(9, 0, 2), CANDIDATES, 0, 2).what == "violated"


@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_of_ranks_are_the_whole(ranks: int) -> None:
    for kind in oracle.KINDS:
        if kind.split:
            parts = np.concatenate([kind.index(rank, ranks).reshape(-1) for rank in range(ranks)])
            assert np.array_equal(np.sort(parts), np.arange(parts.size))
            assert parts.size == math.prod(kind.shape)
