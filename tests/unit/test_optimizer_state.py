"""Optimizer state by parameter, out of buckets: maps made by hand, good and hostile ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.errors import FormatError, MismatchError, UnsupportedFormatError
from megatron_datastates.format.codecs import NONE, PLANES, ZSTD
from megatron_datastates.format.optimizer_map import OptimizerMap, ParameterShard
from megatron_datastates.format.tail import Kind
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.loading.optimizer import BucketBox, Piece, StateTensor, optimizer_state
from megatron_datastates.pipeline.upkeep.verify import verify
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.objects import ObjectSource
from tests.unit.by_hand import SAVE
from tests.unit.encoded import PartBuilder, write_one_rank
from tests.unit.states import new_saver, save

GROUP = "chained_0.optimizer.distributed.dp_group_idx_"
BUCKET = "gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
STATE = "optimizer.state.exp_avg."


def shard(key: str, global_shape, offset, shape, start, strides, main=True) -> dict[str, Any]:
    fields = locals()
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


def parameter(name: str, begin: int, end: int, *shards: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "begin": begin, "end": end, "shards": list(shards)}


def bucket(elements: int, *parameters: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"name": BUCKET, "elements": elements, "states": ["exp_avg"], "parameters": parameters} | fields


def map_of(*buckets: dict[str, Any], **fields: Any) -> str:
    return json.dumps({"format_version": 1, "buckets": buckets} | fields)


def checkpoint(directory: Path, tensors: list[torch.Tensor], maps: list[Any]) -> Checkpoint:
    """Saves data-parallel groups with one bucket each, and one map each if they have any."""
    buckets = {f"{GROUP}{i}.{BUCKET}.exp_avg": tensor for i, tensor in enumerate(tensors)}
    objects = {f"{GROUP}{i}.datastates_map/shard_0_1": [text] for i, text in enumerate(maps)}
    saver = new_saver()
    save(saver, directory, buckets, objects)
    saver.close()
    return ds.open(directory)


def refused(directory: Path, *parameters: dict[str, Any], elements: int = 100, **fields: Any) -> str:
    """Returns the error of a map with one bucket."""
    text = map_of(bucket(elements, *parameters), **fields)
    with pytest.raises(FormatError) as error:
        optimizer_state(checkpoint(directory, [torch.zeros(100)], [text]))
    return str(error.value)


# -- reading ----------------------------------------------------------------------------------------------


def test_strided_shards_of_two_groups_make_one_tensor(tmp_path):
    # The global tensor (4, 6) is cut into columns; the first group holds its half transposed.
    whole = torch.arange(24.0).reshape(4, 6)
    first, second = torch.full((20,), -1.0), torch.full((16,), -1.0)
    first[5:17] = whole[:, :3].T.reshape(-1)
    second[2:14] = whole[:, 3:].reshape(-1)
    maps = [
        map_of(bucket(20, parameter("w", 5, 17, shard("w", (4, 6), (0, 0), (4, 3), 0, (1, 4))))),
        map_of(bucket(16, parameter("w", 2, 14, shard("w", (4, 6), (0, 3), (4, 3), 0, (3, 1))))),
    ]
    state = optimizer_state(checkpoint(tmp_path / "c", [first, second], maps))
    assert list(state) == [STATE + "w"]
    tensor = state[STATE + "w"]
    assert (tensor.dtype, tensor.global_shape) == ("float32", (4, 6))
    assert torch.equal(tensor.read(), whole)
    for top in range(4):
        for left in range(6):
            height, width = (4 - top) // 2, 6 - left
            expected = whole[top : top + height, left : left + width]
            assert torch.equal(tensor.read((top, left), (height, width)), expected), (top, left)


def test_buckets_that_are_compressed_are_read_by_parameter_alike(tmp_path):
    """Of several frames, in two fragments, of which the second one begins within a row."""
    line = torch.arange(700_000.0)
    parts = [PartBuilder(0), PartBuilder(1)]
    for part, rows, codec in zip(
        parts, (slice(0, 400_001), slice(400_001, None)), (PLANES, ZSTD), strict=True
    ):
        part.add_fragment(f"{GROUP}0.{BUCKET}.exp_avg", line, rows, codec)
    strided = {
        "rows": ((500, 600), 7, (600, 1)),
        "transposed": ((400, 500), 300_007, (1, 400)),
        "apart": ((3, 40, 50), 500_007, (60_000, 60, 1)),
    }
    lists = [
        parameter(key, start, start + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1,
                  shard(key, shape, (0,) * len(shape), shape, 0, strides))
        for key, (shape, start, strides) in strided.items()
    ]  # fmt: skip
    key = f"{GROUP}0.datastates_map/shard_0_1"
    stored = ObjectSource(key, [map_of(bucket(len(line), *lists))], Mutability.NEVER).serialize()
    parts[0].add(Kind.OBJECT, key, stored, NONE)
    write_one_rank(tmp_path / "c", parts, [(0, SAVE), (1, SAVE)])
    state = optimizer_state(ds.open(tmp_path / "c"))
    assert sorted(state) == sorted(STATE + key for key in strided)
    for key, (shape, start, strides) in strided.items():
        whole = line.as_strided(shape, strides, start)
        assert torch.equal(state[STATE + key].read(), whole), key
        offset, size = tuple(n // 3 for n in shape), tuple(n // 2 for n in shape)
        part = whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
        assert torch.equal(state[STATE + key].read(offset, size), part), key


def test_a_slice_says_which_boxes_of_which_buckets_it_is(tmp_path):
    halves = [
        shard("fc1", (1, 8, 4), (0, 0, 0), (1, 2, 4), 0, (0, 4, 1)),
        shard("fc1", (1, 8, 4), (0, 4, 0), (1, 2, 4), 8, (0, 4, 1)),
    ]
    others = [
        shard("fc1", (1, 8, 4), (0, 2, 0), (1, 2, 4), 0, (0, 4, 1)),
        shard("fc1", (1, 8, 4), (0, 6, 0), (1, 2, 4), 8, (0, 4, 1)),
    ]
    maps = [map_of(bucket(64, parameter("fc1", 32, 48, *shards))) for shards in (halves, others)]
    state = optimizer_state(checkpoint(tmp_path / "c", [torch.zeros(64), torch.zeros(64)], maps))
    boxes = state[STATE + "fc1"].sources((0, 3, 1), (1, 2, 2))
    assert boxes == [
        BucketBox(f"{GROUP}0.{BUCKET}.exp_avg", 41, (1, 1, 2), (0, 4, 1), (0, 1, 0)),
        BucketBox(f"{GROUP}1.{BUCKET}.exp_avg", 37, (1, 1, 2), (0, 4, 1), (0, 0, 0)),
    ]
    assert [box.elements for box in boxes] == [2, 2]


def test_scalars_empty_tensors_and_other_dtypes_are_read(tmp_path):
    text = map_of(
        bucket(3, parameter("s", 1, 2, shard("s", (), (), (), 0, ())),
               parameter("e", 2, 2, shard("e", (0, 5), (0, 0), (0, 5), 0, (5, 1))))
    )  # fmt: skip
    state = optimizer_state(checkpoint(tmp_path / "c", [torch.tensor([1, 2, 3]).bfloat16()], [text]))
    assert torch.equal(state[STATE + "s"].read(), torch.tensor(2.0).bfloat16())
    assert state[STATE + "e"].read().shape == (0, 5)
    assert state[STATE + "e"].dtype == "bfloat16"


def test_replicas_and_parameters_that_nothing_is_known_of_are_not_listed(tmp_path):
    copy = shard("w", (2,), (0,), (2,), 0, (1,), main=False)
    main = shard("w", (2,), (0,), (2,), 0, (1,))
    text = map_of(bucket(9, parameter("copy", 0, 2, copy), parameter("w", 2, 4, main), parameter("", 4, 9)))
    state = optimizer_state(checkpoint(tmp_path / "c", [torch.arange(9.0)], [text]))
    assert {key: tensor.read().tolist() for key, tensor in state.items()} == {STATE + "w": [2.0, 3.0]}


def test_without_a_map_nothing_is_listed(tmp_path):
    assert optimizer_state(checkpoint(tmp_path / "c", [torch.zeros(4)], [])) == {}


def test_states_without_tensors_are_not_listed(tmp_path):
    w = shard("w", (2,), (0,), (2,), 0, (1,))
    text = map_of(bucket(2, parameter("w", 0, 2, w), states=["exp_avg", "exp_avg_sq"]))
    assert list(optimizer_state(checkpoint(tmp_path / "c", [torch.zeros(2)], [text]))) == [STATE + "w"]


def test_listing_reads_no_tensor(tmp_path):
    many = 1 << 20
    text = map_of(bucket(many, parameter("w", 0, many, shard("w", (many,), (0,), (many,), 0, (1,)))))
    opened = checkpoint(tmp_path / "c", [torch.zeros(many)], [text])
    state = optimizer_state(opened)
    listed = opened.costs.bytes_read
    state[STATE + "w"].read((5,), (7,))
    assert listed < many and opened.costs.bytes_read > listed


def test_pieces_that_share_a_block_are_read_with_one_read_of_it(tmp_path):
    parts = [parameter(f"w{i}", i, i + 1, shard("w", (8,), (i,), (1,), 0, (1,))) for i in range(8)]
    opened = checkpoint(tmp_path / "c", [torch.arange(8.0)], [map_of(bucket(8, *parts))])
    tensor = optimizer_state(opened)[STATE + "w"]
    listed = opened.costs.bytes_read
    tensor.read((0,), (1,))
    one = opened.costs.bytes_read - listed
    assert torch.equal(tensor.read(), torch.arange(8.0))
    assert opened.costs.bytes_read - listed == 2 * one


@pytest.mark.parametrize(("offset", "shape"), [((3,), (2,)), ((-1,), (1,)), ((0, 0), (1, 1)), ((0,), (-1,))])
def test_slices_outside_are_refused(tmp_path, offset, shape):
    text = map_of(bucket(4, parameter("w", 0, 4, shard("w", (4,), (0,), (4,), 0, (1,)))))
    tensor = optimizer_state(checkpoint(tmp_path / "c", [torch.zeros(4)], [text]))[STATE + "w"]
    for ask in (tensor.read, tensor.sources):
        with pytest.raises(MismatchError, match=r"has shape \(4,\): there is no slice"):
            ask(offset, shape)


# -- maps that cannot be believed ---------------------------------------------------------------------------

HUGE = 1 << 40
WHOLE = shard("w", (10,), (0,), (10,), 0, (1,))


def test_a_parameter_outside_its_bucket_is_refused(tmp_path):
    said = refused(tmp_path / "c", parameter("w", 91, 101, WHOLE))
    assert "'w'" in said and "has elements [91, 101) of a bucket of 100" in said
    assert "has elements [9, 8)" in refused(tmp_path / "d", parameter("w", 9, 8))


def test_parameters_that_overlap_are_refused(tmp_path):
    said = refused(tmp_path / "c", parameter("v", 5, 15), parameter("w", 0, 10, WHOLE))
    assert "parameter 'v'" in said and "begins at 5, and the one before it ends at 10" in said


@pytest.mark.parametrize(
    "fields",
    [
        {"start": 1},
        {"strides": (2,)},
        {"offset": (1,)},
        {"offset": (0, 0)},
        {"strides": ()},
        {"global_shape": (9,)},
        {"global_shape": (HUGE,) * 2, "offset": (0,) * 2, "shape": (1, 1), "strides": (0,) * 2},
        # A size of 0 hides no absurd ones.
        {"global_shape": (HUGE, HUGE, 0), "offset": (0,) * 3, "shape": (1, 1, 0), "strides": (0,) * 3},
    ],
)
def test_shards_that_leave_their_parameter_or_tensor_are_refused(tmp_path, fields):
    said = refused(tmp_path / "c", parameter("w", 0, 10, WHOLE | fields))
    assert "its shard of 'w' leaves the parameter or its global shape" in said


@pytest.mark.parametrize(
    "shards",
    [
        [{"shape": [4]}, {"shape": [4], "offset": [4], "start": 3}],  # one element in common
        [{"shape": [3], "strides": [2]}, {"shape": [3], "strides": [3], "offset": [3], "start": 1}],
        [{"shape": [2, 2], "strides": [1, 1], "offset": [0, 0], "global_shape": [2, 2]}],
        [{"shape": [2], "strides": [0]}],
        [{"shape": [HUGE], "strides": [2]}, {"shape": [HUGE], "strides": [2], "offset": [HUGE], "start": 1}],
    ],
)
def test_shards_that_share_elements_of_a_parameter_are_refused(shards):
    many = {"global_shape": [4 * HUGE]}
    described = parameter("w", 0, 4 * HUGE, *(WHOLE | many | fields for fields in shards))
    with pytest.raises(FormatError, match=r"parameter 'w' .* an element of it belongs to its shards twice"):
        OptimizerMap.decode(map_of(bucket(4 * HUGE, described)), "m")


def test_shards_may_take_turns(tmp_path):
    even = shard("w", (6,), (0,), (3,), 0, (2,))
    odd = shard("w", (6,), (3,), (3,), 1, (2,))
    text = map_of(bucket(6, parameter("w", 0, 6, even, odd)))
    state = optimizer_state(checkpoint(tmp_path / "c", [torch.arange(6.0)], [text]))
    assert state[STATE + "w"].read().tolist() == [0, 2, 4, 1, 3, 5]


def test_few_stored_elements_do_not_pass_for_many(tmp_path):
    many = WHOLE | {"global_shape": [HUGE], "shape": [HUGE], "strides": [0]}
    halves = [WHOLE | {"global_shape": [20], "offset": [at]} for at in (0, 10)]
    for number, shards in enumerate(([many], halves)):
        said = refused(tmp_path / str(number), parameter("w", 0, 10, *shards))
        assert "parameter 'w'" in said and "its shards have more than its 10 elements" in said


@pytest.mark.parametrize("fields", [{}, {"states": ["exp_avg", "exp_avg"]}])
def test_a_bucket_that_is_described_twice_is_refused(tmp_path, fields):
    texts = [map_of(*(bucket(10, parameter(key, 0, 10, WHOLE | {"key": key}), **fields) for key in "vw"))]
    with pytest.raises(FormatError, match=r"describe the tensor '.*bucket_idx_0.exp_avg' twice"):
        optimizer_state(checkpoint(tmp_path / "c", [torch.zeros(10)], texts))


@pytest.mark.parametrize(
    "fields",
    [
        {"start": -1},
        {"start": 1 << 62},
        {"start": 0.5},
        {"start": True},
        {"shape": "10"},
        {"key": None},
        {"offset": [0] * 65},
        {"strides": [-1]},
        {"main": 1},
    ],
)
def test_fields_of_other_kinds_are_refused(tmp_path, fields):
    said = refused(tmp_path / "c", parameter("w", 0, 10, WHOLE | fields))
    assert f"the optimizer map '{GROUP}0.datastates_map/shard_0_1' is damaged" in said


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"format_version": 1}', "\ud800"])
def test_what_is_no_map_is_refused(text):
    with pytest.raises(FormatError, match="the optimizer map 'm' is damaged"):
        OptimizerMap.decode(text, "m")


@pytest.mark.parametrize("value", [b"{}", 3, ["x"], {"a": 1}])
def test_an_object_that_is_no_text_is_refused(tmp_path, value):
    with pytest.raises(FormatError, match="is not a list of one text"):
        optimizer_state(checkpoint(tmp_path / "c", [torch.zeros(1)], [value]))


def test_a_later_map_is_refused_whatever_else_it_holds():
    with pytest.raises(UnsupportedFormatError, match="has format 2; this release reads format 1"):
        OptimizerMap.decode('{"format_version": 2, "buckets": "elsewhere"}', "m")


def test_a_bucket_of_another_size_than_the_stored_one_is_refused(tmp_path):
    said = refused(tmp_path / "c", parameter("w", 0, 10, WHOLE), elements=HUGE)
    assert f"'{GROUP}0.{BUCKET}.exp_avg' has shape (100,), and its optimizer map says ({HUGE},)" in said


def test_a_slice_with_holes_is_refused_before_memory_is_asked_for(tmp_path):
    text = map_of(bucket(100, parameter("w", 0, 10, WHOLE | {"global_shape": [1 << 60]})))
    state = optimizer_state(checkpoint(tmp_path / "c", [torch.arange(100.0)], [text]))[f"{STATE}w"]
    assert state.stored_elements == 10
    for at, size, stored in ((None, None, 10), ([5], [10], 5), ([10], [1], 0)):
        whole = size[0] if size else 1 << 60
        with pytest.raises(FormatError, match=rf"w' has holes: {stored} of {whole} elements are stored"):
            state.read(at, size)
    assert state.read([2], [8]).tolist() == [2, 3, 4, 5, 6, 7, 8, 9]


def test_columns_without_state_are_refused_though_rows_of_the_others_span_as_much(tmp_path):
    """The left half of a matrix is stored; a slice of its rows is as long in the bucket as in the matrix."""
    stored = checkpoint(tmp_path / "c", [torch.arange(16.0)], [])
    shard = ParameterShard("w", (4, 8), (0, 0), (4, 4), 0, (4, 1), True)
    bucket_key = next(iter(stored.index.tensors))
    state = StateTensor(f"{STATE}w", "float32", (4, 8), stored, (Piece(bucket_key, 0, shard),), {})
    with pytest.raises(FormatError, match="has holes: 8 of 12 elements are stored"):
        state.read((0, 2), (4, 3))
    assert state.read((1, 2), (2, 2)).tolist() == [[6, 7], [10, 11]]


def test_state_of_a_part_of_a_parameter_is_no_fault_of_the_checkpoint(tmp_path):
    text = map_of(bucket(100, parameter("w", 0, 10, WHOLE | {"global_shape": [20]})))
    checkpoint(tmp_path / "c", [torch.arange(100.0)], [text])
    verdict = verify(tmp_path / "c")
    assert verdict.good and any("w' is stored in part" in note for note in verdict.notes)
    checkpoint(tmp_path / "whole", [torch.arange(100.0)], [map_of(bucket(100, parameter("w", 0, 10, WHOLE)))])
    assert verify(tmp_path / "whole").notes == []


def test_what_is_stored_twice_is_refused(tmp_path):
    said = refused(tmp_path / "c", parameter("w", 0, 10, WHOLE), parameter("w", 10, 20, WHOLE))
    assert f"'{STATE}w': two shards both hold the element at (0,)" in said


def test_groups_that_disagree_are_refused(tmp_path):
    first = map_of(bucket(10, parameter("w", 0, 10, WHOLE | {"global_shape": [20]})))
    for number, (tensor, fields) in enumerate(
        [
            (torch.zeros(10), {"global_shape": [30], "offset": [10]}),
            (torch.zeros(10, dtype=torch.float64), {"global_shape": [20], "offset": [10]}),
        ]
    ):
        other = map_of(bucket(10, parameter("w", 0, 10, WHOLE | fields)))
        opened = checkpoint(tmp_path / str(number), [torch.zeros(10), tensor], [first, other])
        with pytest.raises(FormatError, match=r"exp_avg.w' is float32 of global shape \(20,\)"):
            optimizer_state(opened)
