"""What DCP has planned, as entries of a save."""

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from megatron_datastates.dcp.items import PlannedState
from megatron_datastates.providers.base import Mutability, Tensors


def test_small_tensors_of_the_host_that_may_change_at_once_are_cloned_up_to_a_limit() -> None:
    """The trainer would wait for all that shares a slot with them."""
    small, large = torch.zeros(5), torch.zeros(1 << 18)  # the latter is all of the limit
    planner = DefaultSavePlanner()
    planner.set_up_planner({"small": small, "large": large, "promised": torch.zeros(3)}, is_coordinator=True)
    plan = planner.create_local_plan()
    state = PlannedState(
        plan, planner, lambda: lambda t: Mutability.NOW if t.numel() != 3 else Mutability.AT_FENCE
    )

    tensors = next(state.entries())
    small += 1

    assert isinstance(tensors, Tensors)
    found = {one.key: one for one in tensors.sources()}
    assert found["small"].mutability is Mutability.NEVER and not found["small"].tensor.any()
    assert (
        found["large"].mutability is Mutability.NOW and found["large"].tensor.data_ptr() == large.data_ptr()
    )
    assert found["promised"].mutability is Mutability.AT_FENCE
