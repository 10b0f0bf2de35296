"""Commands and conversions know streams, encoded tensors, and data files of several groups."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from megatron_datastates.convert.diff import choose_comparison, diff
from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.planning import plan_conversion
from megatron_datastates.errors import CorruptDataError, OptionError
from megatron_datastates.format.manifest import ProviderEntry
from megatron_datastates.format.tail import Kind
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.upkeep.prune import prune
from megatron_datastates.pipeline.upkeep.retention import RetentionRules, plan_prune
from megatron_datastates.pipeline.upkeep.verify import verify
from tests.unit.converting import convert_to
from tests.unit.encoded import OBJECTS, STREAMS, TENSORS, WEIGHT, builders, write_encoded, write_shared
from tests.unit.inspecting import call, output_of, refused
from tests.unit.states import OPTIONS, bits
from tests.unit.test_encoded import change


def converted(source: Path, target: Path, **how: object) -> Path:
    convert_to(source, target, **how)
    return target


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tails") / "c"
    write_encoded(path, providers=[ProviderEntry("weight", "Compressed(NamedState)", {"codec": "2"})])
    return path


def contents_of(path: Path) -> dict[str, bytes]:
    checkpoint = Checkpoint.open(path, OPTIONS)
    found = {f"tensor {key}": bits(checkpoint.read_tensor(key)) for key in checkpoint.tensors}
    found |= {f"object {key}": checkpoint.read_object_bytes(key) for key in checkpoint.objects}
    return found | {
        f"stream {key}": b"".join(map(bytes, checkpoint.open_stream(key))) for key in checkpoint.streams
    }


@pytest.mark.parametrize("ranks", [0, 1, 3])
def test_a_conversion_to_the_same_format_keeps_everything(directory, tmp_path, ranks):
    """What was encoded is stored as it is; streams and objects keep their SHA-256."""
    target = converted(directory, tmp_path / "made", format="datastates", ranks=ranks, verify=True)
    assert contents_of(target) == contents_of(directory)
    assert len(contents_of(target)) == len(TENSORS) + len(STREAMS) + len(OBJECTS)
    assert verify(target, options=OPTIONS).faults == []
    before, after = Checkpoint.open(directory, OPTIONS), Checkpoint.open(target, OPTIONS)
    for key in STREAMS:
        assert after.stream_entry(key)[1].sha256 == before.stream_entry(key)[1].sha256
    assert after.manifest.providers == before.manifest.providers
    assert not any(entry.encoded for entry in after.tensors.values())


def test_a_conversion_of_a_stream_of_another_sha256_fails(tmp_path):
    change(tmp_path / "c", Kind.STREAM, "raw", sha256=b"x" * 32)
    with pytest.raises(CorruptDataError, match="stream 'raw' is corrupt"):
        convert_to(tmp_path / "c", tmp_path / "made", format="datastates")
    assert not (tmp_path / "made").exists()


def test_a_format_without_streams_is_refused_before_anything_is_written(directory, tmp_path):
    with pytest.raises(OptionError, match=r" has streams, such as .*'log'.* holds none: choose --to"):
        plan_conversion(open_source(directory), tmp_path / "made", format="torch_dist")


def test_encoded_tensors_become_torch_dist_and_come_back(tmp_path):
    parts = builders()
    for part in parts:
        part.streams.clear()  # the index names none
    write_encoded(tmp_path / "c", parts)
    target = converted(tmp_path / "c", tmp_path / "dcp", format="torch_dist", verify=True)
    source = open_source(target)
    for key, tensor in TENSORS.items():
        assert bits(source.read_tensor(key)) == bits(tensor)
    found = diff(open_source(tmp_path / "c"), source, choose_comparison(open_source(tmp_path / "c"), source))
    assert found.equal


def test_files_of_one_rank_become_one_file(tmp_path):
    write_shared(tmp_path / "c")
    target = converted(tmp_path / "c", tmp_path / "made", format="datastates", verify=True)
    assert [file.name.count(".") for file in Checkpoint.open(target).manifest.files] == [1]
    assert contents_of(target) == contents_of(tmp_path / "c")


def test_encoded_tensors_are_exported(directory, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    output_of("export", directory, tmp_path / "made", "--keys", "weight")
    found = safetensors.load_file(tmp_path / "made" / "model.safetensors")
    assert bits(found["weight"]) == bits(WEIGHT)


def test_a_zarr_view_decodes_chunks(directory):
    pytest.importorskip("zarr")
    from megatron_datastates import zarr_view

    group = zarr_view.open(directory)
    found = torch.from_numpy(group["weight"][890:910, 7:9])
    assert bits(found) == bits(WEIGHT[890:910, 7:9])


def test_show_lists_streams(directory):
    shown = json.loads(output_of("show", directory, "--json"))
    assert shown["streams"] == [{"key": key, "bytes": len(STREAMS[key])} for key in sorted(STREAMS)]
    assert {row["key"]: row["bytes"] for row in shown["objects"]}.keys() == OBJECTS.keys()
    assert "planes" in output_of("show", directory)
    assert "planes" in output_of("show", directory, "planes")


def test_cat_writes_streams_to_files(directory, tmp_path):
    output_of("cat", directory, "planes", "--out", tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == STREAMS["planes"]
    printed = json.loads(output_of("cat", directory, "planes", "--out", tmp_path / "g", "--json"))
    assert printed == {"target": str(tmp_path / "g"), "key": "planes", "bytes": len(STREAMS["planes"])}
    assert "a stream of 1.05 MB" in output_of("cat", directory, "planes")
    assert "is a stream" in refused("cat", directory, "planes", ":3")
    assert output_of("cat", directory, "log").strip() == "2"  # the object of that name


def test_verify_counts_streams(directory):
    assert "2 objects and 4 streams" in call("verify", directory).stdout


def test_prune_removes_a_checkpoint_and_leaves_those_that_share_its_files(tmp_path):
    """A hard link in several directories is each directory's own."""
    for iteration in (1, 2):
        path = tmp_path / f"iter_{iteration:07d}"
        manifest = write_shared(path)
        (path / "metadata.json").write_text('{"sharded_backend": "datastates"}')
    shared = manifest.files[1].name
    (path / shared).unlink()
    os.link(tmp_path / "iter_0000001" / shared, path / shared)
    rules = RetentionRules(keep_last=1, min_age_seconds=0.0)
    assert plan_prune(tmp_path, rules).left_overs == [], "a file of an earlier save is named by the manifest"
    gone = prune(tmp_path, rules)
    assert [one.number for one in gone] == [1]
    assert not (tmp_path / "iter_0000001").exists()
    assert verify(path, options=OPTIONS).faults == []
    assert bits(Checkpoint.open(path, OPTIONS).read_tensor("weight")) == bits(WEIGHT)
