"""From a state to files and back, in one process without torch.distributed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import megatron_datastates as ds
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.engine.reader import read_header
from megatron_datastates.errors import FormatError, MismatchError, MissingKeyError, NotACheckpointError
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.runs.runs import find_iterations, is_published
from megatron_datastates.pipeline.upkeep.verify import verify
from megatron_datastates.providers.base import Mutability
from tests.support.fragments import fragments_of
from tests.unit.by_hand import block_checksums
from tests.unit.states import (
    KNOWN_DTYPES,
    OPTIONS,
    SMALL,
    State,
    bits,
    data_files,
    new_saver,
    random_tensor,
    save,
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")
SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (3, 5), (2, 3, 4, 5)]
MIXED = {
    f"{name} {shape}": random_tensor(getattr(torch, name), shape, seed)
    for seed, name in enumerate(KNOWN_DTYPES)
    for shape in SHAPES
}
LARGE = {
    "3 MiB": random_tensor(torch.float32, (3, 1 << 18), 1),
    "small": random_tensor(torch.int64, (5,), 2),
    "1 MiB": random_tensor(torch.uint8, (1 << 20,), 3),
    "strided": random_tensor(torch.float32, (600, 1000), 4)[:, 100:900],
    "transposed": random_tensor(torch.float32, (600, 100), 5).t(),
    "1 MiB less 1": random_tensor(torch.uint8, ((1 << 20) - 1,), 6),
}
MUTABILITIES = list(Mutability)


def assert_holds(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> None:
    assert set(checkpoint.index.tensors) == set(tensors)
    for key, tensor in tensors.items():
        found = checkpoint.read_tensor(key)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), key
        assert bits(found) == bits(tensor), key


@pytest.mark.parametrize("mutability", MUTABILITIES, ids=lambda m: m.name)
def test_every_dtype_and_shape_comes_back_bit_by_bit(saver, tmp_path, mutability):
    assert save(saver, tmp_path / "c", MIXED, mutability=mutability).outcome is Outcome.PUBLISHED
    assert_holds(ds.open(tmp_path / "c", **SMALL), MIXED)


@pytest.mark.parametrize("mutability", MUTABILITIES, ids=lambda m: m.name)
def test_large_and_strided_tensors_come_back_bit_by_bit(saver, tmp_path, mutability):
    save(saver, tmp_path / "c", LARGE, {"x": [1, 2]}, mutability)
    checkpoint = ds.open(tmp_path / "c", **SMALL)
    assert_holds(checkpoint, LARGE)
    assert checkpoint.read_object("x") == [1, 2]
    assert verify(tmp_path / "c", options=OPTIONS).good


@pytest.mark.parametrize("direct_io", [True, False])
@pytest.mark.parametrize("slot_size", [1 << 20, 4 << 20])
def test_a_state_larger_than_the_staging_memory_streams_through_it(tmp_path, direct_io, slot_size):
    tensors = {str(n): random_tensor(torch.uint8, (3 << 20,), n) for n in range(5)}
    ds.save(tensors, tmp_path / "c", **SMALL | {"direct_io": direct_io, "slot_size": slot_size})
    assert_holds(ds.open(tmp_path / "c", **SMALL), tensors)


def test_the_data_file_has_the_form_that_the_document_describes(saver, tmp_path):
    publication = save(saver, tmp_path / "c", LARGE, {"x": 1})
    checkpoint = ds.open(tmp_path / "c", **SMALL)
    (path,) = data_files(tmp_path / "c")
    footer, data = checkpoint.footer(0), path.read_bytes()
    assert len(data) % 4096 == footer.data_bytes % 4096 == 0
    assert footer.block_checksums == block_checksums(data[: footer.data_bytes])
    assert footer.layout_digest == publication.save.plan.layout.digest
    assert read_header(path, len(data)).save_id == footer.save_id == checkpoint.manifest.save_id
    covered = bytearray(footer.data_bytes)
    covered[:4096] = b"\1" * 4096
    extents = [(e.offset, e.bytes) for t in checkpoint.index.tensors.values() for _, e in fragments_of(t)]
    for offset, size in [*extents, *((e.offset, e.bytes) for e in footer.objects.values())]:
        assert not any(covered[offset : offset + size])
        covered[offset : offset + size] = b"\1" * size
    assert not any(byte for byte, used in zip(data, covered, strict=False) if not used)  # gaps are zeroed


@pytest.mark.parametrize("mutability", MUTABILITIES, ids=lambda m: m.name)
def test_objects_come_back_equal(saver, tmp_path, mutability):
    objects = {"a/shard_0_1": [{"step": 1}], "empty": None, "big": "x" * 3_000_000, "ключ": b"\0"}
    save(saver, tmp_path / "c", {}, objects, mutability)
    checkpoint = ds.open(tmp_path / "c", **SMALL)
    assert checkpoint.read_objects(objects) == objects
    assert set(checkpoint.index.objects) == set(objects)


def test_a_state_without_anything_is_published_without_a_data_file(saver, tmp_path):
    assert save(saver, tmp_path / "c", {}).outcome is Outcome.PUBLISHED
    assert ds.open(tmp_path / "c", **SMALL).manifest.files == []
    assert verify(tmp_path / "c", options=OPTIONS).good


def test_what_may_change_at_once_is_copied_before_start_returns(saver, tmp_path):
    tensor, value = random_tensor(torch.uint8, (5 << 20,)), {"step": [1]}
    before = tensor.clone()
    publication = saver.start(tmp_path / "c", State({"w": tensor}, {"x": value}, Mutability.NOW))
    tensor.zero_()
    value["step"][0] = 2
    publication.wait()
    checkpoint = ds.open(tmp_path / "c", **SMALL)
    assert bits(checkpoint.read_tensor("w")) == bits(before)
    assert checkpoint.read_object("x") == {"step": [1]}


def test_what_may_change_at_the_fence_is_copied_before_the_fence_ends(saver, tmp_path):
    tensor = random_tensor(torch.uint8, (12 << 20,))
    before = tensor.clone()
    publication = saver.start(tmp_path / "c", State({"w": tensor}, mutability=Mutability.AT_FENCE))
    FENCE.wait("the step")
    tensor.zero_()
    assert publication.wait() is Outcome.PUBLISHED
    assert bits(ds.open(tmp_path / "c", **SMALL).read_tensor("w")) == bits(before)


def test_without_lazy_copies_nothing_is_left_to_the_fence(tmp_path):
    saver = new_saver(lazy=False)
    tensor = random_tensor(torch.uint8, (5 << 20,))
    before = tensor.clone()
    publication = saver.start(tmp_path / "c", State({"w": tensor}, mutability=Mutability.AT_FENCE))
    tensor.zero_()
    publication.wait()
    saver.close()
    assert bits(ds.open(tmp_path / "c", **SMALL).read_tensor("w")) == bits(before)


# -- slices -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    directory = tmp_path_factory.mktemp("grid") / "c"
    tensor = random_tensor(torch.int16, (40, 30, 20))
    ds.save({"w": tensor, "scalar": torch.tensor(2.5)}, directory, **SMALL)
    return ds.open(directory, **SMALL), tensor


@given(data=st.data())
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_slice_is_torchs_slice(grid, data):
    checkpoint, tensor = grid
    offset = [data.draw(st.integers(0, size)) for size in tensor.shape]
    shape = [data.draw(st.integers(0, size - at)) for at, size in zip(offset, tensor.shape, strict=True)]
    wanted = tensor[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
    found = checkpoint.read_tensor("w", offset, shape)
    assert found.shape == wanted.shape
    assert bits(found) == bits(wanted)


@pytest.mark.parametrize(
    ("offset", "shape"),
    [
        ([0, 0, 0], [41, 30, 20]), ([1, 0, 0], [40, 30, 20]), ([-1, 0, 0], [1, 1, 1]),
        ([0, 0, 0], [-1, 1, 1]), ([41, 0, 0], [0, 0, 0]), ([0, 0], [1, 1]),
        ([0, 0, 0], [1, 1]), ([0, 0], [1, 1, 1]), ([], []),
        ([0, 0, 0, 0], [1, 1, 1, 1]), ([2**62, 0, 0], [2**62, 1, 1]),
    ],
)  # fmt: skip
def test_a_slice_outside_the_tensor_is_refused_with_both_shapes(grid, offset, shape):
    with pytest.raises(MismatchError, match=r"'w' has shape \(40, 30, 20\): there is no slice of"):
        grid[0].read_tensor("w", offset, shape)


def test_a_scalar_has_one_slice(grid):
    assert grid[0].read_tensor("scalar", [], []).item() == 2.5


def test_a_missing_tensor_or_object_is_named(grid):
    with pytest.raises(MissingKeyError, match="no tensor 'nothing'"):
        grid[0].read_tensor("nothing")
    with pytest.raises(MissingKeyError, match="no object 'w'"):
        grid[0].read_object("w")


def test_a_dtype_that_this_torch_lacks_is_named(grid, monkeypatch):
    monkeypatch.delattr(torch, "int16")
    with pytest.raises(FormatError, match=r"tensor '.*' has dtype int16, which torch .* does not have"):
        grid[0].read_tensor("w")


# -- directories ------------------------------------------------------------------------------------------


def test_published_checkpoints_are_found_by_iteration(tmp_path):
    for name in ("iter_0000010", "iter_0000002", "other", "iter_x"):
        ds.save({"w": torch.ones(1)}, tmp_path / name, **SMALL)
    (tmp_path / "iter_0000030").mkdir()
    (tmp_path / "iter_0000040").write_text("a file")
    assert [(one.number, one.path) for one in find_iterations(tmp_path) if one.complete] == [
        (2, tmp_path / "iter_0000002"), (10, tmp_path / "iter_0000010")
    ]  # fmt: skip


def empty(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda d: (d / MANIFEST_NAME).unlink(), "unfinished.*its save was killed or failed"),
        (empty, "there is no datastates.manifest in it"),
        (
            lambda d: (empty(d), (d / ".metadata").touch()),
            "a checkpoint of torch_dist or DCP.*`datastates convert`",
        ),
        (
            lambda d: (empty(d), (d / "iter_0000009").mkdir(), (d / "iter_0000010").mkdir()),
            "directory of a run.*/iter_0000010$",
        ),
        (lambda d: d.rename(d.parent / "moved"), "does not exist"),
    ],
    ids=["without its manifest", "empty", "torch_dist", "run", "missing"],
)
def test_a_directory_without_a_manifest_is_refused_with_the_reason(tmp_path, spoil, reason):
    ds.save({"w": torch.ones(1)}, tmp_path / "c", **SMALL)
    assert is_published(tmp_path / "c")
    spoil(tmp_path / "c")
    assert not is_published(tmp_path / "c")
    with pytest.raises(NotACheckpointError, match=f"{tmp_path / 'c'}.*{reason}"):
        ds.open(tmp_path / "c", **SMALL)
