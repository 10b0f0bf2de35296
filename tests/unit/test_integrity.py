"""Checking torch_dist checkpoints: every byte of a tensor counts, and every fault is reported."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

from megatron_datastates.convert.integrity import data_bytes, verify_source
from megatron_datastates.convert.integrity_file import encode_sums
from megatron_datastates.convert.look import UNREADABLE, look_at
from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.sources import pickles
from megatron_datastates.errors import EngineError
from megatron_datastates.files import sha256_of
from megatron_datastates.format.directory import COMMON_FILE, INTEGRITY_NAME, METADATA_NAME, TORCH_DIST_INDEX
from megatron_datastates.pipeline.upkeep.verify import Verdict
from tests.unit.command import run
from tests.unit.converting import save_with_dcp
from tests.unit.states import flip

STATE: dict[str, Any] = {
    "w": torch.arange(300_000, dtype=torch.int32).reshape(300, 1000),
    "small": torch.ones(3),
    "empty": torch.empty(0),
    "object": ["mark", 1],
}


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    save_with_dcp(tmp_path / "t", STATE)
    return tmp_path / "t"


def verdict_of(path: Path, **how: Any) -> Verdict:
    return verify_source(open_source(path), **how)


def data_file(path: Path) -> Path:
    (file,) = path.glob("*.distcp")
    return file


def test_a_change_of_the_index_that_fits_all_else_is_found_by_megatrons_sums(
    theirs: Path, tmp_path: Path
) -> None:
    sums = {path.name: sha256_of(path) for path in theirs.iterdir()}
    (theirs / INTEGRITY_NAME).write_bytes(encode_sums(sums))
    code, out, _ = run("convert", theirs, tmp_path / "intact")
    assert code == 0 and f"{INTEGRITY_NAME} was not converted: load the target without" in out
    assert verdict_of(theirs).good and not verdict_of(theirs).uncovered
    index = theirs / TORCH_DIST_INDEX
    index.write_bytes(index.read_bytes().replace(b"small", b"smell"))
    (fault,) = verdict_of(theirs, quick=True).faults
    assert f"{index} has SHA-256" in fault and f"by {INTEGRITY_NAME}" in fault
    code, _, err = run("convert", theirs, tmp_path / "made")
    assert code == 1 and fault in err and not (tmp_path / "made").exists()


def test_a_file_that_megatrons_sums_name_and_that_is_gone_is_found(theirs: Path, tmp_path: Path) -> None:
    (theirs / INTEGRITY_NAME).write_bytes(encode_sums({COMMON_FILE: "0" * 64}))
    assert run("verify", theirs)[0] == 1
    code, _, err = run("convert", theirs, tmp_path / "made")
    assert code == 2 and f"{theirs / COMMON_FILE}" in err


def test_an_intact_checkpoint_is_good_and_read_completely(theirs: Path) -> None:
    done: list[int] = []
    source = open_source(theirs)
    verdict = verify_source(source, progress=done.append)
    assert verdict.good and not verdict.notes
    assert (verdict.files, verdict.tensors, verdict.objects) == (1, 3, 1)
    assert verdict.bytes_checked == sum(done) == data_bytes(source) == 300_000 * 4 + 12


@pytest.mark.parametrize("element", [0, 123_456, 299_999])
def test_one_flipped_bit_of_a_tensor_is_found(theirs: Path, element: int) -> None:
    file = data_file(theirs)
    begin = file.read_bytes().index(STATE["w"].numpy().tobytes())
    flip(file, begin + 4 * element)
    assert verdict_of(theirs, quick=True).good, "no data is read"
    (fault,) = verdict_of(theirs).faults
    assert "'w'" in fault and "CRC-32" in fault and file.name in fault


@pytest.mark.parametrize("in_common", [False, True], ids=["object", "common.pt"])
def test_one_flipped_bit_of_a_tensor_in_an_object_is_found(tmp_path: Path, in_common: bool) -> None:
    """torch.load compares no checksums: Megatron would go on with another state of a random generator."""
    theirs, state = tmp_path / "theirs", [{"state": torch.arange(1000)}]
    whole = DefaultSavePlanner(flatten_state_dict=False)  # else DCP stores the tensor apart
    dcp.save({"rng_state/shard_0_1": state}, checkpoint_id=theirs, planner=whole)
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    config |= {"common_backend": "torch", "common_backend_version": 1}
    (theirs / METADATA_NAME).write_text(json.dumps(config))
    torch.save({"rng": torch.arange(1000)}, theirs / COMMON_FILE)
    file = theirs / COMMON_FILE if in_common else data_file(theirs)
    assert verdict_of(theirs).good
    flip(file, file.read_bytes().index(torch.arange(1000).numpy().tobytes()) + 100)

    (fault,) = verdict_of(theirs).faults
    name = COMMON_FILE if in_common else "rng_state/shard_0_1"
    assert repr(name) in fault and "the CRC-32 of its data/0 differs" in fault
    for options in (["--to", "torch_dist", "--verify"], ["--verify"], []):
        code, _, err = run("convert", theirs, tmp_path / "made", *options)
        assert code == 1 and repr(name) in err and "CRC-32 of its data/0 differs" in err, options
        assert not (tmp_path / "made").exists()


def test_every_fault_is_listed(theirs: Path) -> None:
    file = data_file(theirs)
    for name in ("w", "small"):
        flip(file, file.read_bytes().index(STATE[name].numpy().tobytes()))
    flip(file, file.read_bytes().index(b"mark"))
    faults = verdict_of(theirs).faults
    assert len(faults) == 3
    assert {name for name in ("'w'", "'small'", "'object'") if any(name in fault for fault in faults)} == {
        "'w'", "'small'", "'object'"
    }  # fmt: skip


@pytest.mark.parametrize("quick", [True, False])
def test_a_missing_or_truncated_file_is_a_fault(theirs: Path, quick: bool) -> None:
    file = data_file(theirs)
    file.write_bytes(file.read_bytes()[:-70_000])
    assert any("truncated" in fault for fault in verdict_of(theirs, quick=quick).faults)
    file.unlink()
    assert any(file.name in fault for fault in verdict_of(theirs, quick=quick).faults)


def test_an_object_of_a_class_that_is_not_trusted_is_noted(theirs: Path) -> None:
    save_with_dcp(theirs, {"object": [Fraction(1, 2)]})
    verdict = verdict_of(theirs)
    assert verdict.good and "Fraction" in verdict.notes[0]


def test_a_view_has_no_checksum_of_its_own(theirs: Path) -> None:
    save_with_dcp(theirs, {"view": torch.arange(100.0)[10:20], "turned": torch.ones(4, 5).T})
    verdict = verdict_of(theirs)
    assert verdict.good
    assert "1 of 2 fragments" in verdict.notes[0] and "no checksum" in verdict.notes[0]


def test_the_command_checks_torch_dist_too(theirs: Path) -> None:
    code, printed, _ = run("verify", theirs)
    assert code == 0 and "good: 3 tensors and 1 object in 1 file, 1.20 MB checked" in printed
    flip(data_file(theirs), data_file(theirs).read_bytes().index(STATE["w"].numpy().tobytes()))
    code, printed, _ = run("verify", theirs)
    assert code == 1 and "FAULTY" in printed and "fault: " in printed
    code, printed, _ = run("verify", "--quick", theirs)
    assert code == 0 and ": good" not in printed
    unread = "damage within tensors and objects not looked for (--quick)"
    assert f"structure good: 3 tensors and 1 object in 1 file, {unread}" in printed
    several = run("verify", "--quick", theirs, theirs)[1]
    assert f"2 good, 0 faulty, {unread}" in several


def test_an_index_that_is_missing_is_named(theirs: Path) -> None:
    (theirs / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (theirs / ".metadata").unlink()
    code, _, said = run("verify", theirs)
    assert code == 2 and "holds a checkpoint of torch_dist or DCP whose .metadata is missing" in said


@pytest.mark.parametrize("lack", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_metadata_that_memory_lacks_for_is_not_damaged(
    by_dcp: Path, monkeypatch: pytest.MonkeyPatch, lack: Exception
) -> None:
    monkeypatch.setattr(pickles._MetadataUnpickler, "load", mock.Mock(side_effect=lack), raising=False)
    with pytest.raises(EngineError, match=r"\.metadata was not read: there is not enough memory"):
        open_source(by_dcp)
    look = look_at(by_dcp)
    assert (look.state, "not enough memory" in look.problem) == (UNREADABLE, True)
