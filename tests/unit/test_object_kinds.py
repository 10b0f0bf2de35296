"""Kinds of objects that are accepted: what is saved is loaded, equal and of the same type."""

from __future__ import annotations

import argparse
import array
import collections
import datetime
import decimal
import io
import pathlib
import types
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import megatron_datastates as ds
from megatron_datastates.pipeline.upkeep.verify import verify
from megatron_datastates.providers.objects import check_saved, deserialize
from tests.unit.states import OPTIONS, SMALL
from tests.unit.stored_objects import STRUCTURED, stored

KINDS: dict[str, Any] = {
    "None": None,
    "bool": True,
    "int": -7,
    "long int": -(1 << 5000),
    "float": 1.5,
    "complex": 1 + 2j,
    "str": "é\ud800",
    "bytes": b"\0\xff" * 70_000,
    "no bytes": b"",
    "bytearray": bytearray(b"ab"),
    "list": [1, [2]],
    "tuple": (1, (2,)),
    "dict": {("a", 1): {2: 3}},
    "set": {1, (2, 3)},
    "frozenset": frozenset([1, frozenset([2])]),
    "range": range(3, 1 << 60, 2),
    "slice": slice(1, None, 2),
    "Ellipsis": ...,
    "NotImplemented": NotImplemented,
    "OrderedDict": collections.OrderedDict(b=1, a=2),
    "defaultdict": collections.defaultdict(list, {1: [2]}),
    "Counter": collections.Counter("abca"),
    "deque": collections.deque([1, 2], 5),
    "date": datetime.date(2026, 1, 2),
    "datetime": datetime.datetime(2026, 1, 2, 3, 4, 5, 6),
    "aware datetime": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    "time": datetime.time(1, 2),
    "timedelta": datetime.timedelta(1, 2, 3),
    "timezone": datetime.timezone(datetime.timedelta(hours=1), "x"),
    "Decimal": decimal.Decimal("-1.50E+9"),
    "UUID": uuid.UUID(int=7),
    "Path": pathlib.Path("/a/b"),
    "array.array": array.array("d", [1.0, 2.0]),
    "Namespace": argparse.Namespace(a=[1]),
    "SimpleNamespace": types.SimpleNamespace(a=1),
    "type": int,
    "type of None": type(None),
    "type of numpy": np.float32,
    "dtype": np.dtype("f8"),
    "dtype of another byte order": np.dtype(">i4"),
    "structured dtype": np.dtype(STRUCTURED),
    "aligned dtype": np.dtype([("a", "i1"), ("b", "f8")], align=True),
    "dtype of times": np.dtype("M8[25ns]"),
    "dtype of arrays": np.dtype(("f4", (2, 3))),
    "torch.Size": torch.Size([1, 2]),
    "torch.device": torch.device("cuda:0"),
    "torch.dtype": torch.bfloat16,
    "torch.layout": torch.strided,
}
SCALARS = ["?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "g", "F", "D", "S3", "U4", "M8[s]", "m8[us]", "V5"]
ARRAYS: dict[str, np.ndarray] = {
    **{dtype: np.frombuffer(bytes(range(96)) * 4, dtype, 6).reshape(2, 3) for dtype in SCALARS[1:11]},
    **{f"zeros of {dtype}": np.zeros((2, 3), dtype) for dtype in SCALARS},
    "bool": np.array([True, False]),
    "text": np.array(["a", "é", ""]),
    "structured": np.array([(1, ["a", "b"], (7,))], STRUCTURED),
    "column-major": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "strided": np.arange(10)[::3],
    "no dimension": np.array(3.5),
    "no element": np.zeros((0, 3), "f4"),
    "large": np.arange(100_000),
}


def assert_same(found: Any, value: Any) -> None:
    assert type(found) is type(value)
    if isinstance(value, np.ndarray | np.generic):
        assert (found.dtype, found.shape, found.tobytes()) == (value.dtype, value.shape, value.tobytes())
    else:
        assert found == value


@pytest.mark.parametrize("kind", KINDS)
def test_plain_kinds_come_back(kind: str) -> None:
    data = stored([KINDS[kind]])
    check_saved(data, "key")
    assert_same(deserialize(data, "key")[0], KINDS[kind])


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_and_scalars_come_back(kind: str) -> None:
    array = ARRAYS[kind]
    scalars = [array.reshape(-1)[0]] if array.size else []
    data = stored([array, *scalars, [array]])
    check_saved(data, "key")
    found, *others, (again,) = deserialize(data, "key")
    assert_same(found, array)
    assert found.flags.f_contiguous == (array.flags.f_contiguous) or array.ndim < 2 or not array.size
    assert again is found, "one object has become two"
    for one, scalar in zip(others, scalars, strict=True):
        assert_same(one, scalar)
    found[...] = found  # raises if the array is read-only


def test_all_kinds_are_saved_and_loaded_and_pass_verify(tmp_path: Path) -> None:
    objects = {f"kind {name}": [value] for name, value in KINDS.items()}
    objects |= {f"array {name}": [value] for name, value in ARRAYS.items()}
    ds.save({"w": torch.ones(3)} | objects, tmp_path / "c", **SMALL)
    found = ds.open(tmp_path / "c", **SMALL).read_objects(objects)
    for key, (value,) in objects.items():
        assert_same(found[key][0], value)
    assert verify(tmp_path / "c", options=OPTIONS).faults == []


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).t(),
        torch.ones(3).to_sparse(),
        torch.nn.Parameter(torch.ones(2)),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        torch.ones(2, device="meta"),
        torch.randn(2, dtype=torch.complex64).conj(),
        torch.zeros(0),
        torch.ones(2).to(torch.float8_e4m3fn),
        torch.ones(2, requires_grad=True),
    ],
    ids=lambda tensor: f"{type(tensor).__name__} {tensor.dtype} {tensor.layout}",
)
def test_tensors_come_back_as_torch_loads_them(tensor: torch.Tensor) -> None:
    data = stored([tensor])
    check_saved(data, "key")
    found, expected = deserialize(data, "key")[0], torch.load(io.BytesIO(data), weights_only=True)[0]
    assert type(found) is type(expected) and str(found) == str(expected)
    assert (found.stride() if tensor.layout is torch.strided else 0) == (
        expected.stride() if tensor.layout is torch.strided else 0
    )


def test_tensors_that_share_memory_still_do() -> None:
    base = torch.arange(4)
    first, second = deserialize(stored([base[:2], base[1:]]), "key")
    first[1] = 9
    assert second.tolist() == [9, 2, 3]


def test_attributes_of_a_state_dict_come_back() -> None:
    state = torch.nn.Linear(2, 2).state_dict()
    assert deserialize(stored(state), "key")._metadata == state._metadata  # type: ignore[attr-defined]


def leaves() -> st.SearchStrategy[Any]:
    simple = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    times = (
        st.datetimes().map(lambda time: time.replace(fold=0))
        | st.dates()
        | st.timedeltas()
        | st.uuids()
        | st.decimals(allow_nan=False)
    )
    return (
        simple
        | times
        | st.binary().map(bytearray)
        | st.fractions().map(float)
        | st.complex_numbers(allow_nan=False)
    )


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.text(max_size=3) | st.integers() | st.tuples(st.integers(), st.text(max_size=2))
    dictionaries = st.dictionaries(keys, inner, max_size=4)
    return (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.lists(inner, max_size=4).map(collections.deque)
        | dictionaries
        | dictionaries.map(collections.OrderedDict)
        | dictionaries.map(lambda items: collections.defaultdict(dict, items))
        | st.sets(keys, max_size=3)
        | st.frozensets(keys, max_size=3)
    )


@given(st.recursive(leaves(), nested, max_leaves=15))
def test_nested_plain_data_comes_back(value: Any) -> None:
    data = stored(value)
    check_saved(data, "key")
    found = deserialize(data, "key")
    assert found == value and type(found) is type(value)
    assert torch.load(io.BytesIO(data), weights_only=False) == value, "torch reads something else"
