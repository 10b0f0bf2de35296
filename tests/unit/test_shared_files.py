"""Data files of several groups and of earlier saves, and the digests that let checkpoints share them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from megatron_datastates.errors import DataStatesError
from megatron_datastates.format.codecs import NONE
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.format.tail import Kind
from megatron_datastates.format.values import MANIFEST_NAME, SaveId
from megatron_datastates.pipeline.upkeep import verify_tail
from megatron_datastates.pipeline.upkeep.remove import remove_keys
from megatron_datastates.pipeline.upkeep.repair import repair
from megatron_datastates.pipeline.upkeep.verify import verify
from megatron_datastates.plan.layout import align_up
from tests.unit.by_hand import SAVE, Part, data_file
from tests.unit.encoded import (
    EARLIER,
    MIB,
    WEIGHT,
    builders,
    content_digest,
    opened,
    write_encoded,
    write_one_rank,
    write_shared,
)
from tests.unit.states import OPTIONS, bits
from tests.unit.verifying import refusal


@pytest.mark.parametrize("window", [1, 2, 16])  # blocks
@pytest.mark.parametrize("past", [0, 4096, MIB - 4096, MIB])
def test_a_content_digest_does_not_depend_on_what_is_read_at_a_time(past, window, tmp_path, monkeypatch):
    parts = builders()
    end = align_up(parts[1].at, MIB) + past
    parts[1].add(Kind.STREAM, "more", np.random.default_rng(1).bytes(end - parts[1].at), NONE)
    manifest = write_one_rank(tmp_path / "c", parts, [(0, SAVE), (3, EARLIER)])
    assert opened(tmp_path / "c").footer(1).data_bytes == end
    monkeypatch.setattr(verify_tail, "_WINDOW_BYTES", window * MIB)
    assert verify(tmp_path / "c", options=OPTIONS).faults == []
    data = (tmp_path / "c" / manifest.files[1].name).read_bytes()[:end]
    assert manifest.files[1].content_sha256 == content_digest(data)


def test_a_file_without_data_has_a_content_digest():
    """Of a block without bytes, as its one block is without the header."""
    reads = []
    checkpoint = SimpleNamespace(footer=lambda file: SimpleNamespace(data_bytes=4096))
    assert verify_tail._content_sha256(checkpoint, 0, reads.append) == content_digest(bytes(4096))


def test_files_of_several_groups_and_of_an_earlier_save_are_read(tmp_path):
    manifest = write_shared(tmp_path / "c")
    assert [file.name for file in manifest.files] == [
        SAVE.data_file_name(0), f"data-00000.3-{EARLIER}.bin",
    ]  # fmt: skip
    assert bits(opened(tmp_path / "c").read_tensor("weight")) == bits(WEIGHT)
    assert verify(tmp_path / "c", options=OPTIONS).faults == []


def test_another_content_than_the_manifest_says_is_found(tmp_path):
    manifest = write_shared(tmp_path / "c")
    files = [manifest.files[0], msgspec.structs.replace(manifest.files[1], content_sha256="0" * 64)]
    (tmp_path / "c" / MANIFEST_NAME).write_bytes(msgspec.structs.replace(manifest, files=files).encode())
    (fault,) = verify(tmp_path / "c", options=OPTIONS).faults
    assert "the SHA-256 of its content is" in fault
    assert verify(tmp_path / "c", options=OPTIONS, quick=True).faults == []


def test_a_file_of_another_group_or_save_is_refused(tmp_path):
    manifest = write_shared(tmp_path / "c")
    entry = manifest.files[1]
    for save, group in ((EARLIER, 4), (SaveId(SAVE.run_id, 2), 3)):
        name = save.data_file_name(0, group)
        lie = msgspec.structs.replace(entry, name=name, group=group, save_id=str(save))
        changed = msgspec.structs.replace(manifest, files=[manifest.files[0], lie])
        (tmp_path / "c" / MANIFEST_NAME).write_bytes(changed.encode())
        (tmp_path / "c" / name).write_bytes((tmp_path / "c" / entry.name).read_bytes())
        with pytest.raises(DataStatesError, match=f"belongs to save {EARLIER}, rank 0, group 3"):
            opened(tmp_path / "c").read_tensor("weight")


def test_repair_rebuilds_the_manifest_of_several_groups_of_one_save(tmp_path):
    directory = tmp_path / "c"
    write_shared(directory, SAVE)
    before = (directory / MANIFEST_NAME).read_bytes()
    (directory / MANIFEST_NAME).unlink()
    (directory / "metadata.json").write_text('{"sharded_backend": "datastates"}')
    repair(directory, options=OPTIONS)
    names = [file.name for file in Manifest.decode(before, "it").files]
    assert [file.name for file in opened(directory).manifest.files] == names
    assert len(names) == 2
    assert bits(opened(directory).read_tensor("weight")) == bits(WEIGHT)


def write_other_layout(directory: Path, group: int) -> None:
    path = directory / EARLIER.data_file_name(0, group)
    path.write_bytes(data_file(Part(), 0, 1, EARLIER, group=group))


def test_repair_refuses_a_file_of_an_earlier_save_and_names_it(tmp_path):
    """A left-over of an earlier save could have the same layout: only the manifest distinguishes them."""
    manifest = write_shared(tmp_path / "c")
    write_other_layout(tmp_path / "c", group=0)  # for which the later save has a file of its own
    (tmp_path / "c" / MANIFEST_NAME).unlink()
    text = refusal(tmp_path / "c")
    assert f"data files of 2 saves ({EARLIER}; {SAVE})" in text
    assert f"Save {SAVE} may have shared {manifest.files[1].name} of earlier saves" in text
    assert "restore its manifest from a copy, or load another checkpoint" in text
    assert "complete by themselves" not in text


def test_repair_names_the_left_overs_beside_a_whole_save(tmp_path):
    """What the message says to do is done, and then the checkpoint is repaired."""
    directory, other = tmp_path / "c", tmp_path / "other"
    write_shared(directory, SAVE)
    (directory / MANIFEST_NAME).unlink()
    left_over = write_shared(other).files[1].name
    (other / left_over).rename(directory / left_over)
    text = refusal(directory)
    assert f"The data files of save {SAVE} are complete by themselves" in text
    assert f"move the others ({left_over}) to another directory, and repair again" in text
    (directory / left_over).rename(other / left_over)
    repair(directory, options=OPTIONS)
    assert bits(opened(directory).read_tensor("weight")) == bits(WEIGHT)


def test_repair_of_saves_that_all_lack_files_says_so(tmp_path):
    manifest = write_shared(tmp_path / "c")
    (tmp_path / "c" / MANIFEST_NAME).unlink()
    path = tmp_path / "c" / manifest.files[1].name
    path.write_bytes(path.read_bytes()[:-1])  # not sealed, so of no use
    assert refusal(tmp_path / "c").endswith("No save has all its files here: load another checkpoint")


def test_repair_names_no_file_of_another_layout(tmp_path):
    write_shared(tmp_path / "c")
    (tmp_path / "c" / MANIFEST_NAME).unlink()
    write_other_layout(tmp_path / "c", group=3)
    assert refusal(tmp_path / "c").endswith("No save has all its files here: load another checkpoint")


def test_repair_expects_no_save_to_have_shared_a_file_of_a_later_one(tmp_path):
    directory, later = tmp_path / "c", SaveId(SAVE.run_id, SAVE.ordinal + 1)
    mine, other = write_shared(directory), write_shared(tmp_path / "other", later)
    for name in (MANIFEST_NAME, mine.files[1].name):
        (directory / name).unlink()
    (tmp_path / "other" / other.files[1].name).rename(directory / other.files[1].name)
    text = refusal(directory)
    assert f"Save {later} may have shared {mine.files[0].name} of" in text
    assert f"Save {SAVE} may" not in text


def test_keys_are_removed_with_their_streams(tmp_path):
    write_encoded(tmp_path / "c")
    assert sorted(remove_keys(tmp_path / "c", "log")) == ["log", "log"]
    checkpoint = opened(tmp_path / "c")
    assert "log" not in checkpoint.streams and "log" not in checkpoint.objects
    assert bits(checkpoint.read_tensor("weight")) == bits(WEIGHT)
    assert verify(tmp_path / "c", options=OPTIONS).faults == []
