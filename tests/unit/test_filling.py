"""Loads into tensors that cannot take the stored bytes as they are, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import megatron_datastates as ds
from megatron_datastates.dcp import DataStatesReader
from megatron_datastates.errors import MismatchError, OptionError, SaveFailedError
from megatron_datastates.format.stored_entries import StoredTensors
from megatron_datastates.format.tensor_entry import TensorEntry
from megatron_datastates.pipeline.loading import filling
from megatron_datastates.pipeline.loading.filling import fill, sharing
from megatron_datastates.pipeline.loading.in_place import Temporaries
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.plan.boxes import hold_all
from megatron_datastates.plan.coverage import coverage_faults
from megatron_datastates.providers import Cast
from megatron_datastates.providers.base import Place, TensorSource
from tests.unit.states import SMALL


def saved(path: Path, tensor: torch.Tensor) -> Path:
    ds.save({"w": tensor}, path, **SMALL)
    return path


def load(how: str, directory: Path, target: Any) -> None:
    if how == "ours":
        ds.load(directory, into={"w": target})
    else:
        dcp.load({"w": target}, storage_reader=DataStatesReader(directory), no_dist=True)


@pytest.mark.parametrize("is_filled", [True, False])
def test_a_load_reads_the_entries_of_all_tensors_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_filled: bool
) -> None:
    """With thousands of tensors, each would open the index, on every rank."""
    state = {str(number): torch.ones(2) for number in range(5)}
    ds.save(state, tmp_path / "c", **SMALL)
    looks: list[int] = []
    usual = StoredTensors._load

    def count(tensors: StoredTensors, numbers: dict[str, int]) -> None:
        looks.append(len(numbers))
        usual(tensors, numbers)

    monkeypatch.setattr(StoredTensors, "_load", count)
    ds.load(tmp_path / "c", into={name: torch.zeros(2) for name in state} if is_filled else None)
    assert looks == [5]


# -- targets ----------------------------------------------------------------------------------------------


def test_a_target_smaller_than_its_place_is_refused_and_nothing_written(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(saved(tmp_path / "c", torch.arange(64.0)))
    memory = torch.full((64,), -1.0)
    for target in (memory[:4], torch.zeros(65), torch.zeros(8, 8)):
        with pytest.raises(MismatchError, match=r"'w': the target has the shape .* and its place the shape"):
            fill(checkpoint, {"w": (Place((64,), (0,), (64,)), target)})
    assert torch.equal(memory, torch.full((64,), -1.0))


class Local(torch.Tensor):
    """Stands for a DTensor, which needs a process group."""

    def to_local(self) -> torch.Tensor:
        return torch.zeros(2)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (torch.zeros(4, device="meta"), "on the meta device"),
        (torch.zeros(4).to_sparse(), "of the layout torch.sparse_coo"),
        (torch.zeros(1).expand(4), "elements of the target share memory"),
        (
            torch.zeros(4).as_subclass(Local),
            "the target is a Local, which is filled only by torch.distributed",
        ),
    ],
    ids=["meta", "sparse", "expanded", "distributed"],
)
def test_a_target_without_memory_of_its_own_is_refused(
    target: torch.Tensor, why: str, tmp_path: Path
) -> None:
    with pytest.raises(MismatchError, match=f"'w': .*{why}"):
        ds.load(saved(tmp_path / "c", torch.arange(4.0)), into={"w": target})


@pytest.mark.parametrize("how", ["ours", "dcp"])
@pytest.mark.parametrize("left_bytes", [0, 15])
def test_a_target_that_ends_beyond_its_storage_is_refused(left_bytes: int, how: str, tmp_path: Path) -> None:
    target = torch.zeros(4)
    target.untyped_storage().resize_(left_bytes)  # as where a tensor is offloaded
    error = MismatchError if how == "ours" else CheckpointException
    with pytest.raises(error, match=f"'w': the target ends beyond its storage of {left_bytes} bytes"):
        load(how, saved(tmp_path / "c", torch.arange(4.0)), target)


def test_a_target_whose_rows_overlap_is_refused(tmp_path: Path) -> None:
    directory = saved(tmp_path / "c", torch.arange(16.0).reshape(4, 4))
    with pytest.raises(MismatchError, match="'w': elements of the target share memory"):
        ds.load(directory, into={"w": torch.as_strided(torch.zeros(10), (4, 4), (1, 1))})


@pytest.mark.parametrize(("how", "counts"), [("ours", 1.0), ("dcp", 2.0)])  # DCP sorts keys
def test_the_last_of_targets_that_share_memory_counts(how: str, counts: float, tmp_path: Path) -> None:
    count = 1 << 20  # two threads would read both at once
    ds.save({"a": torch.full((count,), 1.0), "b": torch.full((count,), 2.0), "c": torch.ones(8)}, tmp_path)
    for _ in range(20):
        memory = torch.zeros(count + 8)
        into = {"c": memory[count:], "b": memory[:count], "a": memory[:count]}
        if how == "ours":
            ds.load(tmp_path, into=into)
        else:
            dcp.load(into, storage_reader=DataStatesReader(tmp_path), no_dist=True)
        assert (memory[:count] == counts).all() and (memory[count:] == 1).all()


@pytest.mark.parametrize("rounded", ["first", "last"])
def test_the_last_of_them_counts_also_where_one_is_converted(rounded: str, tmp_path: Path) -> None:
    """As of tied weights one of which was cast: what is converted is filled after the rest."""
    values = torch.linspace(0, 1, 100)
    ds.save({"model": Cast({"first": values, "last": values}, torch.bfloat16, rounded)}, tmp_path, **SMALL)
    tied = torch.zeros(100)
    ds.load(tmp_path, into={"model": {"first": tied, "last": tied}})
    assert torch.equal(tied, values) == (rounded == "first")


@pytest.mark.parametrize("how", ["ours", "dcp"])
def test_a_backward_pass_does_not_use_what_a_load_has_replaced(how: str, tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    loss = (weight * torch.ones(4, requires_grad=True)).sum()
    load(how, saved(tmp_path / "c", torch.arange(4.0)), weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Row:
    """A provider of one row of a matrix, which it holds without the other dimension."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.source = TensorSource("row", tensor, place=Place((1, 3), (0, 0), (1, 3)))

    def entries(self) -> list[TensorSource]:
        return [self.source]

    def restore(self, reader: Any) -> None:
        reader.read_into({"row": self.source})


def test_a_tensor_with_fewer_dimensions_than_its_place_is_restored_as_it_was_saved(tmp_path: Path) -> None:
    ds.save({"rows": Row(torch.arange(3.0))}, tmp_path)
    target = torch.zeros(6)
    ds.load(tmp_path, into={"rows": Row(target[::2])})
    assert target.tolist() == [0, 0, 1, 0, 2, 0]


def test_targets_that_share_memory_are_found_and_neighbours_are_not() -> None:
    memory = torch.zeros(16)
    targets = [memory[4:8], memory[:4], memory[8:8], memory[8:12], memory[10:11], memory[11:16], memory[15:]]
    assert sharing(targets) == [3, 4, 5, 6]
    assert sharing([memory, memory]) == [0, 1]
    assert sharing([memory, memory[:2], memory[4:6]]) == [0, 1, 2], "the last one begins beyond the second"
    assert sharing([memory]) == sharing([]) == []


@pytest.mark.parametrize("view", [torch._neg_view, torch.conj])
def test_a_target_that_is_a_lazy_view_gets_the_values_that_it_shows(view: Any, tmp_path: Path) -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    memory = torch.zeros_like(values)
    ds.load(saved(tmp_path / "c", values), into={"w": view(memory)})
    assert view(memory).tolist() == values.tolist()


def test_a_target_made_in_inference_mode_is_filled_with_converted_values(tmp_path: Path) -> None:
    with torch.inference_mode():
        target = torch.zeros(4, dtype=torch.bfloat16)
    ds.load(saved(tmp_path / "c", torch.arange(4.0)), into={"w": target})
    assert target.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("values", [torch.tensor([300, -1]), torch.tensor([0.0, 1.5])], ids=["int", "float"])
def test_nothing_becomes_powers_of_two(tmp_path: Path, values: torch.Tensor) -> None:
    target = torch.ones(2).to(torch.float8_e8m0fnu)
    with pytest.raises(MismatchError, match=r"converted to torch\.float8_e8m0fnu: load it as it was"):
        ds.load(saved(tmp_path / "c", values), into={"w": target})


class Scaled(torch.Tensor):
    """A stand-in for quantized tensors: parts of it are copies, and only copies into all of it are kept."""

    whole: torch.Tensor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.copy_:
            args[0].whole = args[1].clone()
            return args[0]
        if function is torch.Tensor.detach:
            return args[0]
        if function is torch.Tensor.__getitem__:
            return torch.zeros(4)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_quantized_target_is_filled_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "_PIECE_BYTES", 8)
    target = torch.zeros(4).as_subclass(Scaled)
    ds.load(saved(tmp_path / "c", torch.arange(4.0)), into={"w": target})
    assert torch.equal(target.whole, torch.arange(4.0))


def test_a_target_of_interleaved_rows_is_filled(tmp_path: Path) -> None:
    target = torch.as_strided(torch.zeros(80), (4, 6), (3, 4))  # without overlaps, which is hard to see
    ds.load(saved(tmp_path / "c", torch.arange(24.0).reshape(4, 6)), into={"w": target})
    assert torch.equal(target, torch.arange(24.0).reshape(4, 6))


def test_pieces_are_read_in_groups_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "_GROUP_BYTES", 1 << 20)
    monkeypatch.setattr(filling, "_PIECE_BYTES", 1 << 18)
    groups: list[int] = []
    read = Checkpoint.read

    def noted(checkpoint: Checkpoint, scheduled: Any, reader: Any = None) -> None:
        items = list(scheduled)
        groups.append(sum(item.bytes for item in items))
        read(checkpoint, items, reader)

    monkeypatch.setattr(Checkpoint, "read", noted)
    state = {"a": torch.ones(300_000), "b": torch.ones(2 << 20), "c": torch.ones(10)}
    ds.save(state, tmp_path / "c", **SMALL)
    into: dict[str, Any] = {name: torch.zeros(one.shape, dtype=torch.bfloat16) for name, one in state.items()}
    into["b"] = into["b"].as_subclass(Scaled)
    ds.load(tmp_path / "c", into=into)
    assert torch.equal(into["a"], torch.ones(300_000, dtype=torch.bfloat16))
    assert max(groups) == 8 << 20, "one of a subclass is read whole, and alone"
    assert all(size <= 1 << 20 for size in groups if size != 8 << 20) and sum(groups) == 1_200_040 + (8 << 20)


def test_temporaries_of_many_dtypes_lie_beside_each_other(tmp_path: Path) -> None:
    dtypes = [torch.uint8, torch.complex128, torch.bfloat16, torch.float64, torch.int8, torch.int32]
    state = {f"{n}": torch.arange(5).to(dtype) for n, dtype in enumerate(dtypes)}
    state["empty"] = torch.empty(0, 3)
    ds.save(state, tmp_path / "c", **SMALL)
    into = {key: torch.zeros(one.shape, dtype=torch.complex64) for key, one in state.items()}
    ds.load(tmp_path / "c", into=dict(into))
    for key, target in into.items():
        assert torch.equal(target, state[key].to(torch.complex64)), key


def test_temporaries_that_do_not_fit_have_memory_of_their_own() -> None:
    temporaries = Temporaries(40)
    first, second = (temporaries.take((5,), torch.float32) for _ in range(2))
    larger = temporaries.take((2, 3), torch.float64)
    for value, one in enumerate((first, second, larger)):
        one.fill_(value)
    assert [one.unique().tolist() for one in (first, second, larger)] == [[0], [1], [2]]
    temporaries.clear()
    assert temporaries.take((5,), torch.float32).data_ptr() == first.data_ptr()


# -- conversion -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["ours", "dcp"])
@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.tensor([3, 300]), torch.int8),
        (torch.tensor([-5]), torch.uint8),
        (torch.tensor([-1], dtype=torch.int8), torch.uint16),
        (torch.tensor([3, 1], dtype=torch.uint8), torch.bool),
    ],
    ids=str,
)
def test_integers_that_a_dtype_does_not_have_are_refused(
    how: str, stored: torch.Tensor, wanted: torch.dtype, tmp_path: Path
) -> None:
    directory = saved(tmp_path / "c", stored)
    with pytest.raises((MismatchError, CheckpointException), match=r"'w' was saved as .* has values that"):
        load(how, directory, torch.zeros(stored.shape, dtype=wanted))


@pytest.mark.parametrize("how", ["ours", "dcp"])
@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.arange(1000), torch.int16),
        (torch.tensor([1.5, float("inf"), float("nan")]), torch.bfloat16),
        (torch.randn(1000, generator=torch.Generator().manual_seed(1)), torch.float8_e5m2),
        (torch.tensor([True, False]), torch.float32),
        (torch.tensor([1, 0], dtype=torch.uint8), torch.bool),
        (torch.tensor([torch.finfo(torch.float32).min, 1.0]), torch.bfloat16),
        (torch.tensor([1e6]), torch.float8_e4m3fn),
        (torch.tensor([100_000]), torch.float16),
        (torch.arange(100).to(torch.uint16), torch.int64),
        (torch.arange(6.0).reshape(2, 3), torch.complex64),
    ],
    ids=lambda value: str(getattr(value, "dtype", value)),
)
def test_values_are_converted_in_pieces(
    how: str, stored: torch.Tensor, wanted: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "_PIECE_BYTES", 256)
    target = torch.zeros(stored.shape, dtype=wanted)
    load(how, saved(tmp_path / "c", stored), target)
    assert target.view(torch.uint8).tolist() == stored.to(wanted).view(torch.uint8).tolist()


def test_a_conversion_reads_each_block_about_once(tmp_path: Path) -> None:
    whole = torch.arange(16 << 20, dtype=torch.float32).to(torch.bfloat16)
    checkpoint = Checkpoint.open(saved(tmp_path / "c", whole))
    target = torch.zeros(whole.shape)
    fill(checkpoint, {"w": (Place(tuple(whole.shape), (0,), tuple(whole.shape)), target)})
    assert torch.equal(target, whole.float())
    assert checkpoint.costs.bytes_read < 1.15 * whole.nbytes


# -- places -----------------------------------------------------------------------------------------------


def test_places_are_in_whole_elements(tmp_path: Path) -> None:
    directory = saved(tmp_path / "c", torch.arange(8.0))
    opened: Any = ds.open(directory)
    with pytest.raises(MismatchError, match=r"'w': the offset is .*expected an integer for each dimension"):
        opened.read_tensor("w", (2.5,), (3,))
    assert opened.read_tensor("w", (np.int64(2),), (np.int32(3),)).tolist() == [2.0, 3.0, 4.0]
    part: Any = torch.zeros(3)
    wrong: list[tuple[Any, Any, str]] = [
        ((8,), (2.5,), "the offset is"),
        ((8.5,), (2,), "the global shape is"),
        ((8,), (6,), r"has shape \(8,\): there is no slice of \(3,\) at \(6,\)"),
        ((4, 2), (0, 0), "there is no slice"),
        (8, 0, "the global shape is 8"),
    ]
    for whole, offset, why in wrong:
        with pytest.raises(MismatchError, match=f"'w'.*{why}"):
            ds.load(directory, into={"w": ds.Shard(part, whole, offset)})
        with pytest.raises(SaveFailedError, match=f"'w'.*{why}"):
            ds.save({"w": ds.Shard(part, whole, offset)}, tmp_path / "other", **SMALL)


def test_holes_of_huge_tensors_are_found() -> None:
    one = np.zeros((1, 2), np.int64)
    none = np.zeros(1, np.uint64)
    entry = TensorEntry("float32", (1 << 32, 1 << 32), one, one + 1, none.astype(np.uint32), none, none + 4)
    assert coverage_faults("w", entry)[0].startswith("tensor 'w' has holes: 1 elements")


@pytest.mark.parametrize("count", [1, 5000])
def test_boxes_are_compared_in_pairs_only_where_none_is_equal(count: int) -> None:
    offsets = np.stack([np.arange(count) * 2, np.zeros(count, np.int64)], axis=1)
    shapes = np.broadcast_to(np.array([2, 4]), offsets.shape)
    whole = (2 * count, 4)
    assert hold_all(offsets, shapes, offsets, shapes, whole)
    assert hold_all(offsets, shapes, offsets[-1:], shapes[-1:] + 5, whole), "beyond the tensor"
    assert not hold_all(offsets[1:], shapes[1:], offsets, shapes, whole)
    assert not hold_all(offsets, shapes - np.array([0, 1]), offsets, shapes, whole)
    assert hold_all(*(np.zeros((1, 0), np.int64),) * 4, ())


def test_a_value_of_another_kind_is_named(tmp_path: Path) -> None:
    ds.save({"w": torch.zeros(4), "o": [1]}, tmp_path / "c", **SMALL)
    with pytest.raises(ds.errors.MissingKeyError, match=r"no tensor 'o' in .*: 'o' is an object there"):
        ds.load(tmp_path / "c", into={"o": torch.zeros(4)})
    with pytest.raises(ds.errors.MissingKeyError, match=r"no object 'w' in .*: 'w' is a tensor there"):
        ds.load(tmp_path / "c", into={"w": None})


# -- saves ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [6.0, "5", True, -1, 1 << 63, torch.tensor(5.5), np.array([1, 2])], ids=str)
def test_an_iteration_that_no_load_accepts_is_refused_and_nothing_replaced(
    wrong: Any, tmp_path: Path
) -> None:
    directory = saved(tmp_path / "c", torch.arange(4.0))
    with pytest.raises(SaveFailedError, match=r"iteration=.*expected a whole number from 0 to 2\*\*63 - 1,"):
        ds.save({"w": torch.zeros(4)}, directory, iteration=wrong, **SMALL)
    assert ds.load(directory)["w"].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_dtype_without_a_code_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SaveFailedError, match="'w' has dtype int4, which cannot be saved"):
        ds.save({"w": torch.empty(4, dtype=torch.int4)}, tmp_path / "c", **SMALL)


def test_an_iteration_may_be_of_numpy(tmp_path: Path) -> None:
    number: Any = np.int64(7)
    ds.save({"w": torch.zeros(4)}, tmp_path / "c", iteration=number, **SMALL)
    assert ds.open(tmp_path / "c").manifest.iteration == 7


@pytest.mark.parametrize("path", ["s3://bucket/x", Path("s3://bucket/x"), "file:///tmp/x", ""])
def test_what_is_no_directory_is_refused(
    path: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (lambda: ds.save({"w": torch.zeros(4)}, path, **SMALL), lambda: ds.load(path)):
        with pytest.raises(OptionError, match="expected a directory"):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["c\0", b"c", 5, None], ids=repr)
def test_what_names_no_directory_is_refused(path: Any) -> None:
    for call in (lambda: ds.save({"w": 1}, path, **SMALL), lambda: ds.load(path), lambda: ds.open(path)):
        with pytest.raises(OptionError, match=r"expected a directory as a str or a pathlib\.Path, found"):
            call()


def test_a_load_waits_for_lazy_saves_of_the_memory_that_it_fills(tmp_path: Path) -> None:
    directory = saved(tmp_path / "c", torch.full((1 << 20,), 5.0))
    state = torch.arange(float(1 << 20))
    before = state.clone()
    handle = ds.async_save({"w": state}, tmp_path / "lazy", lazy=True, lazy_delay=0.5, **SMALL)
    ds.load(directory, into={"w": state})
    handle.wait()
    assert torch.equal(ds.load(tmp_path / "lazy")["w"], before)
    assert torch.equal(state, torch.full((1 << 20,), 5.0))
