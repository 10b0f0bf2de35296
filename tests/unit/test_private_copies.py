"""Private copies: equal to the original as it was, however the original changes afterwards."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import io
import re
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_datastates.errors import UnsafeObjectError, UntrustedClassError
from megatron_datastates.providers import objects, private
from megatron_datastates.providers.base import CopyBudget, Mutability
from megatron_datastates.providers.objects import ObjectSource, check_saved
from megatron_datastates.providers.private import Copied, NotPlainError


def private_copy(value: Any) -> Copied:
    return private.private_copy(value, CopyBudget(1 << 30))


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Measure:
    metres: int


class Size(Measure, enum.Enum):
    """An enumeration whose members have no hash."""

    SMALL = 1


def tensors() -> st.SearchStrategy[torch.Tensor]:
    return st.lists(st.integers(-9, 9), max_size=5).map(torch.tensor)


def with_attributes(items: dict[Any, Any], names: dict[Any, Any]) -> collections.OrderedDict[Any, Any]:
    made = collections.OrderedDict(items)
    made.__dict__.update(names)
    return made


def plain_data() -> st.SearchStrategy[Any]:
    keys = st.text(max_size=3) | st.integers(0, 9) | st.tuples(st.text(max_size=2), st.integers(0, 9))
    arrays = st.lists(st.floats(allow_nan=False), max_size=4).map(np.array)
    buffers = st.binary(max_size=9).map(io.BytesIO)
    leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
    leaves |= (
        st.binary(max_size=5) | tensors() | arrays | buffers | st.just(Colour.RED) | st.just(torch.bfloat16)
    )
    attributes = st.sampled_from("abc")
    leaves |= st.binary(max_size=5).map(bytearray) | st.sets(st.integers(0, 9)) | st.just(np.float32(2.5))

    def nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        dictionaries = st.dictionaries(keys, inner, max_size=4)
        return (
            st.lists(inner, max_size=4)
            | dictionaries
            | dictionaries.map(collections.OrderedDict)
            | st.builds(with_attributes, dictionaries, st.dictionaries(attributes, inner, max_size=2))
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(attributes, inner).map(lambda names: argparse.Namespace(**names))
        )

    return st.recursive(leaves, nest, max_leaves=12)


def described(value: Any) -> Any:
    """Returns a plain value, which is equal for two objects if and only if they are, types included."""
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        return kind, value.dtype, value.tolist()
    if isinstance(value, np.ndarray):
        return kind, value.dtype, value.tolist()
    if isinstance(value, io.BytesIO):
        return kind, value.getvalue(), value.tell()
    if isinstance(value, argparse.Namespace):
        return kind, described(vars(value))
    if isinstance(value, dict):
        items = [(described(key), described(item)) for key, item in value.items()]
        return kind, items, described(getattr(value, "__dict__", None))
    if isinstance(value, list | tuple):
        return kind, [described(item) for item in value]
    return kind, frozenset(value) if isinstance(value, set) else bytes(
        value
    ) if kind == "bytearray" else value


def spoil(value: Any) -> None:
    """Changes in place everything that can be changed."""
    if isinstance(value, torch.Tensor):
        value.add_(1)
    elif isinstance(value, np.ndarray):
        value[...] = -1
    elif isinstance(value, io.BytesIO):
        value.seek(0, io.SEEK_END)
        value.write(b"more")
    elif isinstance(value, argparse.Namespace):
        spoil(vars(value))
        value.more = 1
    elif isinstance(value, list | tuple):
        for item in value:
            spoil(item)
    elif isinstance(value, dict):
        for item in value.values():
            spoil(item)
        spoil(getattr(value, "__dict__", None))
    if isinstance(value, list | bytearray):
        value.append(7)
    elif isinstance(value, dict):
        value["more"] = 1
    elif isinstance(value, set):
        value.add("more")


def odd_leaves() -> st.SearchStrategy[Any]:
    texts = st.text(st.characters(), max_size=5) | st.just("\ud800") | st.just("x" * 70_000)
    numbers = st.complex_numbers() | st.integers(-(1 << 2100), 1 << 2100) | st.floats()
    torches = st.sampled_from([torch.Size([2, 3]), torch.device("cpu"), torch.device("cuda", 3), torch.int8])
    return texts | numbers | torches | st.just(b"") | st.just(())


def test_a_load_accepts_a_buffer_whose_attributes_were_looked_at() -> None:
    buffer = io.BytesIO(b"abc")
    assert buffer.__getstate__()[2] is None
    private_copy(buffer)  # looks: from now on its pickle has {} in the place of None
    assert buffer.__getstate__()[2] == {}
    stored = ObjectSource("x", buffer).serialize()
    check_saved(stored, "x")
    assert objects.deserialize(stored, "x").getvalue() == b"abc"
    buffer.name = "attribute"
    with pytest.raises(UnsafeObjectError):
        check_saved(ObjectSource("x", buffer).serialize(), "x")


@given(plain_data() | st.dictionaries(odd_leaves(), odd_leaves()) | st.sets(odd_leaves()))
def test_a_load_accepts_every_copy_that_names_nothing(value: Any) -> None:
    named = private_copy(value).named
    if named is not None and not named:
        check_saved(ObjectSource("x", value).serialize(), "x")


def test_a_copy_says_what_it_names() -> None:
    named = private_copy({"a": [1, Colour.RED], "b": (int, Size.SMALL)}).named
    assert named == frozenset({(Colour, "RED"), (Size, "SMALL"), int})
    value: Any
    for value in (np.float32(1), np.zeros(1), torch.zeros(1), {(1, 2): 3}, {(1, 2)}, re.I | re.M):
        assert private_copy([value, Colour.RED]).named is None


def pickle_of(source: ObjectSource) -> bytes:
    found = source.write(lambda data: len(data))
    assert found is not None
    return found


def test_what_a_copy_names_is_checked_until_it_was_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[bytes] = []
    execute = objects._execute_pickle
    monkeypatch.setattr(objects, "_execute_pickle", lambda data: (executed.append(data), execute(data)))
    monkeypatch.setattr(objects, "_accepted", objects._Accepted([], frozenset()))
    source = ObjectSource("x", {"a": Colour.RED}).snapshot(CopyBudget(100))
    assert source is not None
    data = pickle_of(source)

    def check(*, trust: bool = False) -> int:
        before = len(executed)
        objects.check_pickle(data, "x", named=source.named, trust=trust)
        return len(executed) - before

    for _ in range(2):
        with pytest.raises(UntrustedClassError):
            check()
        assert check(trust=True) == 1  # a warning each time
    with torch.serialization.safe_globals([Colour]):
        assert [check() for _ in range(3)] == [1, 0, 0]
    with pytest.raises(UntrustedClassError):
        check()
    with torch.serialization.safe_globals([Colour]):
        objects.check_pickle(data, "x")  # of something that was not copied
        objects.check_pickle(data, "x", named=frozenset())
        assert len(executed) == 7


@given(plain_data())
def test_a_copy_stays_as_the_original_was(value: Any) -> None:
    before = described(value)
    copy = private_copy(value).value
    spoil(value)
    assert described(copy) == before


def test_a_row_of_a_structured_array_is_copied() -> None:
    array = np.zeros(2, [("samples", "i8"), ("loss", "f4")])
    copied = private_copy({"row": array[1]}).value["row"]
    array["samples"][1] = 7
    assert (int(copied["samples"]), copied.dtype) == (0, array.dtype)


def test_attributes_of_a_state_dict_are_copied() -> None:
    """torch looks at them to load what older modules have saved."""
    state = torch.nn.BatchNorm1d(3).state_dict()
    source = ObjectSource("x", [state]).snapshot(CopyBudget(1 << 20))
    assert source is not None and source.value[0] is not state
    (found,) = objects.deserialize(source.serialize(), "x")
    assert found._metadata == state._metadata  # type: ignore[attr-defined]
    assert found._metadata[""]["version"] == 2


@pytest.mark.parametrize("make", [argparse.Namespace, collections.OrderedDict])
def test_attributes_that_no_load_accepts_are_noted(make: Any) -> None:
    value = make()
    value.__dict__["a"] = 1
    assert private_copy(value).named == frozenset()
    value.__dict__[3] = 1
    assert private_copy(value).named is None
    with pytest.raises(UnsafeObjectError):
        check_saved(ObjectSource("x", value).serialize(), "x")


def test_an_object_that_occurs_twice_is_copied_once() -> None:
    shared, tensor = [1], torch.ones(3)
    copy = private_copy({"a": shared, "b": (shared, tensor), "c": tensor}).value
    assert copy["a"] is copy["b"][0] and copy["b"][1] is copy["c"]
    assert copy["a"] is not shared and copy["c"] is not tensor


def test_a_list_that_holds_itself_is_copied() -> None:
    value: list[Any] = [1]
    value.append(value)
    copy = private_copy(value).value
    assert copy[1] is copy and copy is not value


def test_a_tuple_that_holds_itself_is_copied() -> None:
    inner: dict[str, Any] = {}
    value = (inner,)
    inner["outer"] = value
    copy = private_copy(value).value
    assert copy[0]["outer"] is copy and copy is not value


def test_an_array_keeps_the_order_of_its_dimensions() -> None:
    assert private_copy(np.ones((2, 3), order="F")).value.flags.f_contiguous


def test_the_position_in_a_buffer_is_kept() -> None:
    buffer = io.BytesIO(b"abcdef")
    buffer.seek(2)
    assert private_copy(buffer).value.read() == b"cdef"


class Own:
    pass


def shared_memory() -> list[torch.Tensor]:
    base = torch.arange(4)
    return [base[:2], base[2:]]


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def closed_buffer() -> io.BytesIO:
    buffer = io.BytesIO()
    buffer.close()
    return buffer


def marked() -> torch.Tensor:
    tensor = torch.ones(1)
    tensor.mark = True  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize(
    "value",
    [
        Own(),
        [torch.nn.Parameter(torch.ones(1))],
        torch.ones(1, requires_grad=True),
        torch.ones(2).to_sparse(),
        collections.defaultdict(list),
        np.array([[], None], dtype=object),
        np.array([([],)], dtype=[("items", object)])[0],
        nested(sys.getrecursionlimit()),
        shared_memory(),
        closed_buffer(),
        marked(),
        frozenset({1}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_copied_faithfully_is_refused(value: Any) -> None:
    with pytest.raises(NotPlainError):
        private_copy(value)


def test_empty_tensors_share_nothing() -> None:
    assert [len(t) for t in private_copy([torch.empty(0), torch.empty(0)]).value] == [0, 0]


def test_a_snapshot_is_serialized_later_as_the_object_was() -> None:
    value = {"step": 1, "state": torch.zeros(2)}
    snapshot = ObjectSource("key", value, Mutability.NOW).snapshot(CopyBudget(8))
    value["step"] = 2
    value["state"].add_(1)
    assert snapshot is not None and snapshot.mutability is Mutability.NEVER
    found = torch.load(io.BytesIO(snapshot.serialize()), weights_only=True)
    assert found["step"] == 1 and found["state"].tolist() == [0, 0]


@pytest.mark.parametrize(
    "value", [torch.ones(2, requires_grad=True), threading.Lock()], ids=["tensor", "lock"]
)
def test_an_object_that_cannot_be_copied_has_no_snapshot(value: Any) -> None:
    assert ObjectSource("key", {"state": value}).snapshot(CopyBudget(1 << 30)) is None


@pytest.mark.parametrize(
    "large", [torch.zeros(2), np.zeros(1), bytearray(8), io.BytesIO(bytes(8))], ids=lambda v: type(v).__name__
)
def test_an_object_that_exceeds_the_budget_has_no_snapshot(large: Any) -> None:
    assert ObjectSource("key", [1, large]).snapshot(CopyBudget(7)) is None
    budget = CopyBudget(9)
    assert ObjectSource("key", [1, large]).snapshot(budget) is not None and budget.left == 1
