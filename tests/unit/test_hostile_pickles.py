"""Pickles that a program never writes: they change nothing of the process and take little time and memory."""

from __future__ import annotations

import argparse
import enum
import pickle
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.convert.sources.pickles import load_metadata
from megatron_datastates.convert.sources.tensor_records import load_tensor_record
from megatron_datastates.convert.stored_arguments import arguments_in
from megatron_datastates.errors import DataStatesError, FormatError, UnsafeObjectError
from megatron_datastates.providers.objects import check_saved, deserialize
from tests.unit.inspecting import refused
from tests.unit.states import SMALL
from tests.unit.stored_objects import archive, stored

LOADS = [deserialize, check_saved]
COUNT = 2000  # of copies of as many items: 30 MiB


class Colour(enum.Enum):
    RED = 1


class Config:
    pass


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    data = pickle.encode_long(value)
    return b"\x8b" + struct.pack("<i", len(data)) + data


def named(name: str) -> bytes:
    module, _, own = name.rpartition(".")
    return f"c{module}\n{own}\n".encode()


def items(*values: bytes) -> bytes:
    return b"(" + b"".join(values) + b"t"


def program(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


def tensor(kind: str, count: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """Returns what makes a tensor in the storage `0`, of `count` elements."""
    storage = items(text("storage"), named(f"torch.{kind}Storage"), text("0"), text("cpu"), number(count))
    lengths = items(*map(number, shape)), items(*map(number, strides))
    hooks = named("collections.OrderedDict") + b")R"
    return (
        named("torch._utils._rebuild_tensor_v2")
        + items(storage + b"Q", number(0), *lengths, b"\x89", hooks)
        + b"R"
    )


def test_the_state_of_a_member_of_an_enumeration_is_not_set() -> None:
    state = b"}" + text("_name_") + text("GREEN") + b"s"
    body = named(f"{__name__}.Colour") + items(number(1)) + b"R" + state + b"b"
    refuses = pytest.raises(UnsafeObjectError, match="a member of an enumeration")
    with torch.serialization.safe_globals([Colour]), refuses:
        deserialize(archive(program(body)), "key")
    assert Colour.RED.name == "RED"


def test_an_attribute_is_not_called_to_set_the_state() -> None:
    many = named("builtins.range") + items(number(1 << 22)) + b"R"
    attributes = b"}" + text("__setstate__") + named("builtins.list") + b"s"
    body = named(f"{__name__}.Config") + b")\x81" + attributes + b"b" + many + b"b"
    refuses = pytest.raises(UnsafeObjectError, match="it makes a Config")
    with torch.serialization.safe_globals([Config]), refuses:
        deserialize(archive(program(body)), "key")


@pytest.mark.parametrize("name", ["imag", "data", "__class__"])
@pytest.mark.parametrize("load", LOADS)
def test_a_property_of_a_tensor_is_not_set(load, name: str) -> None:
    made = tensor("ComplexFloat", 64, (2,) * 20, (1,) * 20)
    state = b"}" + text(name) + tensor("ComplexFloat", 64, (), ()) + b"s"
    for function, arguments in (
        ("torch._utils._rebuild_parameter_with_state", items(made, b"\x89", b"}", state)),
        (
            "torch._tensor._rebuild_from_type_v2",
            items(
                named("torch._utils._rebuild_parameter"),
                named("torch.nn.parameter.Parameter"),
                items(made, b"\x89", b"}"),
                state,
            ),
        ),
    ):
        data = archive(program(named(function) + arguments + b"R"), **{"0": bytes(512)})
        with pytest.raises(UnsafeObjectError, match=f"a tensor's attribute '{name}'"):
            load(data, "key")


def test_attributes_of_a_parameter_are_loaded() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.is_shared = True  # type: ignore[attr-defined]
    data = stored([parameter])
    check_saved(data, "key")
    assert deserialize(data, "key")[0].is_shared


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("inner", [b"h\x00", b"h\x00\x85"], ids=["number", "tuple"])
def test_keys_that_take_long_to_hash_are_refused(load, inner: bytes) -> None:
    big = b"\x8b" + struct.pack("<i", 1 << 18) + b"\x01" * (1 << 18)
    body = b"}" + big + b"q\x00" + b"0(" + (inner + b"N") * 40_000 + b"u"
    begin = time.monotonic()
    with pytest.raises(UnsafeObjectError, match="would copy more than 128 times the bytes"):
        load(archive(program(body)), "key")
    assert time.monotonic() - begin < 2  # of some 30 s


def test_long_numbers_that_are_keys_once_are_loaded() -> None:
    value = {1 << 8_000_000: 1, (2, 1 << 8_000_000): 2}
    assert deserialize(stored([value]), "key") == [value]


@pytest.mark.parametrize("name", ["torch.Size", "builtins.set"])
def test_metadata_makes_no_copies_of_a_list(tmp_path: Path, name: str) -> None:
    many = b"](" + b"".join(b"M" + struct.pack("<H", one) for one in range(COUNT)) + b"eq\x00"
    body = b"(" + many + named(name) + b"q\x01" + b"h\x01h\x00\x85R" * COUNT + b"l"
    (tmp_path / "m").write_bytes(program(body))
    assert peak_of(lambda: load_metadata(tmp_path / "m")) < 4 << 20


@pytest.mark.parametrize(
    "name",
    [
        "torch.distributed.checkpoint.metadata.Metadata",
        "torch.distributed.checkpoint.metadata.TensorProperties",
        "collections.OrderedDict",
    ],
)
def test_metadata_makes_no_copies_of_a_dictionary(tmp_path: Path, name: str) -> None:
    many = b"}(" + b"".join(text(str(one)) + b"N" for one in range(COUNT)) + b"uq\x00"
    body = b"(" + many + named(name) + b"q\x01" + b"h\x01)\x81h\x00b" * COUNT + b"l"
    (tmp_path / "m").write_bytes(program(body))
    assert peak_of(lambda: load_metadata(tmp_path / "m")) < 4 << 20


def test_tensor_records_make_no_copies_of_a_list() -> None:
    many = b"](" + b"K\x01" * COUNT + b"eq\x00"
    made = tensor("Float", 1, (), ()).replace(b"(t(t", b"h\x00h\x00")
    body = b"(" + many + made * COUNT + b"l"
    assert peak_of(lambda: load_tensor_record(program(body), "here")) < 4 << 20


@pytest.mark.parametrize("name", ["builtins.set", "builtins.frozenset", "__builtin__.set"])
def test_arguments_make_no_copies_of_a_list(name: str) -> None:
    many = b"](" + b"".join(b"M" + struct.pack("<H", one) for one in range(COUNT)) + b"eq\x00"
    body = b"(" + many + named(name) + b"q\x01" + b"h\x01h\x00\x85R" * COUNT + b"l"
    data = archive(program(body))
    assert peak_of(lambda: arguments_in(data, "here")) < 4 << 20


@pytest.mark.parametrize("is_path", [False, pytest.param(True, marks=pytest.mark.long)])
def test_arguments_that_share_their_parts_are_not_read_for_ever(is_path: bool) -> None:
    shared = b"](" + b"N" * 40 + b"eq\x00" + b"0"
    for level in range(1, 7):
        shared += b"](" + bytes([ord("h"), level - 1]) * 40 + b"eq" + bytes([level]) + b"0"
    value = named("pathlib.PosixPath") + b"h\x06\x85R" if is_path else b"h\x06"
    arguments = named("argparse.Namespace") + b")\x81}" + text("a") + value + b"sb"
    body = shared + b"}" + text("args") + arguments + b"s"
    with pytest.raises(FormatError, match="has training arguments of more than"):
        arguments_in(archive(program(body)), "here")


def test_arguments_of_very_many_classes_are_refused() -> None:
    body = b"]" + b"".join(b"cm\n%d\n0" % one for one in range(10_100))
    with pytest.raises(UnsafeObjectError, match="names more than 10000 classes"):
        arguments_in(archive(program(body)), "here")


def test_a_very_long_number_in_arguments_is_shown_by_its_size() -> None:
    data = stored([{"args": argparse.Namespace(a=1 << 100_000, b=[{1 << 100_000: 1}])}])
    long = "a number of 100001 bits"
    assert arguments_in(data, "here") == {"a": long, "b": [{long: 1}]}


def test_sets_and_paths_in_arguments_are_read() -> None:
    data = stored([{"args": argparse.Namespace(a={3}, b=frozenset({"x"}), c=Path("/a/b"), d={"k": [1]})}])
    assert arguments_in(data, "here") == {
        "a": [3],
        "b": ["x"],
        "c": "/a/b",
        "d": {"k": [1]},
    }


def test_cat_refuses_a_tensor_of_very_many_axes(tmp_path: Path) -> None:
    ds.save({"a": torch.ones(1), "x": [torch.zeros(1).expand((2,) * 40)]}, tmp_path, **SMALL)
    assert "has more than 1048576 values" in refused("cat", tmp_path, "x")


def peak_of(load) -> int:
    """Returns the bytes that Python has allocated at most during a load, which has to fail."""
    tracemalloc.start()
    try:
        with pytest.raises(DataStatesError):
            load()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
