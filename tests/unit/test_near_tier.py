"""The near tier: what is published there, drained, kept, brought home; and what happens where it fails.

Two ranks stand for two nodes: each has a near tier of its own.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.config import MIB
from megatron_datastates.engine.faults import Faults
from megatron_datastates.format.directory import TRACKER_NAME
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.near import copying, publishing, recovery, tier
from megatron_datastates.pipeline.near.copying import Copier, Limit, SourceError
from megatron_datastates.pipeline.near.places import near_folder, near_run
from megatron_datastates.pipeline.near.recovery import recover_newest
from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.pipeline.publishing import lateness
from megatron_datastates.pipeline.report import _save_line, save_report
from megatron_datastates.pipeline.runs.branches import Origin
from megatron_datastates.pipeline.upkeep.verify import verify
from tests.unit.ranks_in_turn import RanksInTurn
from tests.unit.states import OPTIONS, SMALL, State, bits, data_files, random_tensor

STALLED = {"drain_limit": 1}  # bytes a second: nothing is drained after the first piece


def states_of(seed: int) -> list[State]:
    return [
        State({f"w{rank}": random_tensor(torch.float32, (500_000,), seed + rank)}, {f"o{rank}": seed})
        for rank in (0, 1)
    ]


class Nodes:
    """Two nodes, each with one rank."""

    def __init__(self, root: Path, *own: Mapping[str, Any], **changes: Any) -> None:
        self.run = root / "far" / "run"
        self.roots = [root / "near0", root / "near1"]
        each = [{"near": str(near), **(own[n] if own else {})} for n, near in enumerate(self.roots)]
        self.ranks = RanksInTurn(2, each, **changes)

    def directory(self, iteration: int) -> Path:
        return self.run / f"iter_{iteration:07d}"

    def near(self, node: int, iteration: int) -> Path:
        return near_folder(self.roots[node], self.directory(iteration))

    def kept(self, node: int) -> list[str]:
        return sorted(path.name for path in near_run(self.roots[node], self.run).glob("iter_*"))

    def save(self, iteration: int, origin: Origin | None = None) -> Publication:
        return self.ranks.save(self.directory(iteration), states_of(iteration), origin)

    def check(self, iteration: int) -> None:
        """Checks that the checkpoint is far, whole and exact."""
        assert verify(self.directory(iteration)).faults == []
        checkpoint = Checkpoint.open(self.directory(iteration), OPTIONS)
        for rank in (0, 1):
            expected = random_tensor(torch.float32, (500_000,), iteration + rank)
            assert bits(checkpoint.read_tensor(f"w{rank}")) == bits(expected)
            assert checkpoint.read_object(f"o{rank}") == iteration

    def is_far(self, iteration: int) -> bool:
        return (self.directory(iteration) / MANIFEST_NAME).exists()

    def close(self) -> None:
        """Ends the job as ranks do: each waits for its own drain, the first for all files."""
        drains = [saver.near.drain for saver in self.ranks.savers if saver.near is not None]
        with ThreadPoolExecutor(2) as threads:
            for _ in threads.map(lambda drain: drain.close(abandon=False), drains):
                pass
        self.ranks.close()


def test_the_report_of_a_save_says_that_it_is_in_near_tiers_so_far(tmp_path: Path) -> None:
    near, far = Nodes(tmp_path / "a", **STALLED), RanksInTurn(1, [{}])
    published = near.save(1)
    report = save_report(published, "async")
    assert report["near"] and not near.is_far(1)
    line = _save_line(report)
    assert line.startswith("datastates: published async save of 4.0 MB to ")
    assert f"{near.directory(1)} (so far in near tiers); trainer held " in line
    report = save_report(far.save(tmp_path / "b" / "iter_0000001", states_of(1)[:1]), "async")
    assert not report["near"] and "near" not in _save_line(report).replace(str(tmp_path), "")
    near.ranks.close()
    far.close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    made.close()


def test_each_node_holds_its_own_files_and_all_become_far(nodes: Nodes) -> None:
    first = nodes.save(1)
    second = nodes.save(2)
    assert (first.outcome, second.outcome) == (Outcome.PUBLISHED, Outcome.PUBLISHED)
    nodes.close()
    for iteration in (1, 2):
        nodes.check(iteration)
    assert nodes.ranks.far == [first.save.context.save_id, second.save.context.save_id]
    for node in (0, 1):
        assert nodes.kept(node) == ["iter_0000002"]
        assert [path.name[:10] for path in data_files(nodes.near(node, 2))] == [f"data-0000{node}"]
        (index,) = nodes.directory(2).glob("index-*")
        for name in (MANIFEST_NAME, index.name):
            assert (nodes.near(node, 2) / name).read_bytes() == (nodes.directory(2) / name).read_bytes()


def test_an_index_is_sent_to_the_nodes_once(nodes: Nodes) -> None:
    sent = []
    for iteration in (1, 2, 3):
        publication = nodes.save(iteration)
        assert publication.publisher.near is not None
        sent.append(publication.publisher.near.offered_bytes)
    (index,) = nodes.near(0, 3).glob("index-*")
    assert all(abs(sent[0] - size - index.stat().st_size) < 50 for size in sent[1:]), sent


def test_a_save_is_published_near_while_the_way_to_save_is_stuck(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, faults="drain write:0:EIO")
    try:
        assert nodes.save(1).outcome is Outcome.PUBLISHED
        assert not nodes.is_far(1) and nodes.ranks.far == []
    finally:
        abandon(nodes)


def abandon(nodes: Nodes) -> None:
    """Closes as a program does that ends with an error."""
    for saver in nodes.ranks.savers:
        if saver.near is not None:
            saver.near.drain.close(abandon=True)
            if saver.near.drain._thread is not None:
                saver.near.drain._thread.join()
    nodes.ranks.close()


def test_a_failed_copy_is_made_again(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, {"faults": "drain write:1:EIO"}, {"faults": "drain rename:1:ENOSPC"})
    nodes.save(1)
    nodes.close()
    nodes.check(1)
    assert not list(nodes.directory(1).glob(".datastates-*")), "nothing is left of the failed copies"


def test_only_every_nth_save_is_drained_and_the_last_one_of_a_job(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, drain_every=2)
    for iteration in (1, 2, 3, 4, 5):
        nodes.save(iteration)
    nodes.close()
    assert [iteration for iteration in (1, 2, 3, 4, 5) if nodes.is_far(iteration)] == [2, 4, 5]
    for iteration in (2, 4, 5):
        nodes.check(iteration)
    assert nodes.kept(0) == nodes.kept(1) == ["iter_0000005"]


def test_more_are_kept_near_if_asked_for(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, near_keep=3)
    for iteration in (1, 2, 3, 4):
        nodes.save(iteration)
    nodes.close()
    assert nodes.kept(0) == nodes.kept(1) == ["iter_0000002", "iter_0000003", "iter_0000004"]


def test_what_is_not_far_yet_is_kept_near(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, {"faults": "drain write:0:EIO"}, {})
    for iteration in (1, 2, 3):
        nodes.save(iteration)
    time.sleep(1.0)
    assert nodes.kept(0) == ["iter_0000001", "iter_0000002", "iter_0000003"]
    abandon(nodes)


def test_a_program_that_ends_with_an_error_leaves_its_saves_to_the_next_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = Nodes(tmp_path, **STALLED)
    nodes.save(1)
    monkeypatch.setattr(sys, "last_value", RuntimeError(), raising=False)
    for saver in reversed(nodes.ranks.savers):
        assert saver.near is not None
        saver.near.close()
    assert not nodes.is_far(1) and "iter_0000001: published in the near tiers only" in caplog.text
    abandon(nodes)


def test_an_error_in_an_interactive_session_is_not_its_end(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.save(1)
    monkeypatch.setattr(sys, "last_value", NameError(), raising=False)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    for saver in reversed(nodes.ranks.savers):
        assert saver.near is not None
        saver.near.close()
    nodes.check(1)


@pytest.mark.parametrize("cause", ["full", "a file", "not mounted"])
def test_a_near_tier_of_no_use_is_left_out_with_one_warning(
    cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = Nodes(tmp_path)
    if cause == "full":
        free = tier.free_bytes
        monkeypatch.setattr(tier, "free_bytes", lambda root: 10 if root == nodes.roots[1] else free(root))
    elif cause == "a file":
        nodes.roots[1].write_text("")
    else:
        nodes.roots[1].symlink_to(tmp_path / "nowhere" / "near")
    for iteration in (1, 2):
        publication = nodes.save(iteration)
        assert publication.outcome is Outcome.PUBLISHED
        assert [record.is_near for record in publication.records] == [True, False]
    nodes.close()
    for iteration in (1, 2):
        nodes.check(iteration)
    assert len([one for one in caplog.records if "is not used" in one.message]) == 1
    assert nodes.kept(0) == ["iter_0000002"]


def test_without_any_near_tier_a_save_is_published_right_away(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    for root in nodes.roots:
        root.write_text("")
    publication = nodes.save(1)
    assert nodes.is_far(1) and nodes.ranks.far == [publication.save.context.save_id]
    nodes.close()
    nodes.check(1)


@pytest.mark.parametrize(
    "fault", ["write index", "write manifest", "rename manifest", "sync directory of manifest"]
)
@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_cannot_publish_near_fails_the_save_and_leaves_its_tier_out_once(
    fault: str, node: int, tmp_path: Path
) -> None:
    own: list[dict[str, Any]] = [{}, {}]
    own[node] = {"faults": f"{fault}:1:EIO"}
    nodes = Nodes(tmp_path, *own)
    failed = nodes.save(1)
    assert failed.outcome is Outcome.FAILED
    assert f"failed on 1 of 2 ranks: rank {node}: " in (failed.error or "")
    second = nodes.save(2)
    assert [record.is_near for record in second.records] == [node != 0, node != 1]
    third = nodes.save(3)
    assert all(record.is_near for record in third.records)
    nodes.close()
    for iteration in (2, 3):
        nodes.check(iteration)
    assert not nodes.is_far(1)


@pytest.mark.parametrize("is_readable", [True, False])
def test_files_stay_of_a_failed_save_whose_manifest_may_be_in_place_near(
    is_readable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, {"faults": "sync directory of manifest:1:EIO"}, {"near": ""})
    if not is_readable:  # after an error, storage may be unable to say what it holds
        monkeypatch.setattr(publishing, "holds_exactly", lambda path, data, **_: False)
    failed = nodes.save(1)
    assert failed.outcome is Outcome.FAILED and "its files were kept" in (failed.error or "")
    abandon(nodes)
    assert recover(nodes)[0] == 1, "as after a crash that keeps the manifest"
    nodes.check(1)


def test_a_node_without_the_option_saves_right_away(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, {"near": ""}, {})
    assert nodes.save(1).outcome is Outcome.PUBLISHED
    abandon(nodes)
    assert data_files(nodes.directory(1)) != []


# -- copies ----------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, Manifest]:
    """A checkpoint of one file, of several pieces."""
    directory = tmp_path / "source"
    ds.save({"w": random_tensor(torch.uint8, (20 * MIB + 5,))}, directory, **SMALL)
    return directory, Manifest.decode((directory / MANIFEST_NAME).read_bytes(), "manifest")


def copy(stored: tuple[Path, Manifest], target: Path, faults: str = "") -> Path:
    directory, manifest = stored
    (entry,) = manifest.files
    Copier(OPTIONS, Faults(faults), Limit(0)).copy(
        directory / entry.name, target / entry.name, manifest, entry
    )
    return target / entry.name


def test_a_copy_is_the_same_file(stored: tuple[Path, Manifest], tmp_path: Path) -> None:
    path = copy(stored, tmp_path / "there")
    assert path.read_bytes() == (stored[0] / path.name).read_bytes()
    written = path.stat().st_ino
    assert copy(stored, tmp_path / "there").stat().st_ino == written, "a whole copy is not made again"
    with path.open("r+b") as file:
        file.truncate(MIB)
    assert copy(stored, tmp_path / "there").read_bytes() == (stored[0] / path.name).read_bytes()


def test_a_copy_is_durable_before_it_has_its_name(
    stored: tuple[Path, Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[str, str]] = []
    sync, replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        steps.append(("sync", os.fspath(Path(f"/proc/self/fd/{descriptor}").readlink())))
        sync(descriptor)

    def rename(source: Path, target: Path) -> None:
        steps.append(("rename", os.fspath(source)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    copy(stored, tmp_path / "there")
    temporary = steps[0][1]
    assert temporary.endswith(".tmp")
    assert steps == [("sync", temporary), ("rename", temporary), ("sync", os.fspath(tmp_path / "there"))]


@pytest.mark.parametrize("place", [0, 5000, 7 * MIB, 17 * MIB + 3, -1, -4096])
def test_a_flipped_bit_is_never_copied(place: int, stored: tuple[Path, Manifest], tmp_path: Path) -> None:
    (path,) = data_files(stored[0])
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(SourceError):
        copy(stored, tmp_path / "there")
    assert list((tmp_path / "there").glob("*")) == [] == list((tmp_path / "there").glob(".*"))


@pytest.mark.parametrize("how", ["missing", "truncated", "longer", "another"])
def test_another_file_is_never_copied(how: str, stored: tuple[Path, Manifest], tmp_path: Path) -> None:
    (path,) = data_files(stored[0])
    if how == "missing":
        path.unlink()
    elif how == "another":
        ds.save({"w": torch.ones(20 * MIB + 5, dtype=torch.uint8)}, tmp_path / "other", **SMALL)
        (other,) = data_files(tmp_path / "other")
        path.write_bytes(other.read_bytes())
    else:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size + (4096 if how == "longer" else -4096))
    with pytest.raises(SourceError):
        copy(stored, tmp_path / "there")


@pytest.mark.parametrize("operation", ["drain read", "drain write", "drain sync", "drain rename"])
@pytest.mark.parametrize("nth", [1, 2])
def test_nothing_is_left_of_a_copy_that_fails(
    operation: str, nth: int, stored: tuple[Path, Manifest], tmp_path: Path
) -> None:
    if nth == 2 and operation not in ("drain read", "drain write"):
        pytest.skip("happens once")
    with pytest.raises(OSError) as raised:
        copy(stored, tmp_path / "there", f"{operation}:{nth}:ENOSPC")
    assert raised.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path / "there") == []


def test_a_limit_spreads_bytes_over_time() -> None:
    limit = Limit(1_000_000)
    begin = time.monotonic()
    for _ in range(4):
        limit.take(100_000)
    assert time.monotonic() - begin >= 0.3, "the first is free, each of the others waits for the one before"


# -- the next job ----------------------------------------------------------------------------------------


def killed(tmp_path: Path) -> Nodes:
    """Returns one node with iteration 3 near, and nothing far, as a kill leaves it."""
    nodes = Nodes(tmp_path, faults="drain write:0:EIO")
    nodes.save(3)
    abandon(nodes)
    for path in nodes.near(1, 3).glob("data-*"):  # in these tests one process looks for all nodes
        shutil.copy(path, nodes.near(0, 3))
    return nodes


def recover(nodes: Nodes) -> tuple[int | None, str]:
    said: list[str] = []
    # The limit is for the network of a job that trains.
    options = dataclasses.replace(OPTIONS, near=str(nodes.roots[0]), drain_limit=1)
    return recover_newest(nodes.run, options, said.append), "\n".join(said)


def test_the_next_job_brings_home_what_is_near(tmp_path: Path) -> None:
    nodes = killed(tmp_path)
    iteration, said = recover(nodes)
    assert iteration == 3 and "iteration 3 is newer than what is in" in said and "(nothing)" in said
    nodes.check(3)
    assert (nodes.run / TRACKER_NAME).read_text() == "3"
    assert recover(nodes) == (None, ""), "the second time there is nothing to do"


def test_a_rank_whose_storage_hangs_before_a_load_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lateness, "LATE_SECONDS", 0.2)
    nodes, look = killed(tmp_path), recovery._Recovery._look

    def hangs(*args: Any) -> Any:
        time.sleep(0.5)
        return look(*args)

    monkeypatch.setattr(recovery._Recovery, "_look", hangs)
    assert recover(nodes)[0] == 3
    found = [line for line in caplog.messages if "keeps all others waiting" in line]
    assert found and str(nodes.run) in found[0] and socket.gethostname() in found[0]


def test_a_copy_that_takes_long_before_a_load_is_no_storage_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first rank of a node copies all its files, and the others of a single node have nothing to do."""
    nodes, read = killed(tmp_path), Copier._read_checked

    def slow(*args: Any) -> None:
        time.sleep(0.6)
        read(*args)

    monkeypatch.setattr(lateness, "LATE_SECONDS", 1.5)
    monkeypatch.setattr(copying, "PIECE_BYTES", MIB)
    monkeypatch.setattr(recovery, "_COPIES", 1)
    monkeypatch.setattr(Copier, "_read_checked", slow)
    assert recover(nodes)[0] == 3
    assert "keeps all others waiting" not in caplog.text


def test_a_newer_checkpoint_in_save_is_left_alone(tmp_path: Path) -> None:
    nodes = killed(tmp_path)
    ds.save({"w": torch.ones(3)}, nodes.directory(9), **SMALL)
    (nodes.run / TRACKER_NAME).write_text("9")
    assert recover(nodes) == (None, "")
    (nodes.directory(9) / MANIFEST_NAME).unlink()
    assert recover(nodes)[0] == 3, "it is not complete"


@pytest.mark.parametrize("loss", ["file", "bit in its footer", "manifest"])
def test_a_checkpoint_that_has_lost_a_file_is_named_and_left(loss: str, tmp_path: Path) -> None:
    nodes = killed(tmp_path)
    path = sorted(nodes.near(0, 3).glob("data-*"))[1]
    if loss == "file":
        path.unlink()
    elif loss == "manifest":
        (nodes.near(0, 3) / MANIFEST_NAME).unlink()
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    iteration, said = recover(nodes)
    assert iteration is None and not nodes.is_far(3)
    assert loss == "manifest" or f"no near tier has {path.name}" in said


def test_a_flipped_bit_in_a_near_file_is_found_before_it_counts(tmp_path: Path) -> None:
    nodes = killed(tmp_path)
    path = sorted(nodes.near(0, 3).glob("data-*"))[1]
    data = bytearray(path.read_bytes())
    data[10_000] ^= 1
    path.write_bytes(data)
    iteration, said = recover(nodes)
    assert iteration is None and not nodes.is_far(3)
    assert "could not be copied there" in said and "checksum" in said


def test_a_file_that_is_far_already_need_not_be_near(tmp_path: Path) -> None:
    nodes = killed(tmp_path)
    path = sorted(nodes.near(0, 3).glob("data-*"))[1]
    nodes.directory(3).mkdir(parents=True, exist_ok=True)
    shutil.move(path, nodes.directory(3))
    assert recover(nodes)[0] == 3
    nodes.check(3)


def test_loads_read_the_near_file_and_the_far_one_if_it_is_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = killed(tmp_path)
    recover(nodes)
    options = dataclasses.replace(OPTIONS, near=str(nodes.roots[0]))
    hidden = nodes.run / "hidden"
    hidden.mkdir()
    for path in data_files(nodes.directory(3)):
        shutil.move(path, hidden)
    checkpoint = Checkpoint.open(nodes.directory(3), options)
    expected = random_tensor(torch.float32, (500_000,), 3)
    assert bits(checkpoint.read_tensor("w0")) == bits(expected), "read near: there is no other file"
    for path in list(hidden.iterdir()):
        shutil.move(path, nodes.directory(3))
    (path,) = nodes.near(0, 3).glob("data-00000-*")
    data = bytearray(path.read_bytes())
    data[100_000] ^= 1
    path.write_bytes(data)
    checkpoint = Checkpoint.open(nodes.directory(3), options)
    with caplog.at_level(logging.WARNING):
        assert bits(checkpoint.read_tensor("w0")) == bits(expected)
    assert f"reading from {nodes.directory(3)} instead" in caplog.text
    path.write_bytes(data[:-1])
    assert bits(Checkpoint.open(nodes.directory(3), options).read_tensor("w0")) == bits(expected)
