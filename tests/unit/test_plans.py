"""Plans that are kept between saves: used again only for what they were made for."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.config import MIB
from megatron_datastates.engine import exchange
from megatron_datastates.errors import MismatchError, SaveFailedError
from megatron_datastates.format.tail import Kind
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.saving.plans import Memory, Plans, StatePlan
from megatron_datastates.plan.layout import TailItem
from megatron_datastates.providers.base import CopyBudget, Entry, Mutability, Place, Tensors, Write
from megatron_datastates.providers.objects import ObjectSource
from megatron_datastates.providers.tensors import TensorProvider
from tests.unit.states import KNOWN_DTYPES, SMALL, new_saver, save

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:.*[qQ]uant")
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


def stored(memory: Memory, number: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Returns the bytes that a save would read."""
    data = ctypes.string_at(int(memory.addresses[number]), count * dtype.itemsize)
    return torch.frombuffer(bytearray(data), dtype=dtype)


def planned(plans: Plans, tensors: Tensors, objects: tuple[str, ...] = ()) -> StatePlan:
    return plans.find(tensors, [TailItem(Kind.OBJECT, key) for key in objects])[0]


@pytest.fixture(params=["described by DLPack", "described by attributes"], autouse=True)
def description(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses each of both ways to compare structures; torch before 2.10 has but one."""
    if request.param == "described by attributes":
        monkeypatch.setattr(exchange, "_EXCHANGE", None)
    elif exchange._EXCHANGE is None:
        pytest.skip("this torch has no exchange API")


def test_addresses_are_those_of_the_first_elements() -> None:
    views = [torch.ones(4, 6), torch.ones(9, 6)[2:6], torch.ones(4, 12)[:, 3::2], torch.ones(4, 6).t()]
    for view in views:
        _, memory = Plans(1).find(state(tensor=view), [])
        assert memory.addresses.tolist()[1] == view.data_ptr()


def test_what_has_no_size_is_an_error_that_says_so() -> None:
    """And no SystemError of the call that would follow."""
    with pytest.raises(TypeError, match="has no len"):
        exchange.measured([object()])


def test_a_dtype_that_dlpack_has_no_word_for_is_compared_by_attributes() -> None:
    plans = Plans(4)
    quantized = torch.quantize_per_tensor(torch.ones(4, 6), 0.1, 0, torch.quint8)
    assert exchange.describe([quantized]) is None
    both = tensors_of(("a", torch.ones(2), LAZY, None), ("b", torch.ones(2, dtype=torch.uint16), LAZY, None))
    assert planned(plans, both) is planned(plans, both)


@pytest.mark.parametrize("name", KNOWN_DTYPES)
def test_dtypes_of_one_size_are_distinguished(name: str) -> None:
    """No dtype of the format has the description of another."""
    dtype = getattr(torch, name)
    mine = state(tensor=torch.empty(4, 6, dtype=dtype))
    plans = Plans(len(KNOWN_DTYPES))
    own = planned(plans, mine)
    for other in KNOWN_DTYPES:
        if other != name:
            assert planned(plans, state(tensor=torch.empty(4, 6, dtype=getattr(torch, other)))) is not own
    assert planned(plans, mine) is own


@pytest.mark.parametrize("whole", ["uint8", "int8"])
@pytest.mark.parametrize("bits", range(1, 8))
def test_integers_of_fewer_bits_are_refused_after_whole_bytes_too(whole: str, bits: int) -> None:
    """DLPack describes them as whole bytes."""
    narrow = getattr(torch, f"{whole[:-1]}{bits}", None)
    if narrow is None:
        pytest.skip("this torch has no such dtype")
    plans, tensor = Plans(4), torch.ones(4, dtype=getattr(torch, whole))
    own = planned(plans, state(tensor=tensor))
    with pytest.raises(MismatchError, match=f"{whole[:-1]}{bits}, which cannot be saved"):
        planned(plans, state(tensor=torch.empty(4, dtype=narrow)))
    assert planned(plans, state(tensor=tensor)) is own


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
    conjugated = pair.conj()
    plan, memory = plans.find(state(tensor=conjugated), [])
    assert plan is not first
    assert plan.structure.mutability == [LAZY, Mutability.NEVER]  # a fresh copy; not the other
    assert stored(memory, 1, torch.complex64, 2).tolist() == [1 - 2j, 3 + 4j]
    second = planned(plans, state(tensor=torch.view_as_real(pair)[:, 1]))
    plan, memory = plans.find(state(tensor=conjugated.imag), [])
    assert plan is not second
    assert stored(memory, 1, torch.float32, 2).tolist() == [-2.0, 4.0]


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
    with pytest.raises(Exception, match="as many elements"):
        planned(plans, state(place=Place((5,), (0,), (5,))))
    assert planned(plans, state()) is first


def test_memory_that_a_tensor_gets_later_is_not_saved(tmp_path: Path) -> None:
    """The old memory must live until it has been copied, as with `parameter.data = other` before the copy."""
    saver = new_saver(copy_limit=16 * MIB)
    wanted = torch.arange(4 * MIB, dtype=torch.int32)
    parameter = torch.nn.Parameter(wanted.clone(), requires_grad=False)
    publication = saver.start(tmp_path / "c", TensorProvider({"w": parameter}, Mutability.AT_FENCE))
    parameter.data = torch.zeros(1, dtype=torch.int32)
    spoiled = torch.full((4 * MIB,), -1, dtype=torch.int32)  # takes the old memory, were it free
    assert publication.wait() is Outcome.PUBLISHED, publication.error
    saver.close()
    assert torch.equal(ds.open(tmp_path / "c", **SMALL).read_tensor("w"), wanted) and spoiled[0] == -1


def come_back_smaller(tensor: torch.Tensor, size: int) -> bool:
    """Frees the memory, and tries to get less at the same address; returns whether that worked."""
    storage, kept = tensor.untyped_storage(), []
    address = storage.data_ptr()
    for _ in range(60):
        storage.resize_(0)
        storage.resize_(size)
        if storage.data_ptr() == address:
            return True
        kept.append(torch.empty(size // 4))
    return False


def test_memory_that_came_back_smaller_at_the_same_address_is_not_left(tmp_path: Path) -> None:
    """A structure whose addresses are as at the last save is not looked at again, unless memory was freed."""
    tried = 0
    for size, part in itertools.product((1000, 5000, 20_000, 30_000), (0.5, 0.75, 0.9)):
        w = torch.full((size,), 1.0)
        ds.save({"w": w}, tmp_path / "whole", **SMALL)
        if come_back_smaller(w, 4 * int(size * part)):
            tried += 1
            with pytest.raises(SaveFailedError, match="'w' ends beyond its storage of"):
                ds.save({"w": w}, tmp_path / "part", **SMALL)
    if not tried:
        pytest.skip("the allocator did not give any memory again")


class SlowObject:
    """An object whose serialization ends when the tensors are in the file."""

    key = "slow"
    mutability = Mutability.NEVER
    kind = Kind.OBJECT

    def __init__(self) -> None:
        self.tensors_written = threading.Event()

    def snapshot(self, budget: CopyBudget) -> SlowObject:
        raise AssertionError("nobody changes it")

    def write(self, write: Write) -> bytes:
        assert self.tensors_written.wait(30), "tensors wait for the object"
        time.sleep(0.01)
        return ObjectSource(self.key, 1, Mutability.NEVER).write(write)


class TensorsAndOne(TensorProvider):
    def __init__(self, tensors: dict[str, torch.Tensor], item: SlowObject) -> None:
        super().__init__(tensors, Mutability.AT_FENCE)
        self._item = item

    def entries(self) -> Iterator[Entry]:
        yield from super().entries()
        yield self._item


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
    # "serializing" has a clock of its own, which starts a moment earlier.
    assert times["staging"] < times["serializing"] and times["staging"] < times["writing"] < times["durable"]
    saver.close()
    assert ds.open(tmp_path / "c", **SMALL).read_tensor("8")[0] == 8


def native_status(rank_save: object) -> dict[str, int]:
    return rank_save._save.status()  # type: ignore[attr-defined, no-any-return]


def test_space_for_objects_is_guessed_from_the_save_before(tmp_path: Path) -> None:
    saver = new_saver()
    for name in "ab":
        save(saver, tmp_path / name, {"w": torch.ones(4)}, {"x": list(range(1000))})
    (plan,) = saver.session.plans._plans
    assert plan.tail_bytes > 1000
    saver.close()
