"""Tensors as fragments: which bytes are copied, from where, and how long they stay unchanged."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from megatron_datastates.errors import MismatchError
from megatron_datastates.pipeline.saving.plans import Plans
from megatron_datastates.providers.base import Mutability, Place, Tensors
from megatron_datastates.providers.collect import collect
from megatron_datastates.providers.tensors import TensorProvider
from tests.unit.states import KNOWN_DTYPES, State, bits, random_tensor

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:Sparse", "ignore:.*[qQ]uant")
LAZY = Mutability.AT_FENCE


class Source:
    """One tensor with the plan that a save makes for it."""

    def __init__(
        self, key: str, tensor: torch.Tensor, mutability: Mutability, place: Place | None = None
    ) -> None:
        given = Tensors()
        given.add(key, tensor, mutability, place)
        plan, memory = Plans(1).find(given, [])
        (self.fragment,) = plan.structure.fragments()
        (self.spans,) = plan.structure.spans()
        (self.mutability,) = plan.structure.mutability
        (self.device,) = plan.structure.devices()
        (self.address,), (self.owner,) = memory.addresses.tolist(), memory.owners


def copied(source: Source) -> bytes:
    """Returns what the engine would copy: all rows, one after another."""
    spans = source.spans
    starts = [source.address + int(start) for start in spans.a_starts]
    pieces = [start + i * spans.a_step for start in starts for i in range(spans.rows)]
    stored = b"".join(ctypes.string_at(address, spans.row_bytes) for address in pieces)
    assert len(stored) == source.fragment.bytes
    return stored


def matrix(rows: int = 6, columns: int = 1000) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)


VIEWS = {
    "dense": matrix(),
    "rows": matrix()[2:5],
    "columns, long": matrix()[:, 100:900],
    "columns, short": matrix()[:, 10:20],
    "every other row": matrix()[::2],
    "every other column": matrix()[:, ::2],
    "transposed": matrix().t(),
    "permuted": torch.arange(24 * 1000.0).reshape(2, 3, 4, 1000).permute(2, 0, 1, 3),
    "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded rows": torch.arange(1000.0).expand(5, 1000),
    "expanded columns": torch.arange(5.0)[:, None].expand(5, 1000),
    "expanded scalar": torch.tensor(3.0).expand(4, 4),
    "diagonal": matrix(30, 30).diagonal(),
    "one element": matrix()[3:4, 7:8],
    "scalar": torch.tensor(1.5),
    "scalar of a matrix": matrix()[3, 7],
    "empty": torch.empty(0),
    "empty rows": torch.empty(0, 7),
    "empty columns, strided": matrix()[::2, 5:5],
    "a parameter": torch.nn.Parameter(matrix()),
    "a result of autograd": torch.nn.Parameter(matrix()) * 2,
}


@pytest.mark.parametrize("tensor", VIEWS.values(), ids=VIEWS.keys())
def test_the_elements_are_copied_in_row_major_order(tensor):
    source = Source("w", tensor, LAZY)
    assert copied(source) == bits(tensor)
    assert source.fragment.shape == source.fragment.global_shape == tuple(tensor.shape)
    assert source.device is None


@pytest.mark.parametrize("name", KNOWN_DTYPES)
def test_every_dtype_of_the_format_is_copied_bit_by_bit(name):
    tensor = random_tensor(getattr(torch, name), (3, 5))
    source = Source("w", tensor, LAZY)
    assert source.fragment.dtype == name
    assert copied(source) == bits(tensor)


@pytest.mark.parametrize("name", KNOWN_DTYPES)
def test_every_dtype_is_copied_from_a_transposed_tensor(name):
    tensor = random_tensor(getattr(torch, name), (3, 5))
    elements = np.frombuffer(bits(tensor), np.uint8).reshape(3, 5, tensor.itemsize)
    assert copied(Source("w", tensor.t(), LAZY)) == elements.transpose(1, 0, 2).tobytes()


@pytest.mark.parametrize("mutability", Mutability)
@pytest.mark.parametrize("tensor", VIEWS.values(), ids=VIEWS.keys())
def test_every_tensor_is_read_in_place(tensor, mutability):
    """No copy is made before the engine's own, which on a device would take memory there."""
    source = Source("w", tensor, mutability)
    assert source.mutability is mutability
    assert source.address == tensor.data_ptr()
    assert source.owner.data_ptr() == tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("name", "spans"),
    [
        ("dense", (1, 1, 24000)),
        ("columns, long", (1, 6, 3200)),
        ("every other row", (1, 3, 4000)),
        ("every other column", (1, 3000, 4)),  # a row continues at the distance of the one before
        ("transposed", (1000, 6, 4)),
        ("permuted", (4, 6, 4000)),
        ("channels last", (6, 20, 4)),
        ("expanded rows", (1, 5, 4000)),
        ("expanded columns", (5, 1000, 4)),
        ("expanded scalar", (1, 16, 4)),
        ("diagonal", (1, 30, 4)),
        ("scalar of a matrix", (1, 1, 4)),
        ("empty columns, strided", (0, 1, 0)),
    ],
)
def test_strided_tensors_are_few_spans(name, spans):
    """The expected values are: spans, rows per span, bytes per row."""
    found = Source("w", VIEWS[name], LAZY).spans
    assert (len(found.a_starts), found.rows, found.row_bytes) == spans


def test_a_conjugated_view_is_stored_with_its_values():
    tensor = random_tensor(torch.complex64, (4, 100)).nan_to_num().conj()
    assert copied(Source("w", tensor, LAZY)) == bits(tensor) == bits(tensor.resolve_conj())
    assert copied(Source("w", tensor.t(), LAZY)) == bits(tensor.t())


def test_a_negated_view_is_stored_with_its_values():
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert tensor.is_neg()
    assert copied(Source("w", tensor, LAZY)) == torch.tensor([-2.0, 4.0]).numpy().tobytes()


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_a_sparse_tensor_is_refused_and_named(layout):
    tensor = getattr(torch.eye(4), layout)()
    with pytest.raises(MismatchError, match=r"'w'.*sparse"):
        Source("w", tensor, LAZY)


def test_a_tensor_without_memory_is_refused_and_named():
    with pytest.raises(MismatchError, match=r"'w'.*meta"):
        Source("w", torch.empty(4, device="meta"), LAZY)


def test_an_offloaded_tensor_is_refused_and_named():
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)  # as Megatron offloads buffers
    with pytest.raises(MismatchError, match=r"'w' has no memory"):
        Source("w", tensor, LAZY)


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t[60:], lambda t: t.view(8, 8)[:, 1::3]])
def test_a_tensor_in_a_storage_that_was_shrunk_is_refused_and_named(view):
    whole = torch.ones(64)
    tensor = view(whole)
    Source("w", tensor, LAZY)
    whole.untyped_storage().resize_(4 * 61)
    with pytest.raises(MismatchError, match=r"'w' ends beyond its storage of 244 bytes"):
        Source("w", tensor, LAZY)
    Source("w", whole[:1], LAZY)
    Source("w", torch.ones(4)[:0], LAZY)


def test_a_storage_that_is_shrunk_between_saves_is_noticed():
    plans, whole = Plans(2), torch.ones(1 << 20)
    given = Tensors()
    given.add("w", whole, LAZY, None)
    plans.find(given, [])
    whole.untyped_storage().resize_(1 << 20)
    with pytest.raises(MismatchError, match="ends beyond its storage"):
        plans.find(given, [])
    whole.untyped_storage().resize_(1 << 22)
    plans.find(given, [])


def test_a_tensor_that_only_wraps_others_is_refused_and_named():
    wrapper = TwoTensor(torch.ones(4), torch.ones(4))
    with pytest.raises(MismatchError, match=r"'w' has no memory of its own: it is a TwoTensor"):
        Source("w", wrapper, LAZY)


def test_a_dtype_that_the_format_cannot_hold_is_refused():
    with pytest.raises(MismatchError, match="dtype qint8, which cannot be saved"):
        Source("w", torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), LAZY)


def test_a_shard_is_a_fragment_of_its_global_tensor():
    source = Source("w", torch.ones(2, 4), LAZY, Place((3, 8, 4), (1, 6, 0), (1, 2, 4)))
    item = source.fragment
    assert (item.global_shape, item.offset, item.shape, item.bytes) == ((3, 8, 4), (1, 6, 0), (1, 2, 4), 32)


def test_a_shape_of_another_number_of_elements_is_refused():
    with pytest.raises(MismatchError, match=r"\(2, 4\).*of shape \(1, 2, 5\)"):
        Source("w", torch.ones(2, 4), LAZY, Place((1, 2, 5), (0, 0, 0), (1, 2, 5)))


def test_a_provider_yields_its_tensors_as_they_are_at_the_time_of_the_call():
    tensors = {"a": torch.zeros(3)}
    provider = TensorProvider(tensors, LAZY)
    tensors["a"] = torch.ones(3)
    (found,) = provider.entries()
    assert (found.keys, found.mutability, found.places) == (["a"], [LAZY], [None])
    assert found.tensors[0] is tensors["a"]


def test_providers_are_collected_in_order_and_their_keys_begin_with_their_names():
    one = State({"a": torch.ones(1)}, {"x": 1}, LAZY)
    other = State({"b": torch.ones(1)}, {"y": 2}, Mutability.NEVER)
    found = collect({"": one, "other": other})
    tensors = list(zip(found.tensors.keys, found.tensors.mutability, strict=True))
    assert tensors == [("a", LAZY), ("other.b", Mutability.NEVER)]
    assert len(found.tensors) == len(found.tensors.tensors) == len(found.tensors.places) == 2
    assert found.tail_keys == ["x", "other.y"]
    assert [(part.name, part.end_tensor, part.end_tail) for part in found.by_provider] == [
        ("", 1, 1),
        ("other", 2, 2),
    ]
