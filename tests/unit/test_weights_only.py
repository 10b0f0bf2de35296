"""prune --drop-optimizer: weights stay bit for bit, shared files stay shared, a kill leaves a whole one."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import pickle
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from megatron_datastates.config import MIB
from megatron_datastates.convert import look, rewriting, weights_only
from megatron_datastates.convert.integrity import verify_source
from megatron_datastates.convert.open import open_source
from megatron_datastates.convert.weights_only import drop_optimizer, finish_drop, plan_drop
from megatron_datastates.errors import CorruptDataError, OptionError, StorageError
from megatron_datastates.format.codecs import NONE
from megatron_datastates.format.directory import JOURNAL_NAME
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.format.values import MANIFEST_NAME, is_of_optimizer
from megatron_datastates.pipeline.runs.branches import known_point
from megatron_datastates.pipeline.upkeep import retention
from megatron_datastates.pipeline.upkeep.retention import PrunePlan
from megatron_datastates.pipeline.upkeep.verify import verify
from megatron_datastates.providers.base import Mutability
from megatron_datastates.providers.named import NamedState
from tests.unit.command import run
from tests.unit.converting import contents
from tests.unit.encoded import builders, write_encoded
from tests.unit.inspecting import output_of
from tests.unit.pruning import age, call_and_be_killed, place
from tests.unit.states import OPTIONS, Chained, State, new_saver, random_tensor
from tests.unit.trained import TRACKER, arguments

FORMATS = ("datastates", "torch_dist")
NUMBERS = (1, 2, 3)
FROZEN = random_tensor(torch.uint8, (3 * MIB // 2,), 9)


def tensors_of(number: int) -> dict[str, torch.Tensor]:
    weight = random_tensor(torch.bfloat16, (3, 70, 33), number)
    return {
        "decoder.layers.mlp.weight": weight,
        "embedding.weight": random_tensor(torch.float32, (4001,), number),
        "optimizer.state.exp_avg.decoder.layers.mlp.weight": torch.full((3, 70, 33), number / 3),
        "chained_1.optimizer.state.param.embedding.weight": torch.full((MIB // 2,), float(number)),
    }


def objects_of(number: int) -> dict[str, Any]:
    common = [{"args": arguments(), "iteration": number, "optimizer": {"param_groups": [{"lr": 0.5}]}}]
    return {
        "common_state/shard_0_1": common,
        "rng_state/shard_0_1": [number],
        "optimizer.step/shard_0_1": [7],
    }


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in each format. That of datastates shares a file of frozen weights."""
    root, saver = tmp_path_factory.mktemp("both"), new_saver(link_from=MIB)
    frozen = torch.nn.Parameter(FROZEN, requires_grad=False)
    for number in NUMBERS:
        ours, theirs = (place(root / format, number) for format in FORMATS)
        weight = NamedState({"frozen.weight": frozen}, Mutability.NOW)
        state = Chained(State(tensors_of(number), objects_of(number)), weight)
        publication = saver.start(ours, state)
        publication.wait()
        planner = DefaultSavePlanner(flatten_state_dict=False)
        whole = {**tensors_of(number), "frozen.weight": FROZEN, **objects_of(number)}
        writer = dcp.FileSystemWriter(theirs, thread_count=2)
        dcp.save(whole, storage_writer=writer, planner=planner, no_dist=True)
        for path, format in zip((ours, theirs), FORMATS, strict=True):
            (path / "metadata.json").write_text(f'{{"sharded_backend": "{format}"}}')
    saver.close()
    for format in FORMATS:
        (root / format / TRACKER).write_text("3")
    return root


@pytest.fixture(params=FORMATS)
def root(request: pytest.FixtureRequest, both: Path, tmp_path: Path) -> Path:
    """A copy of a run, with its links."""
    subprocess.run(["cp", "-a", both / request.param, tmp_path / "run"], check=True)
    for path in (tmp_path / "run").rglob("*"):
        age(path, 7200)
    return tmp_path / "run"


def weights(path: Path) -> dict[str, Any]:
    found = contents(open_source(path))
    return {key: value for key, value in found.items() if not is_of_optimizer(key.removeprefix("object "))}


def require_good(path: Path) -> None:
    source = open_source(path)
    found = verify(path, options=OPTIONS) if source.format == "datastates" else verify_source(source)
    assert found.faults == [] and look.look_at(path).state == "complete"


def drop(path: Path, **how: Any) -> int:
    plan = plan_drop(path)
    assert plan is not None
    return drop_optimizer(plan, **how)


def test_weights_and_objects_stay_bit_for_bit(root: Path) -> None:
    path, done = place(root, 1), list[int]()
    before, size = weights(path), sum(one.stat().st_size for one in path.iterdir())
    plan = plan_drop(path)
    assert plan is not None and plan.dropped_bytes > 4 * (MIB // 2) + 4 * 3 * 70 * 33
    freed = drop_optimizer(plan, progress=done.append)
    require_good(path)
    assert contents(open_source(path)) == before
    assert sum(done) >= plan.written_bytes > 0
    assert freed == size - sum(one.stat().st_size for one in path.iterdir()) > 2 * MIB
    assert not list(path.glob("*.tmp")) and plan_drop(path) is None
    named = weights_only.names_in_index(path, open_source(path).format)
    assert {one.name for one in path.iterdir() if one.suffix in (".bin", ".distcp")} <= named


def test_a_place_in_the_history_of_the_run_stays(both: Path, tmp_path: Path) -> None:
    """Manifests of later jobs name the save as an ancestor, by the save id of the training."""
    subprocess.run(["cp", "-a", both / "datastates", tmp_path / "run"], check=True)
    path = place(tmp_path / "run", 1)
    before = known_point(path, 1)
    assert before is not None
    drop(path)
    assert known_point(path, 1) == dataclasses.replace(before, is_without_optimizer=True)
    assert Manifest.decode((path / MANIFEST_NAME).read_bytes(), "it").save_id != before.save_id


def test_shared_files_stay_shared(both: Path, tmp_path: Path) -> None:
    subprocess.run(["cp", "-a", both / "datastates", tmp_path / "run"], check=True)
    paths = [place(tmp_path / "run", number) for number in NUMBERS]
    shared = {next(path.glob("data-00000.1-*.bin")).stat().st_ino for path in paths}
    assert len(shared) == 1
    for path in paths[:2]:
        drop(path)
    for path in paths:
        require_good(path)
        assert next(path.glob("data-00000.1-*.bin")).stat().st_ino in shared
    assert open_source(paths[0]).read_tensor("frozen.weight").equal(FROZEN)


def root_format(root: Path) -> str:
    return open_source(place(root, 3)).format


def test_the_command_keeps_what_the_rules_keep(root: Path) -> None:
    (root / TRACKER).write_text("2")
    kept = {number: contents(open_source(place(root, number))) for number in (2, 3)}
    before = weights(place(root, 1))
    listed = output_of("prune", root, "--keep-last", 1, "--drop-optimizer")
    assert f"would drop the optimizer of  {place(root, 1)}" in listed and "Nothing was changed" in listed
    found = json.loads(output_of("prune", root, "--keep-last", 1, "--drop-optimizer", "--json"))
    assert [one["iteration"] for one in found["would_drop"]] == [1] and found["dropped"] == []
    assert plan_drop(place(root, 1)) is not None
    text = output_of("prune", root, "--keep-last", 1, "--drop-optimizer", "--yes")
    assert [line.split("  ")[0] for line in text.splitlines()[:-1]] == [
        "keep", "keep", "dropped the optimizer of",
    ]  # fmt: skip
    assert text.splitlines()[-1].startswith("freed 2.") and text.splitlines()[-1].endswith(
        "1 of 3 checkpoints"
    )
    assert contents(open_source(place(root, 1))) == before
    assert "none: it was not saved, or removed by prune" in output_of("show", place(root, 1))
    assert "none: " not in output_of("show", place(root, 2))
    said = f"{place(root, 1).name}: without its optimizer" in output_of("ls", root)
    assert said == (root_format(root) == "datastates")
    assert {number: contents(open_source(place(root, number))) for number in (2, 3)} == kept
    found = json.loads(output_of("prune", root, "--keep-last", 1, "--drop-optimizer", "--yes", "--json"))
    assert found["dropped"] == [] and found["kept"][-1]["why"] == "it has no optimizer state"


def test_one_that_is_damaged_keeps_no_other_from_it(root: Path) -> None:
    path = max(
        (one for one in place(root, 1).iterdir() if one.suffix in (".bin", ".distcp")),
        key=lambda one: one.stat().st_size,
    )
    if path.suffix == ".bin":
        data = path.read_bytes()
        at = data.index(tensors_of(1)["embedding.weight"].numpy().tobytes())
        path.write_bytes(data[: at + 5] + bytes([data[at + 5] ^ 1]) + data[at + 6 :])
        age(path, 7200)
    else:
        (place(root, 1) / ".metadata").unlink()
    code, printed, reported = run("prune", root, "--keep-last", 1, "--drop-optimizer", "--yes")
    assert f"dropped the optimizer of  {place(root, 2)}" in printed
    if path.suffix == ".bin":
        assert code == 1 and "not changed: " in reported and "1 failed" in printed
        assert not list(place(root, 1).glob("*.tmp")) and path.exists()
        assert look.look_at(place(root, 1)).state == "complete"
    else:
        assert code == 0 and "damaged: .metadata is missing" in printed


@pytest.mark.parametrize("lost", [StorageError("the run cannot be listed"), OSError(errno.EIO, "lost")])
def test_what_was_rewritten_before_the_storage_was_lost_is_printed(
    root: Path, lost: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide, plans = retention.plan_prune, []

    def decide_until_it_is_lost(*arguments: Any) -> PrunePlan:
        if len(plans) == 2:
            raise lost
        plans.append(decide(*arguments))
        return plans[-1]

    monkeypatch.setattr(retention, "plan_prune", decide_until_it_is_lost)
    code, printed, errors = run("prune", root, "--keep-last", 1, "--drop-optimizer", "--yes", "--json")
    found = json.loads(printed)
    assert code == 1 and f"{place(root, 2)}: not changed: " in errors
    assert [one["iteration"] for one in found["dropped"]] == [1]
    assert [one["iteration"] for one in found["failed"]] == [2]


POINTS = [("write weights", 1), ("publish weights", 1), ("sync directory of", 1)]
POINTS += [("remove replaced", 1), ("remove replaced", 2)]


@pytest.mark.parametrize(("point", "nth"), POINTS)
def test_a_kill_leaves_a_whole_checkpoint_and_the_next_call_cleans_up(
    root: Path, point: str, nth: int
) -> None:
    if point == "sync directory of":  # right after the old index was replaced
        point += " manifest" if open_source(place(root, 1)).format == "datastates" else " index"
    path = place(root, 1)
    whole, kept = contents(open_source(path)), weights(path)
    names = {one.name for one in path.iterdir()}
    call_and_be_killed(lambda: drop_optimizer(plan_drop(path), faults=f"{point}:{nth}:kill"))
    left = contents(open_source(path))
    assert left in (whole, kept) and look.look_at(path).state == "complete"
    assert finish_drop(path) and not finish_drop(path)
    assert contents(open_source(path)) == left
    require_good(path)
    if left == whole:
        assert {one.name for one in path.iterdir()} == names
        drop(path)
    assert contents(open_source(path)) == kept
    assert not list(path.glob("*.tmp")) and len(list(path.iterdir())) <= len(names)


def test_the_next_prune_cleans_up_by_itself(root: Path) -> None:
    path = place(root, 1)
    (path / JOURNAL_NAME).write_bytes(b'{"format": "')  # a kill while it was written
    output_of("prune", root, "--keep-last", 3, "--yes")
    assert not (path / JOURNAL_NAME).exists()
    require_good(path)


@pytest.mark.parametrize("point", ["write weights", "publish weights", "write index"])
def test_an_error_leaves_the_checkpoint_as_it_was(root: Path, point: str) -> None:
    path = place(root, 1)
    before, names = contents(open_source(path)), {one.name for one in path.iterdir()}
    with pytest.raises(OSError, match="No space left"):
        drop(path, faults=f"{point}:1:ENOSPC")
    assert {one.name for one in path.iterdir()} == names and contents(open_source(path)) == before


def save_again(path: Path, metadata: bool = True) -> None:
    """Writes a checkpoint as DCP does, under the names of the old one's files."""
    whole = {**tensors_of(9), **objects_of(9)}
    writer = dcp.FileSystemWriter(path, thread_count=2)
    before = (path / ".metadata").read_bytes()
    dcp.save(whole, storage_writer=writer, planner=DefaultSavePlanner(flatten_state_dict=False), no_dist=True)
    if not metadata:
        (path / ".metadata").write_bytes(before)


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "under way"])
def test_a_save_by_dcp_that_came_meanwhile_stays_as_it_is(
    both: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    path = place(Path(shutil.copytree(both / "torch_dist", tmp_path / "run")), 1)
    written = dict[str, bytes]()

    def publish(*how: Any) -> None:
        save_again(path, is_whole)
        names = {one.name for one in path.iterdir()} - {JOURNAL_NAME, *map(how[0].new_name, range(2))}
        written.update({name: (path / name).read_bytes() for name in names})
        original(*how)

    original = rewriting._DcpFiles.publish
    monkeypatch.setattr(rewriting._DcpFiles, "publish", publish)
    with pytest.raises(StorageError, match=r"was not rewritten: a save has written .* meanwhile"):
        drop(path)
    assert {one.name: one.read_bytes() for one in path.iterdir()} == written
    if is_whole:
        require_good(path)


def test_files_that_a_save_by_dcp_has_begun_to_write_are_not_removed(both: Path, tmp_path: Path) -> None:
    path = place(Path(shutil.copytree(both / "torch_dist", tmp_path / "run")), 1)
    call_and_be_killed(lambda: drop_optimizer(plan_drop(path), faults="remove replaced:1:kill"))
    old = json.loads((path / JOURNAL_NAME).read_bytes())["replaced"]
    (path / old[0]).write_bytes(b"of a save that is under way")
    assert finish_drop(path)
    assert [(path / name).exists() for name in old] == [True, *[False] * (len(old) - 1)]
    require_good(path)


def test_a_journal_leads_to_no_other_directory(root: Path) -> None:
    path = place(root, 1)
    hostile = {"format": open_source(path).format, "save_id": "", "made": [], "beside": [], "seen": {}}
    (path / JOURNAL_NAME).write_text(json.dumps({**hostile, "replaced": [f"../{TRACKER}"]}))
    with pytest.raises(Exception, match="is damaged: it names"):
        finish_drop(path)
    assert (root / TRACKER).exists()


def test_two_calls_do_not_rewrite_the_same_checkpoint(root: Path) -> None:
    with (
        weights_only._locked_journal(place(root, 1)),
        pytest.raises(StorageError, match="another call is rewriting"),
    ):
        drop(place(root, 1))
    require_good(place(root, 1))


def test_two_calls_cost_no_weights_where_nothing_is_locked(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a file system without locks, or with locks of one node: the second call removes new files."""
    path, calls, sync = place(root, 1), itertools.count(), weights_only.sync_directory
    before = contents(open_source(path))

    def finish_before_the_index(directory: Path) -> None:
        if next(calls) == 1:  # after that of the journal
            assert finish_drop(path)
        sync(directory)

    monkeypatch.setattr(weights_only, "lock", lambda descriptor: True)
    monkeypatch.setattr(weights_only, "sync_directory", finish_before_the_index)
    with pytest.raises(StorageError, match="is gone: another call may be rewriting it"):
        drop(path)
    require_good(path)
    assert contents(open_source(path)) == before


def test_what_holds_only_an_optimizer_is_refused(tmp_path: Path) -> None:
    saver = new_saver()
    saver.start(tmp_path / "a", State({"optimizer.state.x": torch.ones(3)})).wait()
    saver.close()
    with pytest.raises(OptionError, match="holds no weights"):
        plan_drop(tmp_path / "a")


def test_compressed_weights_stay_where_one_of_their_files_is_rewritten(tmp_path: Path) -> None:
    """A tensor is encoded in all of its files, or in none."""
    parts = builders()
    parts[1].add_fragment("optimizer.state.x", torch.arange(5), slice(0, None), NONE)
    write_encoded(tmp_path / "a", parts)
    before = weights(tmp_path / "a")
    drop(tmp_path / "a")
    assert contents(open_source(tmp_path / "a")) == before and len(before) == 6
    assert verify(tmp_path / "a", options=OPTIONS).faults == []


@pytest.mark.parametrize("killed_at", ["", "remove replaced:1", "renew sums:1"])
def test_megatrons_sums_of_files_hold_for_what_is_left(root: Path, killed_at: str) -> None:
    path = place(root, 1)
    hashes = pytest.importorskip("megatron.core.dist_checkpointing.validation")
    if not hasattr(hashes, "save_integrity_manifest"):
        pytest.skip("integrity.json is new in 0.19")
    hashes.save_integrity_manifest(str(path))
    if killed_at:
        plan = plan_drop(path)
        call_and_be_killed(lambda: drop_optimizer(plan, faults=f"{killed_at}:kill"))
        assert finish_drop(path)
    else:
        drop(path)
    hashes._verify_integrity_manifest_impl(str(path))
    sums = json.loads((path / "integrity.json").read_text())["files"]
    assert set(sums) == {one.name for one in path.iterdir()} - {"integrity.json"}
    require_good(path)


def test_a_file_that_differs_from_megatrons_sum_gets_no_other(root: Path) -> None:
    path = place(root, 1)
    before = {one.name: one.read_bytes() for one in path.iterdir()}
    sums = {"algorithm": "sha256", "files": dict.fromkeys(before, "0" * 64)}
    (path / "integrity.json").write_text(json.dumps(sums))
    with pytest.raises(CorruptDataError, match=r"has SHA-256 .*, expected 0000"):
        drop(path)
    assert {name: (path / name).read_bytes() for name in before} == before


def test_planner_data_of_another_program_are_said_to_be_left_out(both: Path, tmp_path: Path) -> None:
    subprocess.run(["cp", "-a", both / "torch_dist", tmp_path / "run"], check=True)
    path = place(tmp_path / "run", 1) / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = ["of", "mine"]
    path.write_bytes(pickle.dumps(metadata))
    for age_of in (tmp_path / "run").rglob("*"):
        age(age_of, 7200)
    code, printed, notes = run("prune", tmp_path / "run", "--keep-last", 1, "--drop-optimizer")
    said = " ".join((printed + notes).split())
    assert code == 0 and said.count("the planner data in .metadata are left out") == 1
