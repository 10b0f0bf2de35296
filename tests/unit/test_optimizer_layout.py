"""Requests for optimizer state that do not fit the stored buckets: restated, loaded in place, or refused.

The checkpoints are made by hand, and so are the requests; those of Megatron's own optimizers are tested in
tests/multirank/test_resume_anywhere.py.
"""

from __future__ import annotations

import builtins
import functools
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.validation import StrictHandling

from megatron_datastates.format.directory import COMMON_STATE_KEY, METADATA_NAME
from megatron_datastates.format.optimizer_map import OptimizerMap
from megatron_datastates.mcore.load import optimizer_elsewhere, optimizer_layout, optimizer_places, state
from megatron_datastates.mcore.load.optimizer_layout import restate
from megatron_datastates.mcore.load.optimizer_request import _ATTRIBUTE, OwnBuckets
from megatron_datastates.mcore.save.buckets import CARRIER
from megatron_datastates.mcore.training.load import wrap_get_checkpoint_format
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.loading.optimizer_groups import packed_part
from tests.unit.states import new_saver, save

GROUP = "optimizer.distributed.dp_group_idx_"
BUCKET = "gbuf_idx_0.dtype_d.bucket_idx_0"
GROUPS = {"param_groups": [{"wd_mult": 1.0, "lr": 0.5, "step": 7}]}
WHOLE = torch.arange(24.0).reshape(4, 6)
NORM = torch.arange(100.0, 105.0)
Shard = dict[str, Any]
pytestmark = pytest.mark.usefixtures("world_of_one")


# -- checkpoints --------------------------------------------------------------------------------------------


def shard(
    key: str, whole: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...], **other: Any
) -> Shard:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    fields = {"key": key, "global_shape": whole, "offset": offset, "shape": shape, "start": 0}
    return fields | {"strides": strides, "main": True} | other


def bucket(elements: int, *parameters: tuple[int, int, list[Shard]]) -> dict[str, Any]:
    described = [
        {"name": f"p{number}", "begin": begin, "end": end, "shards": shards}
        for number, (begin, end, shards) in enumerate(parameters)
    ]
    return {"name": BUCKET, "elements": elements, "states": ["exp_avg"], "parameters": described}


def map_of(*buckets: dict[str, Any]) -> str:
    return json.dumps({"format_version": 1, "buckets": buckets})


def half(rank: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """The bucket of a tensor-parallel rank: its columns, then padding, then the norm that both have."""
    line = torch.full((20,), -1.0)
    line[:12], line[14:19] = WHOLE[:, 3 * rank : 3 * rank + 3].reshape(-1), NORM
    columns = shard("w", (4, 6), (0, 3 * rank), (4, 3))
    return line, bucket(20, (0, 12, [columns]), (14, 19, [shard("n", (5,), (0,), (5,), main=rank == 0)]))


def save_halves(directory: Path, *, maps: list[str] | None = None, without: str = "") -> Path:
    """Saves two tensor-parallel halves, as the default layout has them."""
    tensors, objects = {}, {COMMON_STATE_KEY: [{"optimizer": {"left": 1}, "iteration": 3}]}
    for rank in (0, 1):
        line, described = half(rank)
        text = map_of(described) if maps is None else (maps[rank] if maps else None)
        tensors[f"{GROUP}{rank}.{BUCKET}.exp_avg"] = line
        objects |= {f"{GROUP}{rank}.{name}/shard_0_1": [value] for name, value in beside(text).items()}
    saver = new_saver()
    save(
        saver,
        directory,
        tensors,
        {key: value for key, value in objects.items() if not without or without not in key},
    )
    saver.close()
    return directory


def beside(text: str | None) -> dict[str, Any]:
    stored: dict[str, Any] = {"optimizer": GROUPS, "per_bucket_numel": [20]}
    return stored | ({"datastates_map": text} if text is not None else {})


# -- requests -----------------------------------------------------------------------------------------------


def request(
    described: dict[str, Any],
    cuts: list[tuple[int, int]],
    padding: tuple[int, int] | None = None,
    **beside: Any,
) -> tuple[Any, torch.Tensor]:
    """Returns what an optimizer with this bucket asks for, and its memory.

    `cuts` are a rank's parts. Without `padding`, there is an entry for it that has no tensor.
    """
    size = described["elements"]
    memory = torch.full((size,), float("nan"))
    entries: list[dict[str, Any]] = [
        {
            "exp_avg": ShardedTensor(
                f"{GROUP}0.{BUCKET}.exp_avg", memory[a:b], torch.float32, (b - a,), (size,), (a,), None
            ),
            "padding": LocalNonpersistentObject(False),
        }
        for a, b in cuts
    ]
    entries.append({"padding": LocalNonpersistentObject(True)})
    if padding is not None:
        (a, b), key = padding, f"{GROUP}0.{BUCKET}.exp_avg"
        entries[-1]["exp_avg"] = ShardedTensor(
            key, torch.zeros(b - a), torch.float32, (b - a,), (size,), (a,), None
        )
    carrier = ShardedObject(f"{GROUP}0.{CARRIER}", [size], (1,), (0,))
    own = msgspec.convert({"format_version": 1, "buckets": [described]}, OptimizerMap)
    setattr(carrier, _ATTRIBUTE, OwnBuckets(lambda: own))
    groups = {"param_groups": [{"wd_mult": 1.0, "lr": 0.0}]}
    state = {
        "optimizer": ShardedObject(f"{GROUP}0.optimizer", groups, (1,), (0,)),
        "param_state": {CARRIER: carrier, 0: {"d": [entries]}},
        "param_state_sharding_type": "dp_reshardable",
    } | {name: ShardedObject(f"{GROUP}0.{name}", value, (1,), (0,)) for name, value in beside.items()}
    return {"optimizer": state}, memory


def whole() -> dict[str, Any]:
    """The bucket of a run without tensor parallelism: the norm, then padding, then the matrix."""
    return bucket(40, (0, 5, [shard("n", (5,), (0,), (5,))]), (8, 32, [shard("w", (4, 6), (0, 0), (4, 6))]))


def refusal(directory: Path, asked: Any) -> str:
    with pytest.raises(CheckpointingException) as error:
        dist_checkpointing.load(asked, str(directory))
    return str(error.value)


# -- loading ------------------------------------------------------------------------------------------------


def test_columns_are_put_together_in_the_memory_of_the_optimizer(tmp_path: Path) -> None:
    asked, memory = request(whole(), [(0, 5), (8, 32)])
    loaded = dist_checkpointing.load(asked, str(save_halves(tmp_path / "c")))
    assert torch.equal(memory[8:32].reshape(4, 6), WHOLE) and torch.equal(memory[:5], NORM)
    assert memory[5:8].isnan().all() and memory[32:].isnan().all(), "padding is not touched"
    optimizer = loaded["optimizer"]
    assert optimizer["optimizer"] == GROUPS
    assert optimizer["param_state_sharding_type"] == "dp_reshardable"
    (entries,) = optimizer["param_state"][0]["d"]
    assert [entry["padding"] for entry in entries] == [False, False]
    assert [entry["exp_avg"].data_ptr() for entry in entries] == [memory.data_ptr(), memory[8:].data_ptr()]
    assert "left" not in optimizer and loaded["iteration"] == 3


def test_an_optimizer_that_is_stored_by_parameter_beside_buckets_is_loaded(tmp_path: Path) -> None:
    """Muon and Adam, as `--optimizer muon --use-distributed-optimizer` makes them."""
    line, described = half(0)
    group, matrix = {"wd_mult": 1.0, "optimizer": None, "lr": 0.25}, torch.arange(4.0)
    tensors = {f"chained_1.{GROUP}0.{BUCKET}.exp_avg": line}
    tensors |= {f"chained_0.optimizer.state.{name}.v": matrix for name in ("fp32_param", "momentum_buffer")}
    of_adam = {"param_groups": [{"wd_mult": 1.0, "optimizer": "adam"}]}
    own = {**beside(map_of(described)), "optimizer": of_adam}
    objects: dict[str, Any] = {f"chained_1.{GROUP}0.{name}/shard_0_1": [value] for name, value in own.items()}
    muon = {"optimizer": {"param_groups": [group | {"params": [0]}]}}
    objects[COMMON_STATE_KEY] = [{"optimizer": {0: muon, 1: {}}}]
    saver = new_saver()
    save(saver, tmp_path / "c", tensors, objects)
    saver.close()
    asked, memory = request(bucket(14, (2, 14, [shard("w", (4, 6), (0, 0), (4, 3))])), [(2, 14)])
    adam = asked["optimizer"]
    adam["optimizer"].data = of_adam
    found = {name: torch.zeros(4) for name in ("fp32_param", "momentum_buffer")}
    states = {
        name: ShardedTensor.from_rank_offsets(f"chained_0.optimizer.state.{name}.v", data)
        for name, data in found.items()
    }
    fresh = {"optimizer": {"state": states, "param_groups": [{"wd_mult": 1.0, "params": [0], "lr": 0.0}]}}
    loaded = dist_checkpointing.load({"optimizer": {0: fresh, 1: adam}}, str(tmp_path / "c"))
    assert torch.equal(memory[2:], line[:12])
    assert all(torch.equal(data, matrix) for data in found.values())
    assert loaded["optimizer"][0]["optimizer"]["param_groups"][0]["lr"] == 0.25


def test_megatron_finds_no_key_missing_or_unexpected(tmp_path: Path) -> None:
    asked, _ = request(whole(), [(0, 5), (8, 32)])
    directory = str(save_halves(tmp_path / "c"))
    _, missing, unexpected = dist_checkpointing.load(asked, directory, strict=StrictHandling.RETURN_ALL)
    assert not missing and not unexpected, "neither buckets nor what is stored beside them is shown"


@pytest.mark.parametrize("cut", range(9, 32))
def test_a_rank_reads_its_own_part_and_no_more(cut: int, tmp_path: Path) -> None:
    directory = save_halves(tmp_path / "c")
    asked, memory = request(whole(), [(8, cut)])
    dist_checkpointing.load(asked, str(directory))
    assert torch.equal(memory[8:cut], WHOLE.reshape(-1)[: cut - 8])
    assert memory[cut:].isnan().all()


def test_a_request_that_fits_is_not_touched(tmp_path: Path) -> None:
    _, described = half(0)
    asked, _ = request(described, [(0, 12), (14, 19)], padding=(12, 14))
    directory = save_halves(tmp_path / "c")
    assert not optimizer_layout.differs(asked, optimizer_layout.open_checkpoint(directory))


def test_a_request_that_fits_reads_its_own_map_only(tmp_path: Path) -> None:
    _, described = half(0)
    asked, memory = request(described, [(0, 12), (14, 19)], padding=(12, 14))
    directory = save_halves(tmp_path / "c", maps=[map_of(described), "damaged"])
    loaded = dist_checkpointing.load(asked, str(directory))
    assert memory.nan_to_num(nan=-1.0).equal(half(0)[0].index_fill(0, torch.tensor([12, 13, 19]), -1.0))
    assert loaded["optimizer"]["left"] == 1, "as Megatron itself loads it"


def test_maps_of_parameters_that_a_rank_lacks_are_not_used(tmp_path: Path) -> None:
    """As of other pipeline stages: a run of many groups has more maps than a rank could decode in no time."""
    left, right = (half(rank)[1] for rank in (0, 1))
    right["elements"] = 3  # a map that is used is checked
    directory = save_halves(tmp_path / "c", maps=[map_of(left), map_of(right)])
    asked, memory = request(bucket(16, (4, 16, [shard("w", (4, 6), (0, 0), (4, 3))])), [(4, 16)])
    _, missing, unexpected = dist_checkpointing.load(asked, str(directory), strict=StrictHandling.RETURN_ALL)
    assert torch.equal(memory[4:], half(0)[0][:12])
    assert (missing, unexpected) == ({"optimizer.state.exp_avg.n"}, set()), "no bucket is listed"
    asked, _ = request(bucket(16, (4, 12, [shard("w", (4, 6), (0, 2), (4, 2))])), [(4, 12)])
    assert "has elements [0, 12) of a bucket of 3" in refusal(directory, asked)


def test_all_parameters_of_one_key_are_read(tmp_path: Path) -> None:
    """As of layers that Megatron stores as one tensor."""
    right, left = (shard("w", (4, 6), (0, at), (4, 3)) for at in (3, 0))
    asked, memory = request(bucket(24, (0, 12, [right]), (12, 24, [left])), [(0, 12), (12, 24)])
    dist_checkpointing.load(asked, str(save_halves(tmp_path / "c")))
    assert torch.equal(memory[:12], half(1)[0][:12]) and torch.equal(memory[12:], half(0)[0][:12])


def test_entries_without_tensors_which_megatron_cannot_merge_load(tmp_path: Path) -> None:
    _, described = half(0)
    asked, memory = request(described, [(0, 12), (14, 19)])
    loaded = dist_checkpointing.load(asked, str(save_halves(tmp_path / "c")))
    assert torch.equal(memory[:12], half(0)[0][:12]) and torch.equal(memory[14:19], NORM)
    assert len(loaded["optimizer"]["param_state"][0]["d"][0]) == 2


@pytest.mark.parametrize(
    ("stored", "fits"),
    [
        ({"tensor": 2, "pipeline": 1, "expert": 1, "data": 1}, True),
        ({"tensor": 1, "pipeline": 1, "expert": 1, "data": 4}, False),
        ({"tensor": 2, "pipeline": 2, "expert": 1, "data": 4}, False),
        ({"tensor": 2, "pipeline": 1, "expert": 2, "data": 4}, False),
        ({}, False),
    ],
)
def test_buckets_whose_parameters_have_no_known_place_fit_only_the_same_split_of_the_model(
    stored: dict[str, int], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's requests are such. Buckets of another split may have equal places, and hold other columns."""
    own = {"tensor": 2, "pipeline": 1, "expert": 1, "data": 4}
    monkeypatch.setattr(optimizer_places, "parallel_sizes", lambda: own)
    described, unplaced = (
        msgspec.convert({"format_version": 1, "buckets": [bucket(20, *parameters)]}, OptimizerMap)
        for parameters in (
            [(0, 12, [shard("w", (4, 6), (0, 0), (4, 3))]), (14, 19, [shard("n", (5,), (0,), (5,))])],
            [(0, 12, []), (14, 19, [shard("n", (5,), (0,), (5,))])],
        )
    )
    checkpoint: Any = SimpleNamespace(manifest=SimpleNamespace(parallel=stored))
    assert optimizer_places.holds_the_same(described, unplaced, checkpoint) is fits
    monkeypatch.setattr(optimizer_places, "parallel_sizes", dict)
    assert not optimizer_places.holds_the_same(described, unplaced, checkpoint), "nothing is known"


W, N = shard("w", (4, 6), (0, 0), (4, 3)), shard("n", (5,), (0,), (5,))


@pytest.mark.parametrize("is_placed", [True, False], ids=["placed", "without places"])
@pytest.mark.parametrize(
    "other",
    [
        bucket(21, (0, 12, [W]), (14, 19, [N])),
        bucket(20, (0, 12, [W]), (14, 20, [N])),
        bucket(20, (0, 12, [W]), (13, 19, [N])),
        bucket(20, (0, 12, [W])),
        bucket(20, (0, 12, [W]), (14, 19, [N])) | {"name": "another"},
    ],
    ids=["elements", "end", "begin", "parameters", "name"],
)
def test_buckets_of_another_size_or_with_parameters_elsewhere_are_others(
    other: dict[str, Any], is_placed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = {"tensor": 1, "pipeline": 1, "expert": 1}
    monkeypatch.setattr(optimizer_places, "parallel_sizes", lambda: split)
    checkpoint: Any = SimpleNamespace(manifest=SimpleNamespace(parallel=split))

    def described(one: dict[str, Any], *, is_main: bool = True) -> OptimizerMap:
        parameters = [
            each | {"shards": [shard | {"main": is_main} for shard in each["shards"] if is_placed]}
            for each in one["parameters"]
        ]
        buckets = [one | {"parameters": parameters}]
        return msgspec.convert({"format_version": 1, "buckets": buckets}, OptimizerMap)

    same = bucket(20, (0, 12, [W]), (14, 19, [N]))
    own = described(same)
    for is_main in (True, False):  # each rank describes its own view
        assert optimizer_places.holds_the_same(described(same, is_main=is_main), own, checkpoint)
    assert not optimizer_places.holds_the_same(described(other), own, checkpoint)


# -- refusing -----------------------------------------------------------------------------------------------


def test_a_parameter_that_the_map_lacks_is_named(tmp_path: Path) -> None:
    maps = [
        map_of(bucket(20, (0, 12, half(rank)[1]["parameters"][0]["shards"]), (14, 19, []))) for rank in (0, 1)
    ]
    asked, memory = request(whole(), [(0, 5), (8, 32)])
    said = refusal(save_halves(tmp_path / "c", maps=maps), asked)
    assert "there is no tensor 'optimizer.state.exp_avg.n' in this checkpoint" in said
    assert memory.isnan().all(), "nothing was loaded"


@pytest.mark.parametrize("strict", [StrictHandling.LOG_ALL, StrictHandling.IGNORE_ALL])
@pytest.mark.parametrize("parameters", [["v", "n"], ["n", "v"]], ids="-".join)
def test_a_parameter_that_the_map_lacks_is_not_left_as_it_was_by_any_strictness(
    parameters: list[str], strict: StrictHandling, tmp_path: Path
) -> None:
    places = [(5 * at, 5 * at + 5) for at in range(len(parameters))]
    shards = [
        (begin, end, [shard(key, (5,), (0,), (5,))])
        for key, (begin, end) in zip(parameters, places, strict=True)
    ]
    asked, _ = request(bucket(5 * len(shards), *shards), places)
    directory = save_halves(tmp_path / "c")
    with pytest.raises(CheckpointingException, match="lacks 1 of 2 parts of the optimizer"):
        dist_checkpointing.load(asked, str(directory), strict=strict)


def test_a_half_that_no_map_describes_is_a_hole(tmp_path: Path) -> None:
    asked, _ = request(whole(), [(8, 32)])
    said = refusal(save_halves(tmp_path / "c", without="dp_group_idx_1.datastates_map"), asked)
    assert "optimizer maps describe 'optimizer.state.exp_avg.w' only in part, and this run trains" in said


def test_maps_that_claim_the_same_columns_are_refused(tmp_path: Path) -> None:
    asked, _ = request(whole(), [(8, 32)])
    said = refusal(save_halves(tmp_path / "c", maps=[map_of(half(0)[1])] * 2), asked)
    assert "'optimizer.state.exp_avg.w': two shards both hold the element at (0, 0)" in said


def test_a_map_of_other_buckets_is_refused(tmp_path: Path) -> None:
    maps = [map_of(half(rank)[1] | {"elements": 30}) for rank in (0, 1)]
    asked, _ = request(whole(), [(8, 32)])
    said = refusal(save_halves(tmp_path / "c", maps=maps), asked)
    assert "has shape (20,), and its optimizer map says (30,)" in said


def test_another_shape_of_the_model_is_refused(tmp_path: Path) -> None:
    wider = bucket(36, (0, 36, [shard("w", (4, 9), (0, 0), (4, 9))]))
    said = refusal(save_halves(tmp_path / "c"), request(wider, [(0, 36)])[0])
    assert "has global shape (4, 6) in this checkpoint, and (4, 9) in the model" in said


def test_a_run_that_does_not_know_its_own_parameters_is_refused(tmp_path: Path) -> None:
    said = refusal(save_halves(tmp_path / "c"), request(bucket(36, (0, 36, [])), [(0, 36)])[0])
    assert "36 of 36 elements of the parameter 'p0'" in said and "have no known place in the model" in said


def test_without_maps_buckets_of_another_size_are_refused(tmp_path: Path) -> None:
    said = refusal(save_halves(tmp_path / "c", maps=[]), request(whole(), [(8, 32)])[0])
    assert "has 20 elements, and 40 in this run. The checkpoint has no optimizer map" in said
    assert "Resume with the layout that saved it" in said


def test_a_checkpoint_without_optimizer_state_is_not_called_one_of_another_layout(tmp_path: Path) -> None:
    """As after `datastates prune --drop-optimizer`, in the layout that saved it."""
    saver = new_saver()
    save(saver, tmp_path / "c", {"decoder.w": torch.ones(2)}, {COMMON_STATE_KEY: [{"iteration": 3}]})
    saver.close()
    asked, _ = request(half(0)[1], [(0, 12), (14, 19)])
    said = refusal(tmp_path / "c", asked)
    assert "has no optimizer state: it was saved without (--no-save-optim), or `datastates prune" in said
    assert "layout" not in said and "--no-load-optim" in said


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("decoder.w", "c: the checkpoint has no optimizer state: "),
        (f"{GROUP}1.{BUCKET}.exp_avg", "'optimizer.distributed.dp_group_idx_0.*' is not there"),
        ("optimizer.state.exp_avg.w", "Megatron's own"),
    ],
)
def test_a_failed_load_from_torch_dist_says_which_optimizer_state_lacks(
    key: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_elsewhere, "_shapes", lambda directory: {key: (20,)})
    asked, _ = request(half(0)[1], [(0, 12), (14, 19)])
    with (
        pytest.raises(CheckpointingException, match=expected),
        optimizer_elsewhere.explaining({"checkpoint_dir": "c", "sharded_state_dict": asked}),
    ):
        raise CheckpointingException("Megatron's own")


def test_values_that_the_checkpoint_does_not_have_are_refused(tmp_path: Path) -> None:
    directory = save_halves(tmp_path / "c")
    said = refusal(directory, request(whole(), [(8, 32)], other=5)[0])
    assert "the optimizer has 'other', and the checkpoint stores nothing of that name" in said
    loaded = dist_checkpointing.load(request(whole(), [(8, 32)], grad_scaler=5)[0], str(directory))
    assert "grad_scaler" not in loaded["optimizer"], "as Megatron loads a checkpoint that has none"


# -- what is opened ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("in_training_loop", "expected"), [(True, 1), (False, 2)])
def test_metadata_json_is_opened_until_the_checkpoint_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_training_loop: bool, expected: int
) -> None:
    directory = str(save_halves(tmp_path / "c"))
    Path(directory, METADATA_NAME).write_text('{"sharded_backend": "datastates"}')
    asked, memory = request(whole(), [(0, 5), (8, 32)])
    opened, descriptors, files = list[str](), os.open, builtins.open

    def counted(path: Any, *args: Any, call: Any, **kwargs: Any) -> Any:
        opened.append(os.fspath(path) if isinstance(path, str | os.PathLike) else "")
        return call(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", functools.partial(counted, call=descriptors))
    monkeypatch.setattr(builtins, "open", functools.partial(counted, call=files))
    with state.opened():
        if in_training_loop:
            assert wrap_get_checkpoint_format(None, directory, None) == "torch_dist"  # type: ignore[arg-type]
            assert dist_checkpointing.check_is_distributed_checkpoint(directory)
        dist_checkpointing.load(asked, directory)
    assert [Path(path).name for path in opened].count(METADATA_NAME) == expected
    assert torch.equal(memory[:5], NORM) and torch.equal(memory[8:32], WHOLE.reshape(-1))


def test_a_rank_alone_reads_a_map_and_what_is_beside_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint.open(save_halves(tmp_path / "c"))
    reads, plan = list[list[str]](), Checkpoint.plan_objects

    def planned(self: Checkpoint, keys: Any) -> Any:
        keys = list(keys)
        reads.append([key.removeprefix(GROUP).removesuffix("/shard_0_1") for key in keys])
        return plan(self, keys)

    monkeypatch.setattr(Checkpoint, "plan_objects", planned)
    asked, _ = request(whole(), [(0, 5), (8, 32)])
    restate(asked, checkpoint, None, {})
    assert [sorted(keys) for keys in reads if keys] == [
        ["0.datastates_map", "0.optimizer", "1.datastates_map", "1.optimizer"]
    ]
    packed = packed_part(checkpoint, 0, 2) | packed_part(checkpoint, 1, 2)
    reads.clear()
    restated = restate(asked, checkpoint, None, packed)
    assert not any(reads) and restated.states is not None
    assert set(restated.states) == {"optimizer.state.exp_avg.n", "optimizer.state.exp_avg.w"}
