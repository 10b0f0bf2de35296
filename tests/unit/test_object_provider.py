"""Objects: plain data comes back equal, and code in a pickle never runs."""

from __future__ import annotations

import collections
import fractions
import io
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_datastates.errors import FormatError
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.members import find_members
from megatron_datastates.providers.objects import ObjectSource, deserialize
from tests.unit.stored_objects import archive

PLAIN = {
    "numbers": [1, -(2**70), 1.5, float("inf"), True, None, 1 + 2j],
    "text": "é",
    "bytes": b"\0\xff",
    "nested": {("a", 1): [{"x": (1, 2)}, {3}]},
    "ordered": collections.OrderedDict(b=1, a=2),
    "dtype": torch.bfloat16,
    "shape": torch.Size([1, 2]),
}


def serialized(value: object) -> bytes:
    return ObjectSource("key", value, Mutability.NOW).serialize()


@pytest.mark.parametrize("value", [PLAIN, None, 0, "", [], {}, [PLAIN, PLAIN]], ids=lambda v: str(v)[:20])
def test_plain_data_comes_back_equal(value):
    assert deserialize(serialized(value), "key") == value


def test_an_object_that_is_kept_serialized_has_the_bytes_that_torch_writes():
    buffer = io.BytesIO()
    torch.save([None], buffer)
    assert serialized([None]) == buffer.getvalue()
    assert deserialize(serialized([None]), "key") == [None]
    for other in ([None, None], (None,), [torch.zeros(1)], [0]):
        assert serialized(other) != buffer.getvalue()


def test_tensors_in_objects_come_back_bit_by_bit():
    value = {"state": torch.randn(3, 4).to(torch.bfloat16), "rng": torch.get_rng_state()}
    found = deserialize(serialized(value), "key")
    assert found["state"].dtype is torch.bfloat16
    assert all(torch.equal(found[name], value[name]) for name in value)


def test_an_object_is_serialized_as_it_is_at_the_time_of_the_call():
    value = {"step": 1}
    item = ObjectSource("key", value, Mutability.NOW)
    value["step"] = 2
    data = item.serialize()
    value["step"] = 3
    assert deserialize(data, "key") == {"step": 2}


class Command:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.command = f"touch {path}"

    def __reduce__(self):
        return os.system, (self.command,)


def legacy(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


@pytest.mark.parametrize("encode", [serialized, legacy, pickle.dumps], ids=["zip", "legacy", "plain pickle"])
def test_a_malicious_object_does_not_run(tmp_path, encode):
    trace = tmp_path / "trace"
    data = encode({"args": [Command(trace)]})
    with pytest.raises(FormatError, match="object 'key' was not loaded"):
        deserialize(data, "key")
    assert not trace.exists()
    pickle.loads(pickle.dumps(Command(trace)))
    assert trace.exists()  # so the trace would have shown that the command ran


def test_an_unknown_class_is_refused_with_advice():
    with pytest.raises(FormatError, match=r"'key'.*fractions.Fraction.*add_safe_globals") as caught:
        deserialize(serialized(fractions.Fraction(1, 3)), "key")
    assert "set to `False`" not in str(caught.value)  # torch's own advice, which runs any code


def test_a_class_that_the_user_trusts_is_loaded():
    with torch.serialization.safe_globals([fractions.Fraction]):
        assert deserialize(serialized(fractions.Fraction(1, 3)), "key") == fractions.Fraction(1, 3)


def test_every_truncation_is_refused():
    data = serialized({"a": [1, 2, 3]})
    for length in range(0, len(data), 7):
        with pytest.raises(FormatError, match="'key'"):
            deserialize(data[:length], "key")


@pytest.mark.parametrize(("member", "named"), [("data.pkl", "data.pkl"), ("data/0", "storage '0'")])
def test_a_flipped_bit_is_found_without_our_own_checksums(member, named):
    data = bytearray(serialized({"number": 1.5, "tensor": torch.ones(3)}))
    found = find_members(io.BytesIO(data))[member]
    number = struct.pack(">d", 1.5)
    at = data.index(number) if member == "data.pkl" else found.offset
    assert found.offset <= at < found.offset + found.size
    data[at + 1] ^= 1
    with pytest.raises(FormatError, match=f"the CRC-32 of its {named} differs"):
        deserialize(bytes(data), "key")


def test_a_pickle_that_ends_in_another_member_is_refused():
    def of(number_bytes: int) -> bytes:
        return archive(b"\x80\x02\x8b" + struct.pack("<I", number_bytes), **{"0": b"." * 8})

    members = find_members(io.BytesIO(of(0)))
    first, begin = members["data.pkl"], members["data/0"].offset
    with pytest.raises(FormatError, match=r"its data\.pkl runs past its end"):
        deserialize(of(begin - first.offset - first.size), "key")


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"PK\x03\x04" + b"\xff" * 100, b"\x80\x05.", b"text"])
def test_other_bytes_are_refused(data):
    with pytest.raises(FormatError, match="'key'"):
        deserialize(data, "key")


def test_a_small_object_is_one_write_and_a_large_tensor_is_passed_on_without_a_copy():
    writes: list[tuple[int, int]] = []

    def write(data: memoryview) -> int:
        writes.append((np.frombuffer(data, np.uint8).ctypes.data, len(data)))
        return len(data)

    ObjectSource("key", PLAIN).write(write)
    assert len(writes) == 1
    tensor = torch.zeros(1 << 20, dtype=torch.uint8)
    ObjectSource("key", {"w": tensor}).write(write)
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    passed = sum(size for at, size in writes if begin <= at < end)
    assert passed > tensor.nbytes - (128 << 10), "all but what filled the buffer up"


def test_an_error_of_a_write_is_raised_though_torchs_writer_never_sees_it():
    def write(data: memoryview) -> int:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        ObjectSource("key", PLAIN).write(write)
