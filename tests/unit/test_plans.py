"""Plans that are kept between saves: used again only for what they were made for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatron_datastates.config import MIB
from megatron_datastates.pipeline.load import Checkpoint
from megatron_datastates.pipeline.plans import Plans, StatePlan
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.providers.base import Mutability, ObjectSource, Place, Tensors
from megatron_datastates.providers.tensors import TensorProvider
from tests.unit.states import OPTIONS, new_saver, save

LAZY = Mutability.AT_FENCE


def tensors_of(*entries: tuple[str, torch.Tensor, Mutability, Place | None]) -> Tensors:
    found = Tensors()
    for entry in entries:
        found.add(*entry)
    return found


def state(
    key: str = "w",
    tensor: torch.Tensor | None = None,
    mutability: Mutability = LAZY,
    place: Place | None = None,
) -> Tensors:
    fixed = ("other", torch.ones(3), LAZY, None)
    return tensors_of(fixed, (key, torch.ones(4, 6) if tensor is None else tensor, mutability, place))


def planned(plans: Plans, tensors: Tensors, objects: tuple[str, ...] = ()) -> StatePlan:
    return plans.find(tensors, list(objects))[0]


def test_equal_structures_share_a_plan_wherever_their_memory_is() -> None:
    plans = Plans(4)
    first = planned(plans, state(tensor=torch.zeros(4, 6)), ("x",))
    assert planned(plans, state(tensor=torch.ones(9, 6)[2:6]), ("x",)) is first
    assert len(plans) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda: state(key="v"),
        lambda: state(tensor=torch.ones(6, 4)),
        lambda: state(tensor=torch.ones(6, 4).t()),
        lambda: state(tensor=torch.ones(4, 12)[:, ::2]),
        lambda: state(tensor=torch.ones(4, 6, dtype=torch.int32)),
        lambda: state(mutability=Mutability.NOW),
        lambda: state(mutability=Mutability.NEVER),
        lambda: state(place=Place((8, 6), (4, 0), (4, 6))),
        lambda: tensors_of(("w", torch.ones(4, 6), LAZY, None)),
        lambda: tensors_of(("w", torch.ones(4, 6), LAZY, None), ("other", torch.ones(3), LAZY, None)),
    ],
    ids=[
        "key",
        "shape",
        "strides",
        "gaps",
        "dtype",
        "eager",
        "never",
        "place",
        "fewer",
        "order",
    ],
)
def test_a_structure_that_differs_in_anything_has_a_plan_of_its_own(other: Callable[[], Tensors]) -> None:
    plans = Plans(4)
    first = planned(plans, state())
    assert planned(plans, other()) is not first
    assert planned(plans, state()) is first


def test_other_objects_make_another_plan() -> None:
    plans = Plans(4)
    assert planned(plans, state(), ("x",)) is not planned(plans, state(), ("y",))


def test_a_view_that_became_conjugated_or_negated_is_not_taken_for_plain_memory() -> None:
    plans = Plans(4)
    pair = torch.tensor([1 + 2j, 3 - 4j])
    plain = state(tensor=pair)
    first = planned(plans, plain)
    plan, found = plans.find(state(tensor=pair.conj()), [])
    assert torch.equal(torch.view_as_real(found.tensors[1]), torch.view_as_real(pair.conj().resolve_conj()))
    assert plan is not first and found.mutability[1] is Mutability.NEVER  # a fresh copy
    imaginary = state(tensor=torch.view_as_real(pair)[:, 1])
    second = planned(plans, imaginary)
    plan, found = plans.find(state(tensor=pair.conj().imag), [])
    assert plan is not second and found.tensors[1].tolist() == [-2.0, 4.0] and not found.tensors[1].is_neg()


def test_the_plans_used_last_are_kept() -> None:
    plans = Plans(2)
    a, b, c = state("a"), state("b"), state("c")
    first = planned(plans, a)
    planned(plans, b)
    assert planned(plans, a) is first
    planned(plans, c)  # drops b
    assert planned(plans, a) is first and len(plans) == 2


def test_a_plan_that_cannot_be_made_leaves_the_others(tmp_path: Path) -> None:
    plans = Plans(2)
    first = planned(plans, state())
    with pytest.raises(Exception, match="cannot store"):
        planned(plans, state(place=Place((5,), (0,), (5,))))
    assert planned(plans, state()) is first


def test_memory_that_a_tensor_is_given_later_is_not_what_is_saved(tmp_path: Path) -> None:
    """As with `parameter.data = other` before the copy: the old memory must live until it has been copied."""
    saver = new_saver(copy_limit=16 * MIB)
    wanted = torch.arange(4 * MIB, dtype=torch.int32)
    parameter = torch.nn.Parameter(wanted.clone(), requires_grad=False)
    publication = saver.start(tmp_path / "c", TensorProvider({"w": parameter}, Mutability.AT_FENCE))
    parameter.data = torch.zeros(1, dtype=torch.int32)
    spoiled = torch.full((4 * MIB,), -1, dtype=torch.int32)  # takes the old memory, were it free
    assert publication.wait() is Outcome.PUBLISHED, publication.error
    saver.close()
    assert torch.equal(Checkpoint.open(tmp_path / "c", OPTIONS).read_tensor("w"), wanted) and spoiled[0] == -1


class SlowObject:
    """An object whose serialization ends when the tensors are in the file."""

    key = "slow"

    def __init__(self) -> None:
        self.tensors_written = threading.Event()

    def secured(self) -> SlowObject:
        return self

    def serialize(self) -> bytes:
        assert self.tensors_written.wait(30), "tensors wait for the object"
        time.sleep(0.01)
        return b"serialized"


class TensorsAndOne(TensorProvider):
    def __init__(self, tensors: dict[str, torch.Tensor], item: SlowObject) -> None:
        super().__init__(tensors, Mutability.AT_FENCE)
        self._item = item

    def objects(self) -> tuple[ObjectSource, ...]:
        return (self._item,)


@pytest.fixture
def slow_object() -> Iterator[SlowObject]:
    item = SlowObject()
    yield item
    item.tensors_written.set()


def test_tensors_stream_to_the_disk_while_an_object_is_serialized(
    tmp_path: Path, slow_object: SlowObject
) -> None:
    saver = new_saver()
    tensors = {str(n): torch.full((3 * MIB,), n, dtype=torch.uint8) for n in range(9)}  # of 8 MiB of slots
    publication = saver.start(tmp_path / "c", TensorsAndOne(tensors, slow_object))
    rank_save, deadline = publication.save, time.monotonic() + 30
    while (written := native_status(rank_save)["bytes_written"]) < 27 * MIB:
        assert time.monotonic() < deadline, f"only {written} bytes were written beside the object"
        time.sleep(0.001)
    slow_object.tensors_written.set()
    assert publication.wait() is Outcome.PUBLISHED, publication.error
    times = rank_save.times()
    assert times["staging"] < times["serializing"] < times["writing"] < times["durable"]
    saver.close()
    assert Checkpoint.open(tmp_path / "c", OPTIONS).read_tensor("8")[0] == 8


def native_status(rank_save: object) -> dict[str, int]:
    return rank_save._save.status()  # type: ignore[attr-defined, no-any-return]


def test_space_for_objects_is_guessed_from_the_save_before(tmp_path: Path) -> None:
    saver = new_saver()
    for name in "ab":
        save(saver, tmp_path / name, {"w": torch.ones(4)}, {"x": list(range(1000))})
    (plan,) = saver.run.plans._plans
    assert plan.object_bytes > 1000
    saver.close()
