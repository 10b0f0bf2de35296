"""The zarr view: what zarr itself reads through it, and how much of the checkpoint that takes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from zarr.core.buffer import default_buffer_prototype

import megatron_datastates as ds
from megatron_datastates import zarr_view
from megatron_datastates.convert.sources.datastates import DataStatesSource
from megatron_datastates.errors import CorruptDataError, NotACheckpointError
from tests.unit.by_hand import Part, fragment, index_of, write_checkpoint
from tests.unit.states import KNOWN_DTYPES, SMALL, bits, data_files, random_tensor

FC1 = "decoder.layers.mlp.linear_fc1.weight"


@pytest.fixture
def viewed(tmp_path: Path):
    """Saves tensors; returns the view of them."""

    def view(tensors: dict[str, torch.Tensor], **options: bool) -> zarr.Group:
        ds.save(tensors | {"rng": [1]}, tmp_path / "ck", **SMALL)
        return zarr_view.open(tmp_path / "ck", **options)

    return view


def numbers(group: zarr.Group, name: str) -> np.ndarray:
    array = group[name]
    assert isinstance(array, zarr.Array)
    return np.asarray(array[...])


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", KNOWN_DTYPES)
@pytest.mark.parametrize("chunk_bytes", [32, 1 << 20])
def test_every_dtype_is_read_bit_by_bit(name: str, chunk_bytes: int, viewed, monkeypatch):
    monkeypatch.setattr(zarr_view, "CHUNK_BYTES", chunk_bytes)
    tensor = random_tensor(getattr(torch, name), (5, 7))
    group = viewed({"w": tensor})
    found = numbers(group, "w")
    assert found.tobytes() == bits(tensor)
    assert group["w"].attrs["dtype"] == name
    assert str(found.dtype) == (name if hasattr(np, name) else f"uint{8 * tensor.itemsize}")


@pytest.mark.parametrize("name", [n for n in KNOWN_DTYPES if n == "bfloat16" or n.startswith("float8")])
def test_short_floats_are_shown_as_numbers_if_asked_for(name: str, viewed):
    tensor = random_tensor(getattr(torch, name), (5, 7))
    group = viewed({"w": tensor, "half": torch.ones(2).half(), "step": torch.tensor(3)}, as_float32=True)
    np.testing.assert_array_equal(numbers(group, "w"), tensor.float().numpy())
    assert (numbers(group, "half").dtype, numbers(group, "step").dtype) == (np.float16, np.int64)


def test_a_slice_reads_its_chunks_and_nothing_else(viewed, monkeypatch):
    monkeypatch.setattr(zarr_view, "CHUNK_BYTES", 4 * 16 * 2)
    tensor = random_tensor(torch.float32, (4, 16, 8))
    array = viewed({FC1: tensor, "other": torch.ones(3)})[FC1]
    real, asked = DataStatesSource.read_tensor, []

    def read(source: DataStatesSource, key: str, offset, shape) -> torch.Tensor:
        asked.append((key, offset, shape))
        return real(source, key, offset, shape)

    monkeypatch.setattr(DataStatesSource, "read_tensor", read)
    found = np.asarray(array[2, 5:9])
    assert found.tobytes() == bits(tensor[2, 5:9])
    assert asked == [(FC1, (2, 4, 0), (1, 4, 8)), (FC1, (2, 8, 0), (1, 4, 8))]


def test_a_group_lists_every_tensor_and_says_how_it_is_stored(viewed):
    tensors = {FC1: torch.ones(4, 2), "empty": torch.empty(0, 3), "scalar": torch.tensor(2.5)}
    group = viewed(tensors)
    assert set(group.array_keys()) == tensors.keys() and group.attrs["format"] == "datastates"
    assert numbers(group, "scalar") == 2.5 and numbers(group, "empty").shape == (0, 3)
    assert group[FC1].metadata.dimension_names == ("d0_4", "d1_2")
    assert group[FC1].nchunks_initialized == group[FC1].nchunks == 1
    with pytest.raises(KeyError):
        group["nothing"]


@pytest.mark.parametrize(
    "key", ["a/b", "a\\b", "\\", "%5C", "%", "%2F", "/", "__a", ".", "..", "...", "zarr.json", "a b", "ä/__b"]
)
def test_keys_that_zarr_cannot_have_are_escaped(key: str, viewed):
    group = viewed({key: torch.tensor([7]), "a%2Fb": torch.tensor([8])})
    assert numbers(group, zarr_view.array_name(key)).tolist() == [7]
    assert numbers(group, "a%252Fb").tolist() == [8]
    assert {array.attrs["key"] for _, array in group.arrays()} == {key, "a%2Fb"}


def test_no_two_keys_have_one_name():
    keys = [
        "",
        "%",
        "%25",
        "\\",
        "%5C",
        "/",
        "%2F",
        "__a",
        "%5F_a",
        "zarr.json",
        "%7Aarr.json",
        ".",
        "%2E",
        "..",
        "%2E.",
    ]
    names = {zarr_view.array_name(key) for key in keys}
    assert len(names) == len(keys) and not names & {"", ".", "..", "zarr.json"}


def grid_of(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], tmp_path: Path):
    """Returns the view of a tensor `w` of uint8 that is stored in these boxes; and its bytes."""
    whole = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    pieces, places, at = [], [], 4096
    for offset, size in boxes:
        data = whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))].tobytes()
        pieces.append((at, data))
        places.append((fragment("w", shape, offset, size), 0, at))
        at += 64
    write_checkpoint(tmp_path, [Part(pieces=pieces)], index_of(places))
    return zarr_view.open(tmp_path)["w"], whole


def test_chunks_are_the_fragments_where_these_are_a_grid(tmp_path):
    boxes = [((r, c), (min(2, 5 - r), min(3, 4 - c))) for r in (0, 2, 4) for c in (0, 3)]
    array, whole = grid_of((5, 4), boxes, tmp_path)
    assert array.chunks == (2, 3)
    np.testing.assert_array_equal(array[...], whole)


@pytest.mark.parametrize(
    "boxes",
    [[((0,), (3,)), ((3,), (7,))], [((0,), (6,)), ((6,), (2,)), ((8,), (2,))]],
    ids=["large", "small"],
)
@pytest.mark.parametrize(("chunk_bytes", "chunk"), [(4, 4), (100, 10)])
def test_irregular_fragments_are_shown_in_chunks_of_bounded_size(
    boxes, chunk_bytes, chunk, tmp_path, monkeypatch
):
    monkeypatch.setattr(zarr_view, "CHUNK_BYTES", chunk_bytes)
    array, whole = grid_of((10,), boxes, tmp_path)
    assert array.chunks == (chunk,)
    np.testing.assert_array_equal(array[...], whole)


def test_only_chunks_of_the_grid_are_there(viewed):
    group = viewed({"w": torch.ones(3, 4), "scalar": torch.tensor(5)})

    def found(path: str) -> bool:
        prototype = default_buffer_prototype()
        return asyncio.run(group.store.get(path, prototype)) is not None

    assert found("w/c/0/0") and found("scalar/c")
    others = [
        "w/c",
        "w/c/0",
        "w/c/0/0/0",
        "w/c/0/1",
        "w/c/00/0",
        f"w/c/0/{'9' * 5000}",
        "scalar/c/0",
        "x/c/0",
    ]
    assert not any(map(found, others))


def test_a_group_is_listed_however_many_chunks_an_array_claims(tmp_path):
    places = [(fragment("w", [1 << 50], [0], [1]), 0, 4096), (fragment("x", [8], [0], [8]), 0, 4096)]
    write_checkpoint(tmp_path, [Part(pieces=[(4096, bytes(8))])], index_of(places))
    group = zarr_view.open(tmp_path)
    assert sorted(group) == ["w", "x"]
    assert numbers(group, "x").tolist() == [0] * 8


def test_corrupt_data_is_an_error_and_never_zeros(tmp_path):
    ds.save({"w": torch.ones(8)}, tmp_path, **SMALL)
    (path,) = data_files(tmp_path)
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    path.write_bytes(data)
    array = zarr_view.open(tmp_path)["w"]
    with pytest.raises(CorruptDataError):
        array[...]


def test_nothing_can_be_written(viewed, tmp_path):
    group = viewed({"w": torch.ones(8)})
    assert group.store.read_only
    before = {path: path.read_bytes() for path in (tmp_path / "ck").iterdir()}
    with pytest.raises(ValueError, match="read-only"):
        group["w"][0] = 5
    with pytest.raises(ValueError, match="read-only"):
        group.create_array("x", shape=(1,), dtype="f4")
    assert {path: path.read_bytes() for path in (tmp_path / "ck").iterdir()} == before


def test_a_directory_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(NotACheckpointError):
        zarr_view.open(tmp_path)


def test_an_open_checkpoint_stays_readable_when_the_program_changes_its_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ds.save({"t": torch.ones(2), "n": 5}, "ck")
    checkpoint, group = ds.open("ck"), zarr_view.open("ck")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert checkpoint.read_tensor("t").tolist() == numbers(group, "t").tolist() == [1, 1]
    assert checkpoint.read_object("n") == 5
