"""Archives of torch.save: read and written in parts."""

from __future__ import annotations

import io
import subprocess
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_datastates.convert.sources.archives import open_archive, write_archive
from megatron_datastates.errors import FormatError, StorageError
from tests.unit.states import KNOWN_DTYPES, bits, random_tensor


@pytest.mark.parametrize("name", KNOWN_DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 5)])
def test_torch_loads_an_archive_that_we_wrote(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = random_tensor(getattr(torch, name), shape)
    data = torch.frombuffer(bytearray(bits(tensor)), dtype=torch.uint8).numpy() if tensor.numel() else b""
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(b"before")  # an archive may begin at any offset
        write_archive(file, name, shape, [data[:1], data[1:]] if len(data) else [])  # type: ignore[list-item]
    loaded = torch.load(io.BytesIO(path.read_bytes()[6:]), weights_only=True)
    assert (loaded.dtype, loaded.shape, bits(loaded)) == (tensor.dtype, tensor.shape, bits(tensor))


def archive_of(value: Any, tmp_path: Path) -> Callable[[], Any]:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    path = tmp_path / "file"
    path.write_bytes(buffer.getvalue())
    return lambda: open_archive(path.open("rb"), 0, path.stat().st_size, "here")


def test_any_bytes_of_a_tensor_in_any_memory_layout_are_read(tmp_path: Path) -> None:
    whole = random_tensor(torch.int16, (4, 6, 5, 3), 3)
    for tensor in (
        whole,
        whole.permute(2, 0, 3, 1),
        whole[1:, ::2, 1:],
        whole[2:3, :, :, 1],
        whole[0, 0, 0, ::2],
    ):
        archive, expected = archive_of(tensor, tmp_path)(), bits(tensor)
        for begin, end in [
            (0, len(expected)),
            (0, 2),
            (2, len(expected) - 2),
            (len(expected) - 2, len(expected)),
        ]:
            target = torch.zeros(end - begin, dtype=torch.uint8).numpy()
            archive.read_into(begin, target)
            assert target.tobytes() == expected[begin:end]


def test_a_range_that_crosses_two_long_rows_takes_no_more_memory_than_itself(tmp_path: Path) -> None:
    value = torch.arange(4 << 20, dtype=torch.int32).reshape(-1, 2).t()  # two rows of 8 MiB
    torch.save(value, tmp_path / "archive")
    target, expected = np.empty(1 << 16, np.uint8), value.contiguous().reshape(-1).view(torch.uint8)
    begin = (8 << 20) - 1000
    with (tmp_path / "archive").open("rb") as file:
        archive = open_archive(file, 0, (tmp_path / "archive").stat().st_size, "here")
        tracemalloc.start()
        archive.read_into(begin, target)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert target.tobytes() == expected[begin : begin + len(target)].numpy().tobytes()
    assert peak < 8 * len(target)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_conjugated_and_negated_views_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = random_tensor(dtype, (4, 6), 3)
    for tensor in (whole.conj(), whole.t().conj(), whole.conj().imag, torch._neg_view(whole.conj())[1:, ::2]):
        archive, expected = archive_of(tensor, tmp_path)(), bits(tensor.resolve_conj().resolve_neg())
        assert archive.crc is None
        places = [(0, tensor.numel()), (0, 1), (1, 2), (3, tensor.numel() - 1)]
        for begin, end in [(i * tensor.itemsize, j * tensor.itemsize) for i, j in places]:
            target = torch.zeros(end - begin, dtype=torch.uint8).numpy()
            archive.read_into(begin, target)
            assert target.tobytes() == expected[begin:end]
        for box in ((slice(1, 3), slice(2, 3)), (slice(0, 2), slice(None))):
            wanted = tensor[box].resolve_conj().resolve_neg()
            found = np.zeros(wanted.shape, f"V{wanted.itemsize}")
            archive.read_box([part.indices(9)[0] for part in box], found)
            assert found.tobytes() == bits(wanted)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([1], "it is not a tensor"),
        (torch._neg_view(torch.ones(2, dtype=torch.int32)), "view of a kind"),
        (torch.ones(2).to_sparse(), "_rebuild_sparse_tensor"),
        (torch.device("cpu"), "torch.device"),
        (subprocess.Popen, r"names \w+\.Popen"),
    ],
)
def test_an_archive_of_anything_but_a_plain_tensor_is_refused(
    value: Any, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(FormatError, match=reason):
        archive_of(value, tmp_path)()


def test_an_archive_of_another_byte_order_is_refused(tmp_path: Path) -> None:
    read = archive_of(torch.ones(8), tmp_path)
    path = tmp_path / "file"
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, b"big" if name.endswith("byteorder") else data)
    with pytest.raises(FormatError, match="another byte order"):
        read()


def test_damaged_archives_are_refused_or_stay_within_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    good = archive_of(torch.ones(8), tmp_path)
    data = path.read_bytes()
    for at in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[at] ^= 0xFF
        path.write_bytes(damaged)
        try:
            archive = good()
            assert archive.shape != () and archive.data_offset + 32 <= len(data)
        except (FormatError, StorageError):
            pass
    path.write_bytes(data[:-40])
    with pytest.raises(FormatError, match=r"not an archive of torch\.save"):
        good()
