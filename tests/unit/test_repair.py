"""A manifest made anew: what it takes, what is refused, and that a refusal writes nothing."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.convert.weights_only import drop_optimizer, plan_drop
from megatron_datastates.errors import (
    DataStatesError,
    NotACheckpointError,
    RepairRefusedError,
    UnsupportedFormatError,
)
from megatron_datastates.format.directory import REMOVAL_NAME
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.format.values import MANIFEST_NAME, SaveId
from megatron_datastates.pipeline.upkeep.remove import remove_keys
from megatron_datastates.pipeline.upkeep.repair import repair
from megatron_datastates.pipeline.upkeep.verify import verify
from megatron_datastates.providers.base import StateReader
from tests.unit.by_hand import SAVE, Part, data_file
from tests.unit.ranks_in_turn import RanksInTurn
from tests.unit.states import OPTIONS, SMALL, State, data_files, flip
from tests.unit.verifying import refusal

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("megatron-*"))
COMMON = "common_state/shard_0_1"
STATES = [
    State({"a": torch.arange(600_000.0), "b": torch.ones(7)}, {COMMON: [{"iteration": 42}]}),
    State({}),  # of this rank there is no file
    State({"c": torch.arange(5)}, {"rng": [1, 2]}),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("saved") / "c"
    ranks = RanksInTurn(3)
    ranks.save(directory, STATES)
    ranks.close()
    assert len(data_files(directory)) == 2
    return directory


@pytest.fixture
def directory(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "c"))


def manifest_of(directory: Path) -> Manifest:
    return Manifest.decode((directory / MANIFEST_NAME).read_bytes(), "manifest")


def lose(directory: Path) -> Manifest:
    """Gives the manifest that is gone."""
    manifest = manifest_of(directory)
    (directory / MANIFEST_NAME).unlink()
    return manifest


def index_file(directory: Path) -> Path:
    (found,) = directory.glob("index-*")
    return found


# -- repaired ---------------------------------------------------------------------------------------------


def test_a_lost_manifest_is_made_anew_as_it_was(directory):
    lost = lose(directory)
    done = repair(directory, options=OPTIONS)
    assert manifest_of(directory) == done.manifest
    reported = {"created": done.manifest.created, "writer": done.manifest.writer, "iteration": 42}
    assert done.manifest == msgspec.structs.replace(lost, **reported)
    assert any("time of the save" in note for note in done.notes)
    assert any("parallel groups, the state providers" in note for note in done.notes)
    assert verify(directory, options=OPTIONS).good
    assert torch.equal(ds.open(directory, **SMALL).read_tensor("a"), torch.arange(600_000.0))


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.name)
def test_checkpoints_of_all_megatrons_are_repaired(golden, tmp_path):
    directory = Path(shutil.copytree(golden, tmp_path / "iter_0000007"))
    lost = lose(directory)
    done = repair(directory, options=OPTIONS)
    for field in ("run_id", "ordinal", "world_size", "index", "files", "others"):
        assert getattr(done.manifest, field) == getattr(lost, field), field
    assert done.manifest.iteration == 7
    assert any("common.pt is taken as it is" in note for note in done.notes) == bool(lost.others)


@pytest.mark.parametrize("has_state", [True, False])
def test_that_the_optimizers_state_was_removed_is_said(has_state: bool, tmp_path):
    tensors = {"w": torch.ones(3), "optimizer.state.exp_avg.w": torch.ones(3)}
    common = {"iteration": 1} | ({"optimizer": {"param_state_sharding_type": "x"}} if has_state else {})
    ranks = RanksInTurn(1)
    ranks.save(tmp_path / "c", [State(tensors, {COMMON: [common]})])
    ranks.close()
    shutil.copytree(tmp_path / "c", tmp_path / "whole")
    plan = plan_drop(tmp_path / "c")
    assert plan is not None
    drop_optimizer(plan)
    for directory in (tmp_path / "c", tmp_path / "whole"):
        lose(directory)
        notes = repair(directory, options=OPTIONS).notes
        is_dropped = has_state and directory.name == "c"
        assert manifest_of(directory).is_without_optimizer == is_dropped
        assert any("without its optimizer's state" in note for note in notes) == is_dropped


def test_files_that_the_lost_manifest_may_have_named_are_listed(directory):
    (directory / "extra.txt").touch()
    lose(directory)
    done = repair(directory, options=OPTIONS)
    assert done.manifest.others == []
    assert any("may have named other files; the new one does not: extra.txt" in note for note in done.notes)


@pytest.mark.parametrize("damage", [b"", b"nonsense", None])
def test_a_damaged_manifest_is_replaced(directory, damage):
    path = directory / MANIFEST_NAME
    path.write_bytes(path.read_bytes()[:-9] if damage is None else damage)
    repair(directory, options=OPTIONS)
    assert verify(directory, options=OPTIONS).good


def test_fields_that_no_file_states_are_left_out(tmp_path):
    ds.save({"a": torch.ones(3)}, tmp_path / "c", **SMALL)
    lose(tmp_path / "c")
    done = repair(tmp_path / "c", options=OPTIONS)
    assert done.manifest.iteration is None
    assert any("iteration is left out" in note for note in done.notes)
    assert any("no common state" in note for note in done.notes)


@pytest.mark.parametrize("iteration", [float("inf"), 1 << 63, -1])
def test_an_iteration_that_no_save_has_is_not_taken(iteration, tmp_path):
    ranks = RanksInTurn(1)
    ranks.save(tmp_path / "iter_0000007", [State({"w": torch.ones(3)}, {COMMON: [{"iteration": iteration}]})])
    ranks.close()
    lose(tmp_path / "iter_0000007")
    assert repair(tmp_path / "iter_0000007", options=OPTIONS).manifest.iteration == 7


def test_a_provider_that_may_have_stored_nothing_is_loaded(tmp_path):
    """The new manifest does not name the providers of the save."""
    ds.save({"a": torch.ones(3), "idle": Idle()}, tmp_path / "c", **SMALL)
    lose(tmp_path / "c")
    repair(tmp_path / "c", options=OPTIONS)
    found = Idle()
    ds.load(tmp_path / "c", into={"idle": found})
    assert found.is_restored


class Idle:
    """A state provider without state."""

    is_restored = False

    def entries(self) -> tuple[()]:
        return ()

    def restore(self, reader: StateReader) -> None:
        self.is_restored = True


@pytest.mark.parametrize("point", ["write manifest", "rename manifest", "sync directory of manifest"])
def test_a_kill_leaves_no_manifest_or_a_whole_one(directory, point):
    lose(directory)
    code = (
        "import sys; from megatron_datastates.config import Options\n"
        "from megatron_datastates.pipeline.upkeep.repair import repair\n"
        f"repair(sys.argv[1], options=Options(faults='{point}:1:kill'))"
    )
    done = subprocess.run([sys.executable, "-c", code, directory], check=False)
    assert done.returncode == -signal.SIGKILL
    if (directory / MANIFEST_NAME).exists():
        assert verify(directory, options=OPTIONS).good
    else:
        repair(directory, options=OPTIONS)


# -- refused ----------------------------------------------------------------------------------------------


def test_a_sound_manifest_is_left_alone(directory):
    assert "its manifest is undamaged" in refusal(directory)
    index_file(directory).unlink()
    assert "its manifest is undamaged" in refusal(directory)


def test_what_a_save_publishes_meanwhile_is_left_alone(directory):
    """The manifest that is made would name files that this save has removed."""
    lose(directory)
    published = []

    def publish(done: int) -> None:
        if not published:
            published.append(ds.save({"a": torch.ones(3)}, directory, **SMALL))

    with pytest.raises(RepairRefusedError, match="its manifest is undamaged"):
        repair(directory, progress=publish, options=OPTIONS)
    assert published and verify(directory, options=OPTIONS).good
    assert not list(directory.glob("*.tmp"))


def test_a_sound_manifest_that_names_files_of_two_saves_is_left_alone(directory):
    """Advice to move the files of one of them away would damage the checkpoint."""
    first = data_files(directory)[0]
    shutil.copy(first, directory / SaveId(SAVE.run_id, SAVE.ordinal + 1).data_file_name(0))
    assert "its manifest is undamaged" in refusal(directory)


def test_a_manifest_of_a_later_release_is_left_alone(directory):
    path = directory / MANIFEST_NAME
    later = msgspec.structs.replace(manifest_of(directory), format_version=3).encode()
    path.write_bytes(later)
    with pytest.raises(UnsupportedFormatError):
        repair(directory, options=OPTIONS)
    assert path.read_bytes() == later


def test_without_its_index_nothing_is_made(directory):
    lose(directory)
    path = index_file(directory)
    data = path.read_bytes()
    path.unlink()
    assert "only the index of this save says where its tensors are, and there is none" in refusal(directory)
    path.write_bytes(data[:-1])
    assert path.name in refusal(directory)
    path.write_bytes(data)
    flip(path, len(data) - 1)
    assert path.name in refusal(directory)


def test_an_index_of_other_layouts_proves_nothing(directory, tmp_path):
    other = tmp_path / "other"
    ranks = RanksInTurn(3)
    ranks.save(other, [State({"a": torch.arange(600_001.0)}), State({}), STATES[2]])
    ranks.close()
    lose(directory)
    index_file(directory).unlink()
    shutil.copy(index_file(other), directory)
    assert "is not the layout that rank 0 saved by" in refusal(directory)


def test_one_rank_too_few_is_refused(directory):
    lose(directory)
    data_files(directory)[1].unlink()
    assert "data files" in refusal(directory)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_unsealed_file_is_refused(directory, rank):
    lose(directory)
    path = data_files(directory)[rank]
    os.truncate(path, path.stat().st_size - 4096)
    assert "was never sealed" in refusal(directory)


def test_ranks_that_disagree_about_their_number_are_refused(tmp_path):
    for rank, world_size in enumerate((2, 3)):
        name = SAVE.data_file_name(rank)
        (tmp_path / name).write_bytes(data_file(Part(), rank, world_size))
    assert "is of a save by 3 ranks, others are by 2" in refusal(tmp_path)


def test_a_rank_beyond_their_number_is_refused(tmp_path):
    (tmp_path / SAVE.data_file_name(2)).write_bytes(data_file(Part(), rank=2, world_size=2))
    assert "was written as rank 2 of save" in refusal(tmp_path)


def test_an_index_under_another_name_is_refused(directory):
    lose(directory)
    path = index_file(directory)
    path.rename(path.with_name("index-" + "0" * 32))
    assert "is damaged: its SHA-256 differs" in refusal(directory)


def test_a_corrupt_block_is_refused(directory):
    lose(directory)
    flip(data_files(directory)[0], (1 << 20) + 5000)
    assert f"byte offset {1 << 20} has a wrong checksum" in refusal(directory)


def test_files_of_two_saves_are_refused(directory):
    ds.save({"x": torch.ones(1)}, directory.parent / "other", **SMALL)
    (extra,) = data_files(directory.parent / "other")
    shutil.copy(extra, directory)
    lose(directory)
    assert "data files of 2 saves" in refusal(directory)


def test_a_left_over_of_a_save_that_was_never_published_is_no_checkpoint(directory, tmp_path):
    """Its ranks are durable but for one, and an index of the same structure is there, of an earlier save."""
    lose(directory)
    first, second = data_files(directory)
    ranks = RanksInTurn(3)
    ranks.save(tmp_path / "earlier", STATES)  # leaves an index with the same name
    ranks.close()
    assert index_file(tmp_path / "earlier").name == index_file(directory).name
    os.truncate(second, 4096)
    assert "was never sealed" in refusal(directory)
    second.unlink()
    text = refusal(directory)
    assert "places data in 2 data files, and 1 are there" in text
    assert second.name in text and first.name not in text and "Restore what is missing" in text
    shutil.copy(first, second)
    assert "was written as rank 0" in refusal(directory)


def test_data_without_checksums_are_refused(tmp_path):
    ds.save({"a": torch.ones(3)}, tmp_path / "c", **SMALL, checksums=False)
    lose(tmp_path / "c")
    assert "without checksums" in refusal(tmp_path / "c")


def test_a_checkpoint_that_keys_were_removed_from_is_refused(directory):
    assert remove_keys(directory, "b") == ["b"]
    lose(directory)
    assert "keys were removed" in refusal(directory)


@pytest.mark.long
def test_what_megatron_warns_of_when_it_is_imported_is_not_printed(tmp_path):
    """A state with a class that Megatron makes loadable needs the import, which warns of missing packages."""
    state = {COMMON: [{"iteration": 42, "signal": signal.SIGTERM}], "a": torch.ones(3)}
    with torch.serialization.safe_globals([signal.Signals]):
        ds.save(state, tmp_path / "c")
    lose(tmp_path / "c")
    command = [sys.executable, "-m", "megatron_datastates", "repair", str(tmp_path / "c")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and manifest_of(tmp_path / "c").iteration == 42


def test_a_missing_common_state_is_refused(tmp_path):
    golden = next(path for path in GOLDEN if (path / "common.pt").exists())
    directory = Path(shutil.copytree(golden, tmp_path / "c"))
    lose(directory)
    (directory / "common.pt").unlink()
    assert "common.pt is missing" in refusal(directory)


@pytest.mark.parametrize("damage", ["empty", "cut", "no archive", "flipped"])
def test_a_damaged_common_state_is_refused(tmp_path, damage):
    golden = next(path for path in GOLDEN if (path / "common.pt").exists())
    directory = Path(shutil.copytree(golden, tmp_path / "c"))
    lose(directory)
    common = directory / "common.pt"
    data = common.read_bytes()
    common.write_bytes({"empty": b"", "cut": data[:-30], "no archive": b"x" * 99}.get(damage, data))
    if damage == "flipped":
        flip(common, data.index(b"iteration"))
    assert "common.pt is damaged" in refusal(directory)


def test_another_formats_checkpoint_is_refused(directory):
    lose(directory)
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert "in the format torch_dist" in refusal(directory)


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_where_no_data_files_are_there_is_nothing_to_repair(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotACheckpointError):
        repair(tmp_path / name, options=OPTIONS)


def test_a_full_disk_leaves_no_manifest(directory):
    set_aside = directory / REMOVAL_NAME  # by a killed prune: it names the files, and shows why it is gone
    (directory / MANIFEST_NAME).rename(set_aside)
    with pytest.raises(DataStatesError, match="was not written"):
        repair(directory, options=dataclasses.replace(OPTIONS, faults="rename manifest:1:ENOSPC"))
    assert not (directory / MANIFEST_NAME).exists() and set_aside.exists()
    repair(directory, options=OPTIONS)
    assert not set_aside.exists()
