"""What objects may be made of: what is saved is loaded, and what no load accepts is refused at the save."""

from __future__ import annotations

import argparse
import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import json
import pathlib
import pickle
import resource
import struct
import subprocess
import sys
import types
import uuid
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_datastates.errors import FormatError, UnsafeObjectError
from megatron_datastates.pipeline.load import Checkpoint
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.verify import verify
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.objects import PickledObject, check_saved, check_stored, deserialize
from tests.unit.by_hand import Part, index_of, write_checkpoint
from tests.unit.states import OPTIONS, new_saver, save

STRUCTURED = [("a", "i4"), ("b", "U3", (2,)), ("c", [("d", "M8[us]")])]
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


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Config:
    hidden: int = 8


class Own:
    pass


class WithState(dict):  # type: ignore[type-arg]
    pass


REFUSED: dict[str, tuple[Any, str]] = {
    "enumeration": (Colour.RED, "Colour"),
    "dataclass": (Config(), "Config"),
    "class": (Own(), "Own"),
    "type": (Own, "Own"),
    "subclass": (WithState(a=1), "WithState"),
    "Fraction": (fractions.Fraction(1, 3), "fractions.Fraction"),
    "function": (len, "builtins.len"),
    "array of objects": (np.array([None]), "dtype 'O8'"),
    "dtype of objects": (np.dtype("O"), "dtype 'O8'"),
    "structured with objects": (np.zeros(1, [("a", "O")]), "dtype"),
    "generator": (np.random.default_rng(0), "numpy.random"),
    "masked array": (np.ma.array([1], mask=[True]), "numpy.ma"),
}


def stored(value: Any) -> bytes:
    return PickledObject("key", value, Mutability.NEVER).serialize()


def archive(pickled: bytes, compression: int = zipfile.ZIP_STORED, **members: bytes) -> bytes:
    """As torch.save makes it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        file.writestr("archive/data.pkl", pickled)
        for name, data in members.items():
            file.writestr(f"archive/data/{name}", data)
    return buffer.getvalue()


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
    assert again is found, "what was one object stays one"
    for one, scalar in zip(others, scalars, strict=True):
        assert_same(one, scalar)
    found[...] = found  # it can be written to


def test_all_kinds_are_saved_and_loaded_and_pass_verify(tmp_path: Path) -> None:
    objects = {f"kind {name}": [value] for name, value in KINDS.items()}
    objects |= {f"array {name}": [value] for name, value in ARRAYS.items()}
    publication = save(new_saver(), tmp_path / "c", {"w": torch.ones(3)}, objects)
    assert publication.outcome is Outcome.PUBLISHED, publication.error
    found = Checkpoint.open(tmp_path / "c", OPTIONS).read_objects(objects)
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
def test_tensors_come_back_as_torch_itself_loads_them(tensor: torch.Tensor) -> None:
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


# -- what no load accepts -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_load_accepts_fails_the_save(tmp_path: Path, kind: str) -> None:
    value, name = REFUSED[kind]
    publication = save(new_saver(), tmp_path / "c", {"w": torch.ones(3)}, {"the key": [{"deep": (value,)}]})
    assert publication.outcome is Outcome.FAILED and publication.error is not None
    for words in ("'the key'", name, "state_dict()", "add_safe_globals", "--datastates-trust-objects on"):
        assert words in publication.error
    assert list((tmp_path / "c").iterdir()) == []


@pytest.mark.parametrize("value", [Colour.RED, Config(3), [Own], collections.defaultdict(Config)])
def test_a_class_that_the_user_vouches_for_is_saved_and_loaded(tmp_path: Path, value: Any) -> None:
    with torch.serialization.safe_globals([Colour, Config, Own]):
        publication = save(new_saver(), tmp_path / "c", {}, {"x": [value, torch.ones(2)]})
        assert publication.outcome is Outcome.PUBLISHED, publication.error
        assert Checkpoint.open(tmp_path / "c", OPTIONS).read_object("x")[0] == value
    with pytest.raises(UnsafeObjectError, match=r"'x' was not loaded.*(Colour|Config|Own).*add_safe_globals"):
        Checkpoint.open(tmp_path / "c", OPTIONS).read_object("x")


def test_a_look_calls_no_class_of_the_users() -> None:
    calls: list[int] = []

    class Loud:
        def __setstate__(self, state: Any) -> None:
            calls.append(1)

    Loud.__qualname__ = "Loud"
    globals()["Loud"] = Loud
    loud = Loud()
    loud.__dict__["a"] = 1
    with torch.serialization.safe_globals([Loud]):
        data = stored([loud])
        check_saved(data, "key")
        assert calls == []
        deserialize(data, "key")
        assert calls == [1]


def test_objects_that_are_trusted_by_option_are_saved_and_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publication = save(new_saver(trust_objects=True), tmp_path / "c", {}, {"x": [Colour.RED]})
    assert publication.outcome is Outcome.PUBLISHED, publication.error
    trusting = dataclasses.replace(OPTIONS, trust_objects=True)
    assert Checkpoint.open(tmp_path / "c", trusting).read_object("x") == [Colour.RED]
    assert sum("--datastates-trust-objects is on" in record.message for record in caplog.records) == 2
    with pytest.raises(UnsafeObjectError, match="was not loaded"):
        Checkpoint.open(tmp_path / "c", OPTIONS).read_object("x")
    assert verify(tmp_path / "c", options=trusting).good
    (fault,) = verify(tmp_path / "c", options=OPTIONS).faults
    assert "'x' cannot be loaded" in fault and "Colour" in fault


def test_verify_finds_an_object_that_cannot_be_loaded(tmp_path: Path) -> None:
    data = stored([fractions.Fraction(1, 3)])
    part = Part(data_bytes=8192, objects={"x": (4096, data)})
    write_checkpoint(tmp_path, [part], index_of([], {"x": 0}))
    (fault,) = verify(tmp_path, options=OPTIONS).faults
    assert "'x' cannot be loaded" in fault and "fractions.Fraction" in fault


def test_what_megatron_vouches_for_is_no_fault_without_megatron() -> None:
    pickled = b"\x80\x02cmegatron.core.transformer.enums\nAttnBackend\nK\x01\x85R."
    check_stored(archive(pickled), "args")
    with pytest.raises(UnsafeObjectError):
        check_stored(archive(pickled.replace(b"AttnBackend", b"Others")), "args")


# -- hostile --------------------------------------------------------------------------------------------


def number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def text(value: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value


STORAGE = b"(" + text(b"storage") + b"ctorch\nFloatStorage\n" + text(b"0") + text(b"cpu") + b"K\x02tQ"
DTYPE = b"cnumpy\ndtype\n" + text(b"V8") + b"\x89\x88\x87R"
HOSTILE = {
    "bytearray": b"c__builtin__\nbytearray\n" + number(2**31 - 1) + b"\x85R.",
    "bytes": b"c__builtin__\nbytes\n" + number(2**31 - 1) + b"\x85R.",
    "set of a range": b"c__builtin__\nset\nc__builtin__\nxrange\n" + number(1 << 40) + b"\x85R\x85R.",
    "list of a range": b"c__builtin__\nlist\nc__builtin__\nxrange\n" + number(1 << 40) + b"\x85R\x85R.",
    "deque of a range": b"ccollections\ndeque\nc__builtin__\nxrange\n" + number(1 << 40) + b"\x85R\x85R.",
    "tensor by its class": b"ctorch\nTensor\n" + number(1 << 34) + b"\x85R.",
    "storage by its class": b"ctorch.storage\nUntypedStorage\n" + number(1 << 34) + b"\x85R.",
    "array by its class": b"cnumpy\nndarray\n" + number(1 << 34) + b"\x85R.",
    "array of a shape": b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
    + number(1 << 34)
    + b"\x85c_codecs\nencode\n"
    + text(b"b")
    + text(b"latin1")
    + b"\x86R\x87R.",
    "array whose data is missing": b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85"
    + b"c_codecs\nencode\n"
    + text(b"b")
    + text(b"latin1")
    + b"\x86R\x87R(K\x01"
    + number(1 << 34)
    + b"\x85cnumpy\ndtype\n"
    + text(b"f8")
    + b"\x89\x88\x87R\x89c__builtin__\nbytes\n)Rtb.",
    "field outside of its dtype": DTYPE
    + b"(K\x03"
    + text(b"|")
    + b"N"
    + text(b"a")
    + b"\x85}"
    + text(b"a")
    + b"cnumpy\ndtype\n"
    + text(b"f8")
    + b"\x89\x88\x87RK\x10\x86sK\x08K\x01K\x10tb.",
    "another codec": b"c_codecs\nencode\n" + text(b"a") + text(b"unicode_escape") + b"\x86R.",
    "state of a type": b"c__builtin__\nint\n}" + text(b"a") + b"K\x01sb.",
    "state of a function": b"c_codecs\nencode\n}" + text(b"a") + b"K\x01sb.",
    "tensor larger than its storage": b"ctorch._utils\n_rebuild_tensor_v2\n("
    + STORAGE
    + b"K\x00"
    + number(1 << 34)
    + b"\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR.",
    "text that is missing": b"X\xff\xff\xff\x7fabc.",
    "number that is missing": b"\x8b\xff\xff\xff\x7fabc.",
    "place in the memo": b"\x80\x04Nr\xff\xff\xff\xff0.",
    "bytes of a later protocol": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
    "array of bytes of a later protocol": b"\x80\x05\x96" + struct.pack("<Q", 1 << 33) + b".",
    "attribute": b"\x80\x02c__builtin__\ngetattr\n.",
    "name with dots": b"\x80\x02cnumpy\ndtype.type\n.",
}


def nested_key(depth: int, width: bytes) -> bytes:
    """A dictionary whose key is a tuple of the same tuple twice, and so on."""
    levels = b"".join(b"q\x01h\x01\x86" if width == b"\x86" else b"\x85" for _ in range(depth))
    return b"\x80\x02})" + levels + b"Ns."


CHILD = """
import json, resource, sys
from megatron_datastates.errors import UnsafeObjectError
from megatron_datastates.providers.objects import check_stored, deserialize
cases = {name: bytes.fromhex(data) for name, data in json.load(sys.stdin).items()}
before = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (before + (256 << 20),) * 2)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name, data in cases.items():
    for look in (deserialize, check_stored):
        try:
            look(data, "key")
        except UnsafeObjectError as error:
            assert "MemoryError" not in str(error), (name, error)
        else:
            raise AssertionError(f"{name} was accepted")
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
        assert grown < 64 << 10, (name, grown)
"""


def test_hostile_objects_are_refused_and_take_next_to_nothing() -> None:
    """Within 256 MiB of addresses and 64 MiB of memory, in all."""
    bomb = b"\x80\x02X" + struct.pack("<I", 1 << 29) + bytes(1 << 29)
    cases = {name: archive(pickled, **{"0": bytes(8)}) for name, pickled in HOSTILE.items()}
    cases["a key as long as 2^60"] = archive(nested_key(60, b"\x86"))
    cases["a key as deep as a stack"] = archive(nested_key(300_000, b"\x85"))
    cases["a compressed one"] = archive(bomb, zipfile.ZIP_DEFLATED)
    shown = json.dumps({name: data.hex() for name, data in cases.items()}).encode()
    done = subprocess.run([sys.executable, "-c", CHILD], input=shown, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()[-2000:]


def test_a_dtype_cannot_change_once_an_array_has_it() -> None:
    pickled = pickle.dumps(np.zeros(4, "V8"), 2)
    # The same state once more, for the dtype that numpy's pickle has put at place 6 of the memo.
    state = b"(K\x03" + text(b"|") + b"NNN" + number(8) + b"K\x01K\x00tb"
    place = next(n for n in range(20) if isinstance(memo_of(pickled).get(n), np.dtype))
    with pytest.raises(UnsafeObjectError, match="a dtype"):
        deserialize(archive(pickled[:-1] + b"h" + bytes([place]) + state + b"0."), "key")


def memo_of(pickled: bytes) -> dict[int, Any]:
    unpickler = pickle._Unpickler(io.BytesIO(pickled))  # type: ignore[attr-defined]
    unpickler.load()
    return unpickler.memo  # type: ignore[no-any-return, attr-defined]


def test_every_flipped_byte_is_refused_or_loads(tmp_path: Path) -> None:
    data = pickle.dumps([np.zeros(2, STRUCTURED), {"a": (1, b"x")}, collections.deque([1], 2)], 2)
    for at in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            try:
                deserialize(archive(bytes(changed)), "key")
            except FormatError:
                continue


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
    assert torch.load(io.BytesIO(data), weights_only=False) == value, "torch itself reads it"


def test_a_look_at_a_large_object_takes_little_memory() -> None:
    data = stored([np.ones(64 << 20, np.uint8), torch.ones(16 << 20)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    check_saved(data, "key")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10
