"""Copies in other nodes' near tiers: what is copied, what a lost node costs with them, and what fails."""

from __future__ import annotations

import dataclasses
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_datastates.config import MIB
from megatron_datastates.engine.faults import Faults
from megatron_datastates.errors import DataStatesError, StorageError
from megatron_datastates.format.directory import TRACKER_NAME
from megatron_datastates.format.manifest import FileEntry, Manifest
from megatron_datastates.format.values import MANIFEST_NAME, SaveId
from megatron_datastates.pipeline.near import listing, recovery, replicas, serving
from megatron_datastates.pipeline.near.nodes import NodeEntry, nodes_in
from megatron_datastates.pipeline.near.nodes import Nodes as NearNodes
from megatron_datastates.pipeline.near.places import manifest_in
from megatron_datastates.pipeline.near.recovery import recover_newest
from megatron_datastates.pipeline.near.replicas import CopyTask, Replicas, copy_task_of
from megatron_datastates.pipeline.near.serving import Endpoint, Server, download
from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.pipeline.saving.records import ENDPOINT_BYTES, RankRecord, Records
from megatron_datastates.threads import BackgroundThread
from tests.support.programs import Programs
from tests.support.waiting import PATIENCE_SECONDS, eventually
from tests.unit.command import run
from tests.unit.states import OPTIONS, data_files, flip
from tests.unit.test_near_tier import Nodes, abandon, states_of

ROOT = Path(__file__).parents[2]
NEVER_FAR = "drain write:0:EIO"


@pytest.fixture(autouse=True)
def master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


def copying(tmp_path: Path, *own: dict[str, Any], **changes: Any) -> Nodes:
    return Nodes(tmp_path, *own, near_replicas=1, **changes)


def ranks_of_files(folder: Path) -> list[int]:
    return sorted(int(path.name[5:10]) for path in data_files(folder))


class Cluster:
    """The ranks of the next job, each on a node and a thread of its own; collective calls between threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, roots: Sequence[Path]) -> None:
        self.roots = roots
        self._rank = threading.local()
        self._barrier = threading.Barrier(len(roots), timeout=60.0)
        self._values: list[Any] = [None] * len(roots)
        monkeypatch.setattr(recovery, "Collectives", self._collectives)

    def _gather(self, value: Any) -> list[Any]:
        self._values[self._rank.value] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found

    def _collectives(self) -> Any:
        rank, size = self._rank.value, len(self.roots)

        class Threads:
            gather_values = staticmethod(self._gather)

            def start_sum(inner, values: Sequence[int]) -> Any:
                sums = [sum(values) for values in zip(*self._gather(list(values)), strict=True)]
                return type("Sums", (), {"result": staticmethod(lambda: sums)})

        made = Threads()
        made.rank, made.size = rank, size  # type: ignore[attr-defined]
        return made

    def recover(self, run: Path) -> tuple[int | None, str]:
        """Returns the iteration that was brought home, on all ranks, and what was said on rank 0."""
        said: list[str] = []
        (iteration,) = {rank.result() for rank in self.ranks(run, said.append)}
        return iteration, "\n".join(said)

    def ranks(self, run: Path, notify: Callable[[str], None]) -> list[Future[int | None]]:
        """Returns what the recovery has returned or raised on each rank."""

        def of_rank(rank: int) -> int | None:
            self._rank.value = rank
            return recover_newest(run, dataclasses.replace(OPTIONS, near=str(self.roots[rank])), notify)

        with ThreadPoolExecutor(len(self.roots)) as threads:
            return [threads.submit(of_rank, rank) for rank in range(len(self.roots))]


# -- what is copied --------------------------------------------------------------------------------------


def test_each_node_has_a_copy_of_the_files_of_the_one_before_it(tmp_path: Path) -> None:
    nodes = copying(tmp_path)
    assert nodes.save(1).outcome is Outcome.PUBLISHED
    for node in (0, 1):
        assert ranks_of_files(nodes.near(node, 1)) == [0, 1]
        assert not list(nodes.near(node, 1).glob(".datastates-*"))
    for path in data_files(nodes.near(0, 1)):
        assert path.read_bytes() == (nodes.near(1, 1) / path.name).read_bytes()
    nodes.save(2)
    nodes.close()
    nodes.check(2)
    assert nodes.kept(0) == nodes.kept(1) == ["iter_0000002"], "copies go with their save"


def test_what_is_copied_is_reported(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    nodes = copying(tmp_path, report_file=str(report), faults="")
    nodes.save(1)
    nodes.close()
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    (copies,) = [one for one in lines if one["event"] == "copies"]
    (size,) = [path.stat().st_size for path in data_files(nodes.near(0, 1)) if path.name[5:10] == "00001"]
    assert (copies["state"], copies["error"], copies["files"], copies["bytes"]) == ("made", None, 1, size)
    assert copies["partners"] == [socket.gethostname().partition(".")[0]] and copies["copying_ms"] > 0
    documented = (ROOT / "docs" / "reports.md").read_text().partition("## Copies on other nodes")[2]
    assert all(f"`{field}`" in documented for field in copies)
    events = [one["event"] for one in lines]
    assert events.index("copies") < events.index("drain")


def test_neither_polls_nor_drains_wait_for_a_report_file_that_hangs(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    os.mkfifo(report)  # without a reader, whoever opens it hangs
    nodes = copying(tmp_path, report_file=str(report))
    saves = threading.Thread(target=lambda: [nodes.save(iteration) for iteration in (1, 2)], daemon=True)
    saves.start()
    try:
        eventually(lambda: nodes.is_far(1) and nodes.is_far(2))
        saves.join(PATIENCE_SECONDS)
        assert not saves.is_alive()
    finally:
        answers = os.open(report, os.O_RDWR)
    nodes.close()
    os.close(answers)
    nodes.check(2)


@pytest.mark.parametrize(
    ("failing", "files", "said"),
    [(0, 0, "Input/output error"), (1, 1, "1 of 2 ranks have left copies out: see their logs")],
)
def test_copies_that_are_left_out_on_any_rank_are_reported(
    failing: int, files: int, said: str, tmp_path: Path, quick: None
) -> None:
    report = tmp_path / "report.jsonl"
    faults = [{"faults": "replica sync:0:EIO"} if rank == failing else {} for rank in (0, 1)]
    nodes = copying(tmp_path, *faults, report_file=str(report))
    nodes.save(1)
    nodes.close()
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    (copies,) = [one for one in lines if one["event"] == "copies"]
    assert (copies["state"], copies["files"], copies["incomplete_ranks"]) == ("incomplete", files, 1)
    assert said in copies["error"]


def records_of(nodes: Sequence[Sequence[int]], near: Callable[[int], bool] = lambda rank: True) -> Records:
    """Returns records of ranks, by node."""
    found = [(rank, number) for number, ranks in enumerate(nodes, 1) for rank in ranks]
    return Records.of(
        RankRecord(rank, True, 10, 5, 0, bytes(16), 0, *[0.0] * 7, node=node, is_near=near(rank))
        for rank, node in sorted(found)
    )


def manifest_of(ranks: int) -> Manifest:
    names = [SaveId(5, 1).data_file_name(rank) for rank in range(ranks)]
    index = Manifest.__struct_fields__ and None
    return Manifest(
        run_id=f"{5:016x}", ordinal=1, world_size=ranks, created="", index=index,  # type: ignore[arg-type]
        files=[FileEntry(name, rank, 10 + rank, 5, 0) for rank, name in enumerate(names)],
    )  # fmt: skip


@pytest.mark.parametrize(("count", "holders"), [(1, 1), (2, 2), (5, 2)])
def test_every_file_is_copied_to_other_nodes_and_ranks_share_the_work(count: int, holders: int) -> None:
    nodes = [[0, 3], [1, 4], [2, 5]]  # as ranks may be spread over nodes
    records, manifest = records_of(nodes), manifest_of(6)
    copied: dict[int, list[int]] = {rank: [] for rank in range(6)}
    for rank in range(6):
        task = copy_task_of(rank, records, manifest, count)
        assert len(task.files) == holders, "two ranks a node, two files of each node before it"
        for file, origin in task.files:
            assert origin.rank == file.rank
            copied[file.rank].append(next(n for n, ranks in enumerate(nodes) if rank in ranks))
        own = next(ranks for ranks in nodes if rank in ranks)
        assert task.own_bytes == sum(10 + one for one in own) and task.is_first == (rank == own[0])
    for rank, where in copied.items():
        own_node = next(n for n, ranks in enumerate(nodes) if rank in ranks)
        assert len(set(where)) == holders and own_node not in where


@pytest.mark.parametrize(("nodes", "count"), [(2, 1), (8, 1), (9, 1), (9, 2), (4, 3), (4, 9)])
def test_copies_are_far_apart_in_the_order_of_nodes(nodes: int, count: int) -> None:
    records, manifest = records_of([[rank] for rank in range(nodes)]), manifest_of(nodes)
    holders: dict[int, set[int]] = {rank: {rank} for rank in range(nodes)}
    for rank in range(nodes):
        for file, _ in copy_task_of(rank, records, manifest, count).files:
            holders[file.rank].add(rank)
    rack = nodes // (min(count, nodes - 1) + 1)  # of neighbours that may be lost at once
    for begin in range(nodes):
        lost = {(begin + n) % nodes for n in range(rack)}
        assert all(where - lost for where in holders.values())
    assert all(len(where) == min(count, nodes - 1) + 1 for where in holders.values())


def test_a_node_whose_files_are_not_near_is_left_out_of_the_ring() -> None:
    records = records_of([[0], [1], [2]], near=lambda rank: rank != 1)
    task = copy_task_of(2, records, manifest_of(3), 1)
    assert [file.rank for file, _ in task.files] == [0] and task.nodes == 2
    assert [file.rank for file, _ in copy_task_of(0, records, manifest_of(3), 1).files] == [2]


def test_one_node_alone_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    near = str(tmp_path / "near")
    nodes = copying(tmp_path, {"near": near}, {"near": near})
    for iteration in (1, 2):
        assert nodes.save(iteration).outcome is Outcome.PUBLISHED
    nodes.close()
    nodes.check(2)
    assert (
        len([one for one in caplog.records if "all files in near tiers are of one node" in one.message]) == 1
    )


def test_nodes_are_recorded_with_the_ranks_whose_files_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter(["gpu-17.cluster", "gpu-18.cluster"])
    monkeypatch.setattr(socket, "gethostname", lambda: next(names))
    nodes = Nodes(tmp_path)
    nodes.save(1)
    nodes.close()
    for node in (0, 1):
        found = nodes_in(nodes.near(node, 1))
        assert found is not None and found.own == node
        assert [(one.name, one.ranks) for one in found.nodes] == [("gpu-17", [0]), ("gpu-18", [1])]


# -- lost nodes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_costs_no_checkpoint(lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = copying(tmp_path, faults=NEVER_FAR)
    nodes.save(3)
    abandon(nodes)
    shutil.rmtree(nodes.roots[lost])
    nodes.roots[lost].mkdir()  # of the node in its place
    iteration, said = Cluster(monkeypatch, nodes.roots).recover(nodes.run)
    assert iteration == 3
    assert "2 files were missing, 1 of them taken from copies on other nodes" in said
    nodes.check(3)


def test_with_all_nodes_lost_the_checkpoint_in_save_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = copying(tmp_path, drain_every=2, near_keep=9)
    for iteration in (1, 2, 3):
        nodes.save(iteration)
    for saver in nodes.ranks.savers:
        assert saver.near is not None
        while saver.near.drain._to_copy or saver.near.drain._queue.saves:
            pass
    abandon(nodes)
    (nodes.run / TRACKER_NAME).write_text("2")
    for root in nodes.roots:
        shutil.rmtree(root)
    assert Cluster(monkeypatch, nodes.roots).recover(nodes.run) == (None, "")
    nodes.check(2)


def test_a_damaged_copy_is_refused_and_an_older_checkpoint_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = copying(tmp_path, faults=NEVER_FAR, near_keep=2)
    nodes.save(2)
    nodes.save(3)
    abandon(nodes)
    shutil.rmtree(nodes.roots[0])
    nodes.roots[0].mkdir()
    (copy,) = nodes.near(1, 3).glob("data-00000-*")
    flip(copy, 50_000)
    iteration, said = Cluster(monkeypatch, nodes.roots).recover(nodes.run)
    assert iteration == 2 and not nodes.is_far(3)
    assert "iteration 3" in said and "checksum" in said and "iteration 2 is newer" in said
    nodes.check(2)


@pytest.mark.parametrize("which", ["original", "copy"])
def test_of_two_the_one_that_is_not_damaged_is_taken(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = copying(tmp_path, faults=NEVER_FAR)
    nodes.save(3)
    abandon(nodes)
    (path,) = nodes.near(0 if which == "original" else 1, 3).glob("data-00000-*")
    flip(path, 1_500_000)
    iteration, said = Cluster(monkeypatch, nodes.roots).recover(nodes.run)
    assert iteration == 3
    assert ("1 of them taken from copies" in said) == (which == "original")
    nodes.check(3)


def test_left_overs_of_another_job_are_no_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = copying(tmp_path, faults=NEVER_FAR)
    for saver in other.ranks.savers:
        saver.session._run_id = 5
    other.save(3)
    abandon(other)
    left = {path.name: path.read_bytes() for path in data_files(other.near(1, 3))}
    for root in other.roots:
        shutil.rmtree(root)
    nodes = copying(tmp_path, faults=NEVER_FAR)
    nodes.save(3)
    abandon(nodes)
    shutil.rmtree(nodes.roots[0])
    nodes.roots[0].mkdir()
    (copy,) = nodes.near(1, 3).glob("data-00000-*")
    copy.write_bytes(next(data for name, data in left.items() if name.startswith("data-00000")))
    for name, data in left.items():
        (nodes.near(1, 3) / name).write_bytes(data)
    iteration, said = Cluster(monkeypatch, nodes.roots).recover(nodes.run)
    assert iteration is None and f"no near tier has {copy.name}" in said


# -- trouble ---------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_PAUSE_SECONDS", 0.0)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("operation", ["replica read", "replica sync", "replica rename"])
def test_what_cannot_be_copied_fails_no_save_and_is_said_once(
    operation: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = copying(tmp_path, {"faults": f"{operation}:0:EIO"}, {})
    for iteration in (1, 2):
        assert nodes.save(iteration).outcome is Outcome.PUBLISHED
    assert ranks_of_files(nodes.near(0, 2)) == [0] and ranks_of_files(nodes.near(1, 2)) == [0, 1]
    assert not list(nodes.near(0, 2).glob(".datastates-*"))
    nodes.close()
    nodes.check(2)
    (said,) = [one.message for one in caplog.records if "no copies are made" in one.message]
    assert "data-00001-" in said and "(rank 1)" in said


@pytest.mark.usefixtures("quick")
def test_a_failure_of_a_moment_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes = copying(tmp_path, {"faults": "replica rename:1:EIO"}, {"faults": "replica read:1:EIO"})
    nodes.save(1)
    assert all(ranks_of_files(nodes.near(node, 1)) == [0, 1] for node in (0, 1))
    nodes.close()
    assert "no copies are made" not in caplog.text


def test_a_full_tier_gets_no_copies_and_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = copying(tmp_path)
    free = replicas.free_bytes
    monkeypatch.setattr(
        replicas, "free_bytes", lambda path: 65 * MIB if nodes.roots[1] in path.parents else free(path)
    )
    for iteration in (1, 2):
        assert nodes.save(iteration).outcome is Outcome.PUBLISHED
    assert ranks_of_files(nodes.near(1, 2)) == [1] and ranks_of_files(nodes.near(0, 2)) == [0, 1]
    nodes.close()
    assert len([one for one in caplog.records if "MiB are needed" in one.message]) == 1


def before_copies(monkeypatch: pytest.MonkeyPatch, target: Path, change: Callable[[], None]) -> None:
    """Has `change` called before files of other nodes are copied into a folder."""
    fetch = Replicas.fetch

    def fetch_later(self: Replicas, task: Any, folder: Path, *rest: Any) -> None:
        if folder == target:
            change()
        fetch(self, task, folder, *rest)

    monkeypatch.setattr(Replicas, "fetch", fetch_later)


@pytest.mark.usefixtures("quick")
def test_a_file_that_is_damaged_on_its_node_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = copying(tmp_path)

    def damage() -> None:
        (path,) = nodes.near(0, 1).glob("data-00000-*")
        flip(path, 70_000)

    before_copies(monkeypatch, nodes.near(1, 1), damage)
    assert nodes.save(1).outcome is Outcome.PUBLISHED
    assert ranks_of_files(nodes.near(1, 1)) == [1]
    assert "the checksum of block 0" in caplog.text
    abandon(nodes)


def test_a_whole_file_of_another_save_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = copying(tmp_path)
    nodes.save(1)
    (other,) = nodes.near(0, 1).glob("data-00000-*")
    content = other.read_bytes()

    def replace() -> None:
        (path,) = nodes.near(0, 2).glob("data-00000-*")
        path.write_bytes(content)

    before_copies(monkeypatch, nodes.near(1, 2), replace)
    assert nodes.save(2).outcome is Outcome.PUBLISHED
    assert ranks_of_files(nodes.near(1, 2)) == [1]
    assert "belongs to save 0123456789abcdef-1, rank 0" in caplog.text
    abandon(nodes)


@pytest.mark.parametrize(
    ("free", "occupied", "has_room"),
    [(100, 0, True), (99, 0, False), (100, 10, True), (60, 50, True), (59, 50, False), (100, 5, True)],
)
def test_copies_that_are_there_need_no_more_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, occupied: int, has_room: bool
) -> None:
    monkeypatch.setattr(replicas, "free_bytes", lambda folder: replicas.SPARE_BYTES + free)
    monkeypatch.setattr(replicas, "occupied_bytes", lambda folder, save_id: occupied)
    task = CopyTask([], own_bytes=10, node_bytes=100, nodes=2, is_first=True)
    made = Replicas(OPTIONS, Faults(""))
    lack = made._lack_of_room(task, tmp_path, SaveId(1, 1))
    assert not lack if has_room else "MiB are free" in lack


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("how", ["silent", "gone"])
def test_a_node_that_does_not_answer_holds_nobody_for_ever(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serving, "TIMEOUT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listening:  # accepts, and says nothing
        port = listening.getsockname()[1]
        if how == "gone":
            listening.close()
        encode = Endpoint.encode
        monkeypatch.setattr(
            Endpoint, "encode", lambda endpoint: encode(dataclasses.replace(endpoint, port=port))
        )
        nodes = copying(tmp_path)
        assert nodes.save(1).outcome is Outcome.PUBLISHED
        nodes.close()
        if how == "silent":
            listening.setblocking(False)
            asked = [listening.accept() for _ in range(2)]  # by each of the two nodes, and only once
            with pytest.raises(BlockingIOError):
                listening.accept()
            for connection, _ in asked:
                connection.close()
    nodes.check(1)
    assert f"port {port}" in caplog.text


def test_copies_are_given_up_when_the_save_fails(tmp_path: Path) -> None:
    nodes = copying(tmp_path, {"faults": "rename manifest:1:EIO"}, {"faults": "replica read:0:stall=300"})
    failed = nodes.save(1)
    assert failed.outcome is Outcome.FAILED
    assert nodes.save(2).outcome is Outcome.PUBLISHED
    nodes.close()
    nodes.check(2)


def test_a_save_that_begins_before_the_last_ones_copies_are_made(tmp_path: Path) -> None:
    nodes = copying(tmp_path, {"faults": "replica read:1:stall=700"}, {})
    under_way = [started(nodes, iteration) for iteration in (1, 2)]
    while any(one.outcome is Outcome.PENDING for save in under_way for one in save):
        for save in under_way:
            for publication in reversed(save):
                publication.poll()
    assert all(one.outcome is Outcome.PUBLISHED for save in under_way for one in save)
    for node in (0, 1):
        assert ranks_of_files(nodes.near(node, 2)) == [0, 1]
    nodes.close()
    nodes.check(2)


def save_and_be_killed(root: str) -> None:
    copying(Path(root), {"faults": f"replica rename:1:kill,{NEVER_FAR}"}, {"faults": NEVER_FAR}).save(3)


def started(nodes: Nodes, iteration: int) -> list[Publication]:
    ranks = nodes.ranks
    pairs = zip(ranks.savers, states_of(iteration), strict=True)
    directory = nodes.directory(iteration)
    return [saver.start(directory, state, far_published=ranks.note_far) for saver, state in pairs]


def test_of_saves_that_end_in_another_order_the_later_one_is_kept(tmp_path: Path) -> None:
    nodes = copying(tmp_path)
    first, second = (started(nodes, iteration) for iteration in (1, 2))
    for save in (second, first):
        while any(one.outcome is Outcome.PENDING for one in save):
            for publication in reversed(save):
                publication.poll()
    nodes.close()
    assert nodes.kept(0) == nodes.kept(1) == ["iter_0000002"]


def test_a_kill_in_the_middle_of_copying_leaves_the_save_to_the_next_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: Programs
) -> None:
    code = "import sys; from tests.unit import test_near_replicas as t; t.save_and_be_killed(sys.argv[1])"
    assert programs.run(["-c", code, tmp_path]).returncode == -signal.SIGKILL
    nodes = copying(tmp_path)
    assert list(nodes.near(0, 3).glob(".datastates-data-00001-*")), "killed before the rename"
    assert manifest_in(nodes.near(0, 3)) is not None
    iteration, said = Cluster(monkeypatch, nodes.roots).recover(nodes.run)
    assert iteration == 3, said
    nodes.check(3)


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, "rank 1: cannot find out what to resume from"), (1, "could not be copied to .*: rank 1: ")],
    ids=["of the look", "of the copy"],
)
def test_a_rank_whose_thread_is_lost_fails_the_recovery_on_all_ranks(
    number: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would wait for what it has seen, or copied."""
    nodes = copying(tmp_path, faults=NEVER_FAR)
    nodes.save(3)
    abandon(nodes)
    cluster, counts, start = Cluster(monkeypatch, nodes.roots), itertools.count(), BackgroundThread.start

    def lose(thread: BackgroundThread) -> None:
        if getattr(cluster._rank, "value", 0) == 1 and next(counts) == number:
            thread._run = id  # type: ignore[assignment, method-assign]  # takes the arguments, and returns
        start(thread)

    monkeypatch.setattr(BackgroundThread, "start", lose)
    errors = [rank.exception() for rank in cluster.ranks(nodes.run, print)]
    assert [type(error) for error in errors] == [StorageError] * 2
    assert all(re.search(expected + ".*the thread that looks for a newer", str(error)) for error in errors)


def test_a_rank_that_can_start_no_thread_recovers_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = copying(tmp_path, faults=NEVER_FAR)
    nodes.save(3)
    abandon(nodes)
    cluster, start = Cluster(monkeypatch, nodes.roots), BackgroundThread.start

    def deny(thread: BackgroundThread) -> None:
        if getattr(cluster._rank, "value", 0) == 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(BackgroundThread, "start", deny)
    assert cluster.recover(nodes.run)[0] == 3


# -- serving ---------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Server, Path, SaveId]]:
    folder, save_id = tmp_path / "iter_0000001", SaveId(5, 1)
    folder.mkdir()
    (folder / save_id.data_file_name(0)).write_bytes(bytes(range(256)) * 1000)
    (folder / MANIFEST_NAME).write_bytes(b"not to be had")
    server = Server()
    server.offer(save_id, folder)
    yield server, folder, save_id
    server.close()


def test_a_file_is_downloaded_in_pieces(served: tuple[Server, Path, SaveId]) -> None:
    server, folder, save_id = served
    name, buffer, found = save_id.data_file_name(0), bytearray(100_000), bytearray()
    endpoint = Endpoint.decode(server.endpoint.encode())
    assert endpoint == server.endpoint and endpoint.host == "127.0.0.1"
    assert len(endpoint.encode()) == ENDPOINT_BYTES and Endpoint.decode(bytes(ENDPOINT_BYTES)) is None
    for count in download(endpoint, save_id, name, 256_000, memoryview(buffer)):
        found += buffer[:count]
    assert found == (folder / name).read_bytes()
    with pytest.raises(OSError, match="expected 9 bytes"):
        next(download(endpoint, save_id, name, 9, memoryview(buffer)))
    server.withdraw(save_id)
    with pytest.raises(OSError, match="404"):
        next(download(endpoint, save_id, name, 256_000, memoryview(buffer)))


def test_a_serving_thread_that_has_died_is_replaced_for_the_next_save(
    served: tuple[Server, Path, SaveId], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, folder, save_id = served

    def die(self: Any) -> Any:
        raise MemoryError

    own, name = Replicas(OPTIONS, Faults("")), save_id.data_file_name(0)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda unraisable: None)
        patch.setattr(serving._HttpServer, "get_request", die)
        own.offer(save_id, folder)
        assert own._server is not None
        assert own._server._thread.join(60)
    endpoint = Endpoint.decode(own.offer(save_id, folder))
    assert endpoint is not None
    assert sum(download(endpoint, save_id, name, 256_000, memoryview(bytearray(100_000)))) == 256_000
    assert "the thread that serves this rank's files to other nodes has ended" in caplog.text
    own.offer(save_id, folder)
    assert len(caplog.records) == 1
    own.close()


def test_a_download_is_given_up_once_its_save_is_over(
    served: tuple[Server, Path, SaveId], tmp_path: Path
) -> None:
    server, folder, save_id = served
    file: Any = SimpleNamespace(name=save_id.data_file_name(0), bytes=256_000)
    manifest: Any = SimpleNamespace(save_id=save_id, file_save_id=lambda _: save_id)
    copy = tmp_path / file.name
    with pytest.raises(DataStatesError, match="given up: the save is over"):
        Replicas(OPTIONS, Faults(""))._fetch(server.endpoint, copy, manifest, file, lambda: True)
    assert list(tmp_path.iterdir()) == [folder]


def test_a_node_that_does_not_answer_is_not_asked_for_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def copy(self: Replicas, file: FileEntry, *rest: Any) -> int:
        asked.append(file)
        raise TimeoutError("timed out")

    monkeypatch.setattr(Replicas, "_copy", copy)
    monkeypatch.setattr(Replicas, "_lack_of_room", lambda *_: "")
    origin: Any = SimpleNamespace(host_name="node", rank=1)
    files = [(FileEntry(SaveId(5, 1).data_file_name(1, group), 1, 9, 9, 9), origin) for group in (0, 1)]
    manifest: Any = SimpleNamespace(save_id=SaveId(5, 1))
    copied = Replicas(OPTIONS, Faults("")).fetch(
        CopyTask(files, own_bytes=9, node_bytes=18, nodes=2, is_first=True), tmp_path, manifest, lambda: False
    )
    assert len(asked) == 1 and "timed out" in copied.error


def test_a_file_that_ends_early_is_an_error() -> None:
    """As when the rank that serves it is killed."""

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")

    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as thread:
        serving_one = thread.submit(serve)
        address = b"\0" * 10 + b"\xff\xff" + bytes((127, 0, 0, 1))
        endpoint = Endpoint(address, listening.getsockname()[1], bytes(16))
        with pytest.raises(OSError, match="ended after 4 of 9 bytes"):
            list(download(endpoint, SaveId(5, 1), "data", 9, memoryview(bytearray(9))))
        serving_one.result()


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/{save}/{data}", None, 200),
        ("/{save}/{data}", "", 403),
        ("/{save}/{data}", "Bearer " + "0" * 32, 403),
        ("/{save}/" + MANIFEST_NAME, None, 404),
        ("/{save}/../iter_0000001/{data}", None, 404),
        ("/{save}/%2e%2e", None, 404),
        ("/other/{data}", None, 404),
        ("/{data}", None, 404),
        ("/", None, 404),
    ],
)
def test_nothing_else_is_served(
    path: str, key: str | None, status: int, served: tuple[Server, Path, SaveId]
) -> None:
    server, _, save_id = served
    connection = http.client.HTTPConnection("127.0.0.1", server.endpoint.port, timeout=10)
    authorization = f"Bearer {server.endpoint.key.hex()}" if key is None else key
    target = path.format(save=save_id, data=save_id.data_file_name(0))
    connection.request("GET", target, headers={"Authorization": authorization})
    response = connection.getresponse()
    assert response.status == status
    response.read()
    connection.close()


def test_a_rank_that_cannot_serve_says_so_once_and_its_save_is_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    nodes = copying(tmp_path)
    monkeypatch.setattr(replicas, "_PAUSE_SECONDS", 0.0)
    for iteration in (1, 2):
        assert nodes.save(iteration).outcome is Outcome.PUBLISHED
    nodes.close()
    nodes.check(2)
    assert len([one for one in caplog.records if "no copies are made" in one.message]) == 2, (
        "one of each rank"
    )


# -- datastates ls ---------------------------------------------------------------------------------------


def test_ls_shows_on_which_nodes_each_iteration_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = iter(["gpu-17.cluster", "gpu-18.cluster"] * 2)
    monkeypatch.setattr(replicas.socket, "gethostname", lambda: next(names))
    nodes = copying(tmp_path, drain_every=2, near_keep=2)
    nodes.save(1)
    nodes.save(2)
    nodes.close()
    (copy,) = nodes.near(1, 1).glob("data-00000-*")
    copy.unlink()
    code, out, _ = run("ls", nodes.run, "--near", nodes.roots[1])
    assert code == 0
    assert "iteration 1: 1 data file; written on gpu-18, here, and on gpu-17; not in the directory" in out
    assert (
        "iteration 2: 2 data files, with copies: 1 of gpu-17; written on gpu-18, here, and on gpu-17\n" in out
    )
    rows = json.loads(run("ls", nodes.run, "--near", nodes.roots[1], "--json")[1])
    assert next(row for row in rows if row["iteration"] == 2).items() >= {
        "near_files": 2, "near_copies": 1, "near_nodes": ["gpu-18", "gpu-17"]
    }.items()  # fmt: skip
    assert [(row["iteration"], row["state"], row["near_files"]) for row in rows] == [
        (1, "unfinished", 1), (2, "complete", 2)
    ]  # fmt: skip
    assert rows[0]["problem"] == "in the near tier, and not in the directory of the run yet"
    assert run("ls", nodes.run, "--near", "") == run("ls", nodes.run)
    (tmp_path / "empty").mkdir()
    code, out, _ = run("ls", nodes.run, "--near", tmp_path / "empty")
    assert code == 0 and f"{tmp_path / 'empty'} has nothing of this run" in out.replace("\n    ", " ")
    code, out, err = run("ls", nodes.run, "--near", tmp_path / "typo")
    assert (code, out) == (2, "") and f"--near {tmp_path / 'typo'}: there is no such directory" in err
    monkeypatch.setenv("NODE", "")
    code, out, err = run("ls", nodes.run, "--near", "$NODE")
    assert (code, out) == (2, "") and "$NODE (--datastates-near) is an empty path" in err


def test_left_overs_are_no_copies_and_nodes_may_have_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = manifest_of(3)
    for name in [*(file.name for file in manifest.files[:2]), SaveId(9, 1).data_file_name(2)]:
        (tmp_path / name).write_text("")
    nodes = NearNodes(1, [NodeEntry(name, [rank]) for rank, name in enumerate("aba")])
    monkeypatch.setattr(listing, "manifest_in", lambda folder: manifest)
    monkeypatch.setattr(listing, "nodes_in", lambda folder: nodes)
    assert listing._look(tmp_path) == listing.NearCheckpoint(2, {"a": 1}, "b", ["a", "a"])
