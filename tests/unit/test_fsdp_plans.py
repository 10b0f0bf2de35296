"""Plans for saves with Megatron-FSDP are what DCP would plan anew, whatever has changed since."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from megatron_datastates.mcore.training import fsdp_plans

uneven = pytest.importorskip("megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor")
State = dict[str, Any]
pytestmark = pytest.mark.usefixtures("world_of_one")


def sharded(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> DTensor:
    mesh = DeviceMesh("cpu", [0])
    local = torch.ones(shape, dtype=dtype, requires_grad=requires_grad)
    made = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    uneven.update_uneven_dtensor_chunk_metadata(made)
    return made


def state() -> State:
    return {
        "model": {"w": sharded(4, 2), "frozen": sharded(3), "none": sharded(0)},
        "groups": [{"lr": 0.1, "betas": (0.9, 0.95), "w": sharded(2)}, {"lr": 0.2}],
        "iteration": 1,
        "plain": torch.arange(3),
        "rng": [1, 2],
    }


def nested_otherwise() -> State:
    """Returns the state with the same keys in the same order, once it is flattened."""
    groups = state()["groups"]
    return {
        key: value
        for name, value in state().items()
        for key, value in (
            [("groups.0", groups[0]), ("groups", [{}, groups[1]])] if name == "groups" else [(name, value)]
        )
    }


def part_of_four(rows: int) -> DTensor:
    """Returns a tensor of four rows of which this rank has so many."""
    mesh = DeviceMesh("cpu", [0])
    made = DTensor.from_local(
        torch.ones(rows, 2), mesh, [Shard(0)], run_check=False, shape=torch.Size((4, 2)), stride=(2, 1)
    )
    uneven.update_uneven_dtensor_chunk_metadata(made)
    return made


def changed(**values: Any) -> Callable[[], State]:
    return lambda: {**state(), **values}


CHANGES: dict[str, Callable[[], State]] = {
    "nothing": state,
    "values": lambda: {**state(), "iteration": 2, "rng": [3], "groups": [{"lr": 0.3, "betas": (0.8, 0.9)}]},
    "a size": lambda: {**state(), "model": {"w": sharded(4, 3), "frozen": sharded(3), "none": sharded(0)}},
    "a dtype": lambda: {**state(), "model": state()["model"] | {"w": sharded(4, 2, dtype=torch.bfloat16)}},
    "a gradient": lambda: {**state(), "model": state()["model"] | {"w": sharded(4, 2, requires_grad=True)}},
    "no elements": lambda: {**state(), "model": state()["model"] | {"w": sharded(0, 2)}},
    "elements": lambda: {**state(), "model": state()["model"] | {"none": sharded(1)}},
    "the plain tensor": changed(plain=torch.arange(4)),
    "a tensor to an object": changed(plain=3),
    "an object to a tensor": lambda: {**state(), "iteration": sharded(1)},
    "a key more": changed(more=5),
    "a key less": lambda: {key: value for key, value in state().items() if key != "rng"},
    "the order": lambda: dict(reversed(state().items())),
    "the nesting": nested_otherwise,
    "another rank's part": lambda: {**state(), "model": state()["model"] | {"w": part_of_four(1)}},
}


def places(items: list[Any]) -> list[Any]:
    """Returns what a save uses of items. Of dtypes and gradients, DCP keeps up to date only the metadata."""
    return [
        (
            item.index,
            item.index.index,
            item.type,
            item.tensor_data and (item.tensor_data.chunk, item.tensor_data.size),
        )
        for item in items
    ]


def fresh(state_dict: State) -> tuple[Any, Any]:
    """Returns what DCP's own planner makes: places and metadata."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state_dict, is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    return places(plans[0].items), metadata


def found(state_dict: State) -> tuple[Any, Any]:
    plan, planner = fsdp_plans.planned(state_dict)
    return places(plan.items), planner.metadata  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_is_as_if_it_were_made_anew(change: str) -> None:
    """And so is the one after it, of a state that is as it was first."""
    for state_dict in (state(), CHANGES[change](), state()):
        assert found(state_dict) == fresh(state_dict)


def test_an_unchanged_plan_is_not_made_anew() -> None:
    first, _ = fsdp_plans.planned(state())
    second, planner = fsdp_plans.planned(state() | {"iteration": 2})
    assert second is first
    found = {item.index.fqn: planner.resolve_data(item) for item in second.items}
    stored = io.BytesIO(found["iteration"].getvalue())
    assert torch.load(stored) == 2, "the planner has the new state"


def test_what_ranks_keep_of_plans_is_forgotten_when_one_cannot_be_planned() -> None:
    fsdp_plans.planned(state())
    ambiguous = state() | {"model.w": 1}
    for _ in range(2):
        with pytest.raises(CheckpointException, match="duplicated flatten key"):
            fsdp_plans.planned(ambiguous)
        assert found(state()) == fresh(state())
