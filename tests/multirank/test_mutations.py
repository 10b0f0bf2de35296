"""Every kind of training state is saved as it was when the save began, whenever it changes afterwards.

A model with experts and its distributed optimizer are saved twice: at once, and with a slow copy while
arguments, generators, the routers' expert bias (before the step), parameters, main parameters and moments (in
it) change. Both checkpoints must hold the same bits, padding included.
"""

from pathlib import Path

import pytest

from tests.multirank.layouts import EP2, EXPERTS
from tests.support.world import World

pytestmark = pytest.mark.conformance

MODEL = EXPERTS | EP2 | {"hidden_size": 264, "ffn_hidden_size": 392}  # several slots of state a rank


@pytest.mark.parametrize("sharding", ["dp_reshardable", "fully_reshardable"])
def test_what_changes_after_the_save_began_is_not_in_the_checkpoint(
    world: World, tmp_path: Path, sharding: str
) -> None:
    reports = world.run("mutation_ranks:mutate_everything", tmp_path, MODEL, sharding, False)
    met = [rank["under_way"] and rank["fence"] > 0 for rank in reports]
    assert any(met), "the step must come during a copy"
    for rank in reports:
        assert rank["buffers"] and rank["generators"]
        assert rank["lazy"] and rank["eager"]
        assert rank["error"] is None
        assert rank["different"] == []
    if sharding == "dp_reshardable":  # the other kind is gathered into fresh memory on one rank
        assert all(met)
        assert reports[0]["lazy"] > 10 * reports[0]["eager"], "the optimizer's memory is lazy"
        assert reports[0]["zeros"] and all(reports[0]["zeros"]), "padding is zeroed"


def test_promise_broken_before_the_step_fails_the_save(world: World, tmp_path: Path) -> None:
    reports = world.run("mutation_ranks:mutate_everything", tmp_path, MODEL, "dp_reshardable", True)
    assert len({rank["error"] for rank in reports}) == 1
    assert "expert_bias" in reports[0]["error"]
