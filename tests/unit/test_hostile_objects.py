"""Pickles that were made to do harm: refused, in little memory."""

from __future__ import annotations

import argparse
import array
import collections
import io
import json
import pickle
import resource
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_datastates.errors import FormatError, UnsafeObjectError
from megatron_datastates.providers.objects import check_saved, deserialize
from tests.unit.stored_objects import STRUCTURED, archive, stored


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
    "index in the memo": b"\x80\x04Nr\xff\xff\xff\xff0.",
    "bytes of a later protocol": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
    "array of bytes of a later protocol": b"\x80\x05\x96" + struct.pack("<Q", 1 << 33) + b".",
    "attribute": b"\x80\x02c__builtin__\ngetattr\n.",
    "name with dots": b"\x80\x02cnumpy\ndtype.type\n.",
}


def repeated(first: bytes, call: bytes) -> bytes:
    """Returns a list of 10,000 times what `call` makes of what `first` has put into the memo."""
    return b"\x80\x02" + first + b"0](" + call * 10_000 + b"e."


ENCODE, LATIN = b"c_codecs\nencode\n", text(b"latin1")
BYTES = ENCODE + text(b"a" * 100_000) + LATIN + b"\x86R"
INTEGERS = b"".join(b"J" + struct.pack("<i", n) for n in range(10_000))
ATTRIBUTES = b"}(" + b"".join(text(b"n%d" % n) + b"N" for n in range(10_000)) + b"u"
EMPTY_ARRAY = (
    b"cnumpy.core.multiarray\n_reconstruct\nq\x000cnumpy\nndarray\nK\x00\x85" + ENCODE + text(b"b") + LATIN
) + b"\x86R\x87q\x010"
BIG_ENDIAN = b"cnumpy\ndtype\n" + text(b"f8") + b"\x89\x88\x87R(K\x03" + text(b">") + b"NNNK\x00K\x00K\x00tb"
TENSOR = b"(" + STORAGE + b"K\x00K\x02\x85K\x01\x85\x89ccollections\nOrderedDict\n)Rt"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
MINUS_ONE = b"J" + struct.pack("<i", -1)
HOSTILE |= {
    "tensor of one element too many": REBUILD + TENSOR.replace(b"K\x02\x85", b"K\x03\x85") + b"R.",
    "tensor that begins too late": REBUILD + TENSOR.replace(b"K\x00K\x02\x85", b"K\x01K\x02\x85") + b"R.",
    "tensor that begins before its storage": REBUILD
    + TENSOR.replace(b"K\x00K\x02\x85", MINUS_ONE + b"K\x02\x85")
    + b"R.",
    "tensor of a negative size": REBUILD + TENSOR.replace(b"K\x02\x85", MINUS_ONE + b"\x85") + b"R.",
    "tensor of a negative stride": REBUILD
    + TENSOR.replace(b"K\x00K\x02\x85K\x01\x85", b"K\x01K\x02\x85" + MINUS_ONE + b"\x85")
    + b"R.",
}
SAME_ARGUMENTS = {
    "bytes of one text": (ENCODE, text(b"a" * 100_000) + LATIN + b"\x86"),
    "bytearrays": (b"c__builtin__\nbytearray\n", BYTES + b"\x85"),
    "sets": (b"c__builtin__\nset\n", b"](" + INTEGERS + b"e\x85"),
    "frozensets": (b"c__builtin__\nfrozenset\n", b"](" + INTEGERS + b"e\x85"),
    "counters": (b"ccollections\nCounter\n", ATTRIBUTES + b"\x85"),
    "OrderedDicts": (
        b"ccollections\nOrderedDict\n",
        b"](" + b"".join(text(b"n%d" % n) + b"N\x86" for n in range(10_000)) + b"e\x85",
    ),
    "decimals": (b"cdecimal\nDecimal\n", text(b"1" * 60_000) + b"\x85"),
    "array.arrays": (b"carray\narray\n", text(b"d") + b"](" + INTEGERS + b"e\x86"),
    "paths of many parts": (b"cpathlib\nPurePosixPath\n", b"(" + text(b"a") * 10_000 + b"t"),
    "ranges": (b"c__builtin__\nxrange\n", b"\x8b" + struct.pack("<I", 60_000) + b"\x11" * 60_000 + b"\x85"),
    "sizes": (b"ctorch\nSize\n", b"(" + INTEGERS + b"t\x85"),
    "scalars": (
        b"cnumpy.core.multiarray\nscalar\n",
        b"cnumpy\ndtype\n" + text(b"S100000") + b"\x89\x88\x87R" + BYTES + b"\x86",
    ),
    "tensors with attributes": (
        b"ctorch._tensor\n_rebuild_from_type_v2\n",
        b"(ctorch._utils\n_rebuild_tensor_v2\nctorch\nTensor\n" + TENSOR + ATTRIBUTES + b"t",
    ),
}
HOSTILE |= {
    f"many {name}": repeated(called + b"q\x000" + arguments + b"q\x01", b"h\x00h\x01R")
    for name, (called, arguments) in SAME_ARGUMENTS.items()
}
HOSTILE |= {
    "many namespaces of one state": repeated(
        b"cargparse\nNamespace\nq\x000" + ATTRIBUTES + b"q\x01", b"h\x00)\x81h\x01b"
    ),
    "many buffers of the same bytes": repeated(
        b"c_io\nBytesIO\nq\x000" + BYTES + b"K\x00N\x87q\x01", b"h\x00)\x81h\x01b"
    ),
    "many arrays of the same bytes": repeated(
        EMPTY_ARRAY + b"(K\x01M\xd4\x30\x85" + BIG_ENDIAN + b"\x89" + BYTES + b"tq\x02", b"h\x00h\x01Rh\x02b"
    ),
}


def nested_key(depth: int, width: bytes) -> bytes:
    """Returns the pickle of a dictionary whose key is nested tuples; with width 86h each holds two."""
    levels = b"".join(b"q\x01h\x01\x86" if width == b"\x86" else b"\x85" for _ in range(depth))
    return b"\x80\x02})" + levels + b"Ns."


def hashed_often(count: int) -> bytes:
    """Returns the pickle of a dictionary with many entries, each with a key of 9,900 items."""
    wide = b"(" + b"K\x00" * 99 + b"tq\x010" + b"(" + b"h\x01" * 99 + b"tq\x020"
    return b"\x80\x02" + wide + b"}(" + b"h\x02N" * count + b"u."


CHILD = """
import json, resource, sys
from megatron_datastates.errors import UnsafeObjectError
from megatron_datastates.providers.objects import check_stored, deserialize
cases = {name: bytes.fromhex(data) for name, data in json.load(sys.stdin).items()}
before = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (before + (256 << 20),) * 2)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name, data in cases.items():
    for read in (deserialize, check_stored):
        try:
            read(data, "key")
        except UnsafeObjectError as error:
            assert "MemoryError" not in str(error), (name, error)
        else:
            raise AssertionError(f"{name} was accepted")
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
        assert grown < 64 << 10, (name, grown)
"""


@pytest.mark.long
def test_hostile_objects_are_refused_in_little_memory() -> None:
    """All of them together may take 256 MiB of addresses and 64 MiB of memory."""
    bomb = b"\x80\x02X" + struct.pack("<I", 1 << 29) + bytes(1 << 29)
    cases = {name: archive(pickled, **{"0": bytes(8)}) for name, pickled in HOSTILE.items()}
    cases["a key of 2^60 items"] = archive(nested_key(60, b"\x86"))
    cases["a key that is deeper than a stack"] = archive(nested_key(300_000, b"\x85"))
    cases["a key that is hashed often"] = archive(hashed_often(2000))
    cases["a compressed pickle"] = archive(bomb, zipfile.ZIP_DEFLATED)
    encoded = json.dumps({name: data.hex() for name, data in cases.items()}).encode()
    done = subprocess.run([sys.executable, "-c", CHILD], input=encoded, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()[-2000:]


NAMED_TUPLES = """
import sys
import megatron.core.rerun_state_machine
from megatron_datastates.errors import UnsafeObjectError
from megatron_datastates.providers.objects import check_stored, deserialize
data = sys.stdin.buffer.read()
for read in (check_stored, deserialize):
    try:
        read(data, "key")
    except UnsafeObjectError as error:
        assert "a key of nested tuples" in str(error), error
    else:
        raise AssertionError("it was accepted")
"""


@pytest.mark.parametrize(
    ("depth", "is_wide"), [(60, True), pytest.param(200_000, False, marks=pytest.mark.long)]
)
def test_a_key_of_nested_named_tuples_is_refused(depth: int, is_wide: bool) -> None:
    """Megatron's rerun state machine stores named tuples. They hash what they hold, as any tuple does."""
    pytest.importorskip("megatron.core.rerun_state_machine")
    head = b"\x80\x02}cmegatron.core.rerun_state_machine\nCall\nq\x000"
    if is_wide:
        levels = b"K\x00q\x010" + b"h\x00h\x01h\x01\x86Rq\x010" * depth + b"h\x01"
    else:
        levels = b"h\x00" * depth + b"K\x00" + b"K\x00\x86R" * depth
    data = archive(head + levels + b"K\x01s.")
    done = subprocess.run([sys.executable, "-c", NAMED_TUPLES], input=data, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()[-2000:]


def test_quantized_tensors_cannot_copy_the_same_scales_often() -> None:
    scales = REBUILD + TENSOR.replace(b"K\x02\x85K\x01", number(100_000) + b"\x85K\x00") + b"Rq\x02"
    storage = STORAGE.replace(b"Float", b"QInt8").replace(text(b"0"), text(b"1"))
    scheme = b"(ctorch\nper_channel_affine\n" + scales + b"h\x02K\x00t"
    arguments = b"(" + storage + b"K\x00K\x02\x85K\x01\x85" + scheme + b"\x89ccollections\nOrderedDict\n)Rt"
    first = b"ctorch._utils\n_rebuild_qtensor\nq\x000" + arguments + b"q\x01"
    # Newer releases of torch refuse as many scales by themselves.
    with pytest.raises(UnsafeObjectError, match=r"more than 128 times the bytes|must equal size"):
        deserialize(archive(repeated(first, b"h\x00h\x01R"), **{"0": bytes(8), "1": bytes(2)}), "key")


def test_what_repeats_itself_and_was_saved_loads() -> None:
    """Pickles of it copy most of what they can: small items, and memory that many share."""
    shared = bytes(100_000)
    of_fields = np.dtype([(f"field {n}", "f4") for n in range(40)])
    several = [
        [io.BytesIO(shared) for _ in range(100)],
        [np.frombuffer(shared, kind) for kind in ("u1", ">f4") for _ in range(100)],
        [np.zeros(2, of_fields.newbyteorder("S").newbyteorder("S")) for _ in range(500)],
        [set(range(256)), frozenset(range(50_000)), array.array("B", shared), torch.Size([1] * 5000)],
        [collections.deque() for _ in range(50_000)],
        [Path("/", *["a directory with quite a long name"] * 12, str(n)) for n in range(2000)],
        [argparse.Namespace(**{f"argument_{n}": None for n in range(1000)}) for _ in range(20)],
        collections.OrderedDict.fromkeys(range(50_000)),
        collections.Counter(range(50_000)),
    ]
    for value in several:
        data = stored(value)
        check_saved(data, "key")
        deserialize(data, "key")


def test_a_dtype_cannot_change_after_an_array_has_it() -> None:
    pickled = pickle.dumps(np.zeros(4, "V8"), 2)
    # Sets the state of the array's dtype, which numpy's pickle has put into the memo, once more.
    state = b"(K\x03" + text(b"|") + b"NNN" + number(8) + b"K\x01K\x00tb"
    place = next(n for n in range(20) if isinstance(memo_of(pickled).get(n), np.dtype))
    with pytest.raises(UnsafeObjectError, match="a dtype"):
        deserialize(archive(pickled[:-1] + b"h" + bytes([place]) + state + b"0."), "key")


def test_a_dtype_without_a_state_cannot_get_one_after_an_array_has_it() -> None:
    array_of = EMPTY_ARRAY + b"h\x00h\x01R(K\x01K\x01\x85" + DTYPE + b"q\x05\x89"
    made = array_of + ENCODE + text(b"8 bytes.") + LATIN + b"\x86Rtb"
    assert deserialize(archive(b"\x80\x02" + made + b"."), "key").tobytes() == b"8 bytes."
    state = b"(K\x03" + text(b"|") + b"NNN" + number(8) + b"K\x01K\x00tb"
    with pytest.raises(UnsafeObjectError, match="a dtype"):
        deserialize(archive(b"\x80\x02" + made + b"h\x05" + state + b"0."), "key")


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


def test_checking_a_large_object_takes_little_memory() -> None:
    data = stored([np.ones(64 << 20, np.uint8), torch.ones(16 << 20)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    check_saved(data, "key")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10


@pytest.mark.parametrize("trust", [False, True])
def test_a_storage_that_memory_lacks_for_is_no_damage(monkeypatch: pytest.MonkeyPatch, trust: bool) -> None:
    data, lack = stored({"a": torch.ones(3)}), RuntimeError("DefaultCPUAllocator: can't allocate memory")
    monkeypatch.setattr(torch, "load" if trust else "empty", mock.Mock(side_effect=lack))
    if trust:
        data = stored(Untrusted())
    with pytest.raises(MemoryError, match="can't allocate memory"):
        deserialize(data, "key", trust=trust)


class Untrusted:
    """A class that is on no list."""
