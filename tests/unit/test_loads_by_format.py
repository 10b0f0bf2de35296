"""Which directories are ours, and how a request that does not fit is refused; no process group needed."""

from __future__ import annotations

import functools
import json
import os
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    maybe_load_config,
)
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

import megatron_datastates as ds
from megatron_datastates.format.directory import COMMON_STATE_KEY
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.mcore.hooks import versions
from megatron_datastates.mcore.load import by_format, state
from megatron_datastates.mcore.load.mismatch import first_mismatch
from megatron_datastates.mcore.load.opening import open_checkpoint, read_common_state
from megatron_datastates.mcore.training.load import wrap_get_checkpoint_format, wrap_load_content_metadata
from megatron_datastates.pipeline.publishing.documents import PublicationExtras
from megatron_datastates.pipeline.runs.runs import is_ours, may_be_ours
from tests.unit.states import SMALL, State, new_saver, random_tensor, save

TENSORS = {
    "decoder.layers.0.weight": torch.arange(64.0).reshape(8, 8),
    "decoder.layers.1.weight": torch.arange(64.0).reshape(8, 8).bfloat16(),
    "flags": torch.ones(4, dtype=torch.bool),
    "count": torch.tensor(3),
    "spectrum": torch.ones(4, dtype=torch.complex64),
    "scaled": random_tensor(torch.float8_e4m3fn, (4,)),
}
OBJECTS = {COMMON_STATE_KEY: [{"iteration": 7}], "rng/shard_0_1": [[1, 2]]}


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("ours") / "c"
    ds.save(TENSORS | OBJECTS, directory, **SMALL)
    return directory


def with_metadata(directory: Path, text: str) -> Path:
    (directory / "metadata.json").write_text(text)
    return directory


def test_a_load_of_another_format_waits_for_lazy_saves_of_the_memory_that_it_fills(tmp_path):
    state = torch.arange(float(1 << 20))
    before = state.clone()
    handle = ds.async_save({"w": state}, tmp_path / "lazy", lazy=True, lazy_delay=0.5, **SMALL)
    by_format.wrap_torch_dist_load(lambda *_: state.fill_(5.0), None, {}, tmp_path)
    handle.wait()
    assert torch.equal(ds.load(tmp_path / "lazy")["w"], before)


# -- whose directory --------------------------------------------------------------------------------------


def test_megatron_does_not_list_a_directory_of_ours_to_find_its_format(ours, monkeypatch):
    """Every rank of a load asks, and the directory has a file of each rank."""

    def unexpected(*_: object) -> None:
        raise AssertionError("the directory is listed")

    monkeypatch.setattr(os, "listdir", unexpected)
    monkeypatch.setattr(os, "scandir", unexpected)
    with state.opened(directory=None) as load:
        assert wrap_get_checkpoint_format(unexpected, str(ours), Namespace()) == "torch_dist"
        assert load.directory == str(ours)


@pytest.mark.parametrize(
    ("text", "empty", "published", "with_index"),
    [
        ('{"sharded_backend": "datastates", "sharded_backend_version": 1}', True, True, True),
        ('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}', False, True, False),
        ('{"sharded_backend": "zarr", "sharded_backend_version": 1}', False, False, False),
        ("{}", False, True, False),
        ("[]", False, True, False),
        ("", False, True, False),
        ("not json", False, True, False),
        ("[" * 100_000, False, True, False),
    ],
)
def test_metadata_json_says_whose_a_directory_is(ours, tmp_path, text, empty, published, with_index):
    """Our manifest decides where metadata.json is damaged, or older than the save that was just published."""
    assert is_ours(with_metadata(tmp_path, text)) is empty
    directory = with_metadata(Path(shutil.copytree(ours, tmp_path / "c")), text)
    assert is_ours(directory) is published
    (directory / ".metadata").touch()  # a checkpoint of torch_dist is whole here, too
    assert is_ours(directory) is with_index


def test_without_metadata_json_the_manifest_decides(ours, tmp_path):
    assert is_ours(ours)
    assert not is_ours(tmp_path)
    assert not is_ours(tmp_path / "none")


def test_a_config_that_megatron_found_is_kept(ours):
    config = CheckpointingConfig("torch_dist", 1)
    assert by_format.wrap_maybe_load_config(lambda directory: config, str(ours)) is config


def test_a_published_save_without_metadata_json_gets_its_config(ours, tmp_path):
    load_config = functools.partial(by_format.wrap_maybe_load_config, lambda directory: None)
    assert load_config(str(ours)) == CheckpointingConfig("datastates", 1)
    assert load_config(str(tmp_path)) is None
    assert load_config("") is None
    directory = Path(shutil.copytree(ours, tmp_path / "c"))
    (directory / ".metadata").touch()  # of a later save, by DCP
    assert load_config(str(directory)) is None


def test_a_published_save_whose_metadata_json_is_nested_absurdly_gets_its_config(ours, tmp_path):
    damaged = with_metadata(Path(shutil.copytree(ours, tmp_path / "c")), "[" * 100_000)
    assert maybe_load_config(str(damaged)) == CheckpointingConfig("datastates", 1)


def test_a_metadata_json_whose_read_fails_does_not_stop_a_load_of_a_published_save(ours, tmp_path):
    damaged = Path(shutil.copytree(ours, tmp_path / "c"))
    (damaged / "metadata.json").symlink_to("/proc/self/mem")  # a regular file, says the system; reads fail
    assert maybe_load_config(str(damaged)) == CheckpointingConfig("datastates", 1)
    (damaged / "datastates.manifest").unlink()
    with pytest.raises(CheckpointingException, match=r"metadata.json cannot be read \(OSError: .* no data"):
        maybe_load_config(str(damaged))


@pytest.mark.parametrize(
    ("value", "found"), [(True, "a bool"), ([], "a list of 0"), ([1, 2], "a list of 2"), ("text", "a str")]
)
def test_an_object_that_megatron_did_not_save_is_refused_by_name(value, found, tmp_path):
    """Megatron fails with an error that names nothing."""
    ds.save(TENSORS | OBJECTS | {"rng/shard_0_1": value}, tmp_path / "c", **SMALL)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(CheckpointingException, match=f"'rng/shard_0_1' is {found}: expected a list of 1"):
            dist_checkpointing.load({"rng": ShardedObject("rng", None, (1,), (0,))}, str(tmp_path / "c"))
    finally:
        torch.distributed.destroy_process_group()


def directory(path: Path) -> None:
    path.mkdir()


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def giant(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("put", [os.mkfifo, directory, device, giant])
def test_megatron_is_not_sent_into_a_metadata_json_that_is_no_document(ours, tmp_path, put):
    """Its `open` would wait for a pipe, and its `json.load` read a device until memory ends."""

    def original(directory: str) -> None:
        raise AssertionError("it opened the file")

    published = Path(shutil.copytree(ours, tmp_path / "c"))
    put(published / "metadata.json")
    assert by_format.wrap_maybe_load_config(original, str(published)) == CheckpointingConfig("datastates", 1)


def test_other_formats_go_to_their_own_reader_and_loader(tmp_path):
    def original(self_or_directory, *args, **kwargs):
        return "original", self_or_directory, args, kwargs

    assert by_format.wrap_get_filesystem_reader(original, tmp_path, 1, x=2) == (
        "original",
        tmp_path,
        (1,),
        {"x": 2},
    )
    assert by_format.wrap_load_common(original, tmp_path) == ("original", tmp_path, (), {})
    loaded = by_format.wrap_torch_dist_load(original, "self", {}, tmp_path, 1, x=2)
    assert loaded == ("original", "self", ({}, tmp_path, 1), {"x": 2})


def unreachable(*args, **kwargs):
    raise AssertionError("the original was called")


def test_ours_go_to_our_reader(ours):
    reader = by_format.wrap_get_filesystem_reader(unreachable, str(ours))
    assert reader.checkpoint.directory == ours


def test_common_state_is_read_without_torch_distributed(ours):
    assert by_format.wrap_load_common(unreachable, str(ours)) == {"iteration": 7}


def test_errors_of_ours_are_megatrons(ours, tmp_path):
    broken = Path(shutil.copytree(ours, tmp_path / "c"))
    (broken / MANIFEST_NAME).write_bytes(b"")
    with pytest.raises(CheckpointingException, match=str(broken)):
        open_checkpoint(broken)
    with pytest.raises(CheckpointingException, match=str(broken)):
        by_format.wrap_load_common(unreachable, broken)


def test_a_directory_that_was_saved_again_is_opened_again(tmp_path):
    for value in (1, 2, 3):
        ds.save({COMMON_STATE_KEY: [{"value": value}]}, tmp_path / "c", **SMALL)
        for _ in range(2):
            assert by_format.wrap_load_common(unreachable, tmp_path / "c") == {"value": value}


def test_a_published_directory_without_common_state_says_so(tmp_path):
    ds.save({"w": torch.ones(1)}, tmp_path / "c", **SMALL)
    with pytest.raises(CheckpointingException, match=r"there is no file 'common.pt' in the checkpoint"):
        by_format.wrap_load_common(unreachable, tmp_path / "c")


@pytest.mark.parametrize("stored", [[[1]], [], {"a": 1}, [1, 2]])
def test_common_state_that_is_none_is_refused(saver, tmp_path, stored):
    save(saver, tmp_path, {"w": torch.zeros(3)}, {COMMON_STATE_KEY: stored})
    with pytest.raises(CheckpointingException, match="is not a common state"):
        read_common_state(tmp_path)


def test_a_directory_that_cannot_be_looked_into_raises_nothing_on_one_rank_alone(ours, tmp_path, monkeypatch):
    """Whether it may be ours is asked before ranks agree on failures."""
    ours = Path(shutil.copytree(ours, tmp_path / "c"))
    (ours / "metadata.json").unlink(missing_ok=True)

    look = os.stat

    def refused(path, *args, **kwargs):
        if Path(path).name == MANIFEST_NAME:
            raise PermissionError(13, "Permission denied", str(path))
        return look(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", refused)
    assert may_be_ours(ours)
    with pytest.raises(CheckpointingException, match="cannot be read, or is not a file"):
        open_checkpoint(ours)


def test_common_state_in_a_file_of_megatrons_is_read_and_checked(tmp_path):
    (tmp_path / "c").mkdir()
    torch.save({"iteration": 9}, tmp_path / "c" / "common.pt")
    saver = new_saver()
    extras = PublicationExtras(other_files=("common.pt",))
    saver.start(tmp_path / "c", State({"w": torch.ones(1)}), extras=extras).wait()
    saver.close()
    load = functools.partial(by_format.wrap_load_common, unreachable)
    assert load(tmp_path / "c") == {"iteration": 9}
    torch.save({"iteration": 8}, tmp_path / "c" / "common.pt")
    with pytest.raises(CheckpointingException, match=r"common.pt is not the file that was saved"):
        load(tmp_path / "c")


# -- what does not fit ------------------------------------------------------------------------------------


def wanted(key: str, tensor: torch.Tensor, *offsets: tuple[int, int, int], **fields) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, tensor, *offsets, **fields)


def reported(ours: Path, *requested: object) -> str | None:
    return first_mismatch(open_checkpoint(ours), requested)


def test_what_is_there_fits(ours):
    requested = [wanted(key, torch.empty_like(tensor)) for key, tensor in TENSORS.items()]
    requested += [ShardedObject("rng", None, (1,), (0,)), "no sharded value"]
    assert reported(ours, *requested) is None


def test_a_shard_of_what_is_there_fits(ours):
    assert reported(ours, wanted("decoder.layers.0.weight", torch.empty(4, 2), (0, 1, 2), (1, 3, 4))) is None


def test_a_missing_tensor_is_named_with_what_is_like_it(ours):
    text = reported(ours, wanted("model.layers.1.weight", torch.empty(8, 8)))
    assert text == (
        "there is no tensor 'model.layers.1.weight' in this checkpoint (it has 'decoder.layers.1.weight')"
    )
    assert reported(ours, wanted("bias", torch.empty(8))) == "there is no tensor 'bias' in this checkpoint"


def test_a_missing_object_is_named(ours):
    assert reported(ours, ShardedObject("rng", None, (2,), (1,))) == (
        "there is no object 'rng/shard_1_2' in this checkpoint (it has 'rng/shard_0_1')"
    )


@pytest.mark.parametrize("shape", [(8, 9), (8,), (8, 8, 1), (0, 8)])
def test_another_global_shape_is_reported_with_both_shapes(ours, shape):
    text = reported(ours, wanted("decoder.layers.0.weight", torch.empty(shape)))
    here, there = "global shape (8, 8) in this checkpoint", f"{shape} in the model"
    assert text == f"tensor 'decoder.layers.0.weight' has {here}, and {there}"


def test_another_global_shape_may_be_allowed(ours):
    padded = wanted("decoder.layers.0.weight", torch.empty(9, 8), allow_shape_mismatch=True)
    assert reported(ours, padded) is None


def test_another_number_of_dimensions_is_never_allowed(ours):
    flat = wanted("decoder.layers.0.weight", torch.empty(64), allow_shape_mismatch=True)
    assert "has global shape (8, 8) in this checkpoint, and (64,)" in str(reported(ours, flat))


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize(
    ("key", "dtype", "fits"),
    [
        ("decoder.layers.0.weight", torch.bfloat16, True),
        ("decoder.layers.1.weight", torch.float32, True),
        ("scaled", torch.float32, True),
        ("count", torch.int32, True),
        ("decoder.layers.0.weight", torch.int32, False),
        ("count", torch.float32, True),
        ("flags", torch.uint8, True),
        ("count", torch.bool, False),
        ("decoder.layers.0.weight", torch.float8_e4m3fn, True),
        ("spectrum", torch.float32, False),
        ("decoder.layers.0.weight", torch.complex64, True),
    ],
)
def test_dtypes_are_converted_unless_values_lose_their_kind(ours, key, dtype, fits):
    text = reported(ours, wanted(key, TENSORS[key].to(dtype)))
    stored, asked = str(TENSORS[key].dtype)[6:], str(dtype)[6:]
    expected = f"tensor {key!r} is {stored} in this checkpoint, and {asked} in the model"
    assert text == (None if fits else expected)


def test_the_first_of_several_problems_is_reported(ours):
    text = reported(ours, wanted("flags", torch.ones(4, dtype=torch.bool)), wanted("a", torch.ones(1)),
                wanted("b", torch.ones(1)))  # fmt: skip
    assert text == "there is no tensor 'a' in this checkpoint"


def test_a_load_that_does_not_fit_never_begins(ours):
    load = functools.partial(by_format.wrap_torch_dist_load, unreachable)
    with pytest.raises(CheckpointingException, match=f"{ours}: there is no tensor 'a'"):
        load("self", {"model": {"a": wanted("a", torch.ones(1))}}, ours)


@pytest.mark.skipif(versions.installed().first < (0, 17), reason="it has no training loop")
@pytest.mark.parametrize(
    ("pattern", "saved", "is_asked"),
    [
        (None, {"tensor_model_parallel_size": 2}, True),
        (None, {}, False),
        ("*-*-", {}, True),
        ("*-*-", {"hybrid_layer_pattern": "*-*-"}, False),
        ("*-*-", {"hybrid_layer_pattern": "*-*-", "pipeline_model_parallel_size": 2}, True),
        ("M*-M*-", {}, False),
        ("*-*", {}, False),
        (None, {"hybrid_layer_pattern": "*-*-", "tensor_model_parallel_size": 2}, False),
    ],
)
def test_a_model_asks_for_its_own_buckets_where_a_checkpoint_has_all_of_them(
    saver, tmp_path, monkeypatch, pattern, saved, is_asked
):
    """A hybrid model, too, if a GPT has all of its layers. Megatron refuses the others, and says why."""
    if pattern == "*-*-" and not saved and versions.installed().first < (0, 19):
        pytest.skip("no hybrid model loads a GPT's checkpoint")
    save(saver, tmp_path / "c", {}, {"optimizer.datastates_map/shard_0_1": ["map"]})
    own = {"use_distributed_optimizer": True, "hybrid_layer_pattern": pattern}
    stored = Namespace(**saved)
    monkeypatch.setattr("megatron.training.checkpointing.get_args", lambda: Namespace(**own))
    content = {"distrib_optim_sharding_type": "dp_reshardable"}
    load_content_metadata = functools.partial(wrap_load_content_metadata, lambda **_: content)
    with state.opened(in_training_loop=True, directory=str(tmp_path / "c")):
        found = load_content_metadata(preloaded_state_dict={"args": stored})
    assert (found["distrib_optim_sharding_type"] == "fully_reshardable") is is_asked


def test_the_manifest_is_json_after_one_line(ours):
    assert json.loads((ours / MANIFEST_NAME).read_text().split("\n", 1)[1])["format_version"] == 2
