"""What a near tier loses in a moment of trouble, or in part, costs no more than that."""

from __future__ import annotations

import dataclasses
import errno
import functools
import gc
import itertools
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_datastates.engine.faults import Faults
from megatron_datastates.errors import DataStatesError, StorageError
from megatron_datastates.format.directory import METADATA_NAME, TRACKER_NAME
from megatron_datastates.format.footer import Footer
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.pipeline.near import copying, listing, tier
from megatron_datastates.pipeline.near.copying import Copier, Limit
from megatron_datastates.pipeline.near.drain import Drain
from megatron_datastates.pipeline.near.holdings import small_files_of
from megatron_datastates.pipeline.near.listing import near_iterations
from megatron_datastates.pipeline.near.places import manifest_in, near_run, published_in
from megatron_datastates.pipeline.near.publishing import NearPublishing
from megatron_datastates.pipeline.near.recovery import recover_newest
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.publishing.documents import PublicationExtras
from megatron_datastates.pipeline.runs.branches import origin_in
from tests.support.waiting import eventually
from tests.unit import ranks_in_turn
from tests.unit.command import run
from tests.unit.states import OPTIONS, data_files, flip, new_saver
from tests.unit.test_near_replicas import NEVER_FAR, Cluster
from tests.unit.test_near_tier import Nodes, abandon, killed, recover, states_of
from tests.unit.test_near_tier_trouble import next_job

# -- what cannot be read for a moment ----------------------------------------------------------------------


def half_far(tmp_path: Path) -> Nodes:
    """Returns nodes with iteration 1 in --save, and of iteration 2 only what node 1 has written."""
    nodes = Nodes(tmp_path)
    nodes.save(1)
    nodes.close()
    (nodes.run / TRACKER_NAME).write_text("1")
    again = next_job(tmp_path)
    copies = [saver.near.drain._copier for saver in again.ranks.savers if saver.near is not None]
    copies[0]._faults = Faults(NEVER_FAR)
    again.save(2, origin_in(again.directory(1), 1))
    eventually(lambda: bool(data_files(again.directory(2))))
    abandon(again)
    return again


def unreadable(monkeypatch: pytest.MonkeyPatch, folder: Path, code: int = errno.EIO) -> None:
    """Makes a data file unreadable for a moment."""
    read = copying.read_footer

    def flaky(path: Path, size: int) -> Footer:
        if path.is_relative_to(folder) and path.name.startswith("data-00001"):
            raise StorageError(f"{path} cannot be read: an error of a moment", code=code, path=str(path))
        return read(path, size)

    monkeypatch.setattr(copying, "read_footer", flaky)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EMFILE])
def test_what_cannot_be_read_in_save_for_a_moment_lets_nothing_older_be_resumed_from(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = half_far(tmp_path)
    shutil.rmtree(nodes.roots[1])  # node 1 was replaced: its file is in --save alone
    nodes.roots[1].mkdir()
    with monkeypatch.context() as patched:
        unreadable(patched, nodes.run, code)
        with pytest.raises(StorageError, match=r"could not be copied to .*: rank 0: .* an error of a moment"):
            Cluster(monkeypatch, nodes.roots).recover(nodes.run)
    assert Cluster(monkeypatch, nodes.roots).recover(nodes.run)[0] == 2


@pytest.mark.parametrize("fault", ["drain write:1:ENOSPC", "write manifest:1:ENOSPC"])
def test_what_cannot_be_written_to_save_lets_nothing_older_be_loaded(fault: str, tmp_path: Path) -> None:
    nodes = killed(tmp_path)
    options = dataclasses.replace(OPTIONS, near=str(nodes.roots[0]), faults=fault)
    with pytest.raises(StorageError, match=r"could not be copied to .*: rank 0: .*No space left"):
        recover_newest(nodes.run, options)
    assert recover(nodes)[0] == 3


def test_what_cannot_be_read_in_save_is_taken_from_a_near_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = half_far(tmp_path)
    unreadable(monkeypatch, nodes.run)
    assert Cluster(monkeypatch, nodes.roots).recover(nodes.run)[0] == 2


def test_what_cannot_be_read_near_when_it_is_looked_for_may_be_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = killed(tmp_path)
    unreadable(monkeypatch, nodes.roots[0])
    assert recover(nodes)[0] == 3
    nodes.check(3)


# -- small files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["bit", "zeros", "empty", "list"])
def test_a_damaged_metadata_json_is_not_published(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = b'{"sharded_backend": "datastates", "sharded_backend_version": 1}'
    extras = functools.partial(ranks_in_turn.PublicationExtras, metadata=whole)
    monkeypatch.setattr(ranks_in_turn, "PublicationExtras", extras)
    nodes = killed(tmp_path)
    path = nodes.near(0, 3) / METADATA_NAME
    assert path.read_bytes() == whole
    path.write_bytes(
        {"bit": whole.replace(b"data", b"eata"), "zeros": bytes(9), "empty": b"", "list": b"[]"}[how]
    )
    assert recover(nodes)[0] == 3
    assert not (nodes.directory(3) / METADATA_NAME).exists()
    assert f"{path} in the near tier is damaged" in caplog.text
    nodes.check(3)


@pytest.mark.parametrize("operation", ["write", "rename", "sync directory of"])
def test_a_failed_second_save_of_an_iteration_does_not_take_the_first_one_with_it(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, {"faults": NEVER_FAR}, {"faults": f"{NEVER_FAR},{operation} manifest:2:EIO"})
    first = nodes.save(3).save.context.save_id
    assert nodes.save(3).outcome is Outcome.FAILED

    def is_back(node: int) -> bool:
        found = manifest_in(nodes.near(node, 3))
        return found is not None and found.save_id == first

    eventually(lambda: is_back(0) and is_back(1))
    abandon(nodes)
    assert Cluster(monkeypatch, nodes.roots).recover(nodes.run)[0] == 3
    nodes.check(3)


def test_a_save_that_another_rank_fails_is_put_back_also_where_this_one_is_still_storing_it(
    tmp_path: Path,
) -> None:
    slow = f"{NEVER_FAR},rename manifest:2:stall=2500"
    fails = f"{NEVER_FAR},write manifest:2:stall=1000,rename manifest:2:EIO"
    nodes = Nodes(tmp_path, {"faults": slow}, {"faults": fails})
    first = nodes.save(3).save.context.save_id
    near = nodes.save(3).publisher.near
    assert near is not None
    eventually(lambda: near.is_in_place)
    eventually(lambda: published_in(nodes.near(0, 3)) == first)
    abandon(nodes)


def test_a_save_that_another_rank_fails_is_not_stored_by_a_rank_that_has_yet_to_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, {"faults": NEVER_FAR}, {"faults": f"{NEVER_FAR},rename manifest:2:EIO"})
    first = nodes.save(3).save.context.save_id
    do_part = NearPublishing.do_part

    def begin_late(publishing: NearPublishing, is_over: Callable[[], bool]) -> None:
        if publishing._context.rank == 0:
            eventually(lambda: publishing.storing.is_withdrawn)
        do_part(publishing, is_over)

    monkeypatch.setattr(NearPublishing, "do_part", begin_late)
    failed = nodes.save(3)
    near = failed.publisher.near
    assert failed.outcome is Outcome.FAILED and near is not None
    assert near.storing.is_withdrawn and near.files == [] and not near.is_in_place
    assert published_in(nodes.near(0, 3)) == first
    abandon(nodes)


@pytest.mark.parametrize("name", ["index-*", "other.pt"])
def test_no_damaged_small_file_is_taken_from_a_near_tier(name: str, tmp_path: Path) -> None:
    (tmp_path / "other.pt").write_bytes(b"what another program has written")
    saver = new_saver()
    extras = PublicationExtras(other_files=("other.pt",))
    assert saver.start(tmp_path, states_of(1)[0], extras=extras).wait() is Outcome.PUBLISHED
    saver.close()
    manifest = manifest_in(tmp_path)
    assert manifest is not None
    small_files_of(tmp_path, manifest)
    (path,) = tmp_path.glob(name)
    for at in range(0, path.stat().st_size, 7):
        flip(path, at)
        with pytest.raises(DataStatesError, match="SHA-256 differs"):
            small_files_of(tmp_path, manifest)
        flip(path, at)


def test_what_is_gone_from_a_near_tier_when_all_are_durable_is_not_published(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    nodes.save(1)
    saves = [
        saver.start(nodes.directory(2), state, far_published=nodes.ranks.note_far)
        for saver, state in zip(nodes.ranks.savers, states_of(2), strict=True)
    ]
    eventually(lambda: all(save.save.is_durable for save in saves))
    data_files(nodes.near(1, 2))[0].unlink()
    while not saves[0].is_over:
        for save in reversed(saves):
            save.poll()
    assert saves[0].outcome is Outcome.FAILED
    assert f"were not found in {nodes.near(1, 2)}: data-00001" in str(saves[0].error)
    assert published_in(nodes.near(1, 2)) is None
    nodes.close()
    nodes.check(1)


def test_a_rank_that_gives_up_keeps_what_it_has_stored_as_the_others_may_publish_it(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, faults=NEVER_FAR)
    saves = [
        saver.start(nodes.directory(1), state, far_published=nodes.ranks.note_far)
        for saver, state in zip(nodes.ranks.savers, states_of(1), strict=True)
    ]
    while not saves[0].publisher.is_done:
        for save in reversed(saves):
            save.poll()
    saves[0].abandon("its poll was interrupted")
    assert saves[0].poll() is Outcome.FAILED
    near = nodes.ranks.savers[0].near
    assert near is not None
    near.drain.note_published(is_far=False)  # a later save: from now on, what has failed goes
    time.sleep(0.5)
    assert published_in(nodes.near(0, 1)) == saves[0].save.context.save_id
    assert len(data_files(nodes.near(0, 1))) == 1
    abandon(nodes)


def test_a_failed_save_keeps_nothing_in_memory_of_what_was_sent(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, *({"faults": f"rename manifest:{save}:EIO"} for save in (2, 1)))
    failed = nodes.save(1)
    publishing = failed.publisher.near
    assert failed.outcome is Outcome.FAILED and publishing is not None and publishing.stores
    near = weakref.ref(publishing)
    del failed, publishing
    assert nodes.save(2).outcome is Outcome.FAILED  # the last one is not forgotten yet
    gc.collect()
    eventually(lambda: near() is None)  # the thread that removed its files may hold it a little longer
    nodes.close()


def test_failed_saves_leave_nothing_on_a_node_whose_saves_all_fail_near(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, {}, {"faults": "sync directory of manifest:0:EIO"})
    for iteration in (1, 2, 3, 4):  # node 1 takes every second one to --save
        expected = Outcome.FAILED if iteration % 2 else Outcome.PUBLISHED
        assert nodes.save(iteration).outcome is expected
    eventually(lambda: nodes.kept(1) == [])
    nodes.close()
    nodes.check(4)


def test_failed_saves_leave_nothing_where_the_others_all_go_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, {}, {"faults": "sync directory of manifest:1:EIO"})
    assert nodes.save(1).outcome is Outcome.FAILED
    assert nodes.kept(0) == nodes.kept(1) == ["iter_0000001"], "until another one is published"
    monkeypatch.setattr(tier, "free_bytes", lambda root: 0)
    assert nodes.save(2).outcome is Outcome.PUBLISHED
    eventually(lambda: nodes.kept(0) == nodes.kept(1) == [])
    nodes.close()


def test_a_kill_while_an_iteration_is_saved_a_second_time_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, {"faults": NEVER_FAR}, {"faults": f"{NEVER_FAR},write manifest:2:EIO"})
    first = nodes.save(3).save.context.save_id
    monkeypatch.setattr(Drain, "note_failed", lambda *arguments: None)  # the kill comes before it
    again = nodes.save(3)
    assert again.outcome is Outcome.FAILED
    abandon(nodes)
    named = [published_in(nodes.near(node, 3)) for node in (0, 1)]
    assert named == [again.save.context.save_id, first]
    assert Cluster(monkeypatch, nodes.roots).recover(nodes.run)[0] == 3
    assert published_in(nodes.directory(3)) in named
    nodes.check(3)


def test_what_a_drain_removes_while_ls_looks_hides_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, near_keep=4, faults=NEVER_FAR)
    for iteration in (1, 2, 3):
        nodes.save(iteration)
    abandon(nodes)
    look = listing.is_published

    def and_then_it_goes(folder: Path) -> bool:
        found = look(folder)
        if folder.name == "iter_0000002":
            shutil.rmtree(folder)
        return found

    monkeypatch.setattr(listing, "is_published", and_then_it_goes)
    assert list(near_iterations(near_run(nodes.roots[0], nodes.run))) == [1, 3]


def test_ls_says_that_a_manifest_cannot_be_read(tmp_path: Path) -> None:
    nodes = killed(tmp_path)
    (nodes.near(0, 3) / MANIFEST_NAME).write_bytes(b"garbage")
    shutil.copytree(nodes.near(0, 3), nodes.near(0, 4), ignore=shutil.ignore_patterns("data-*"))
    code, text, _ = run("ls", str(nodes.run), "--near", str(nodes.roots[0]))
    assert code == 0
    assert "iteration 3: 2 data files, and a manifest that cannot be read" in text
    assert "iteration 4: 0 data files, and a manifest that cannot be read" in text


def test_ls_without_a_tracker_says_what_near_tiers_change(tmp_path: Path) -> None:
    nodes = killed(tmp_path)
    (nodes.run / TRACKER_NAME).unlink(missing_ok=True)
    nodes.directory(3).mkdir(parents=True, exist_ok=True)
    said = f"There is no {TRACKER_NAME}: Megatron would start from random weights"
    assert run("ls", str(nodes.run))[1].endswith(f"{said}\n")
    text = run("ls", str(nodes.run), "--near", str(nodes.roots[0]))[1]
    assert f"{said}, or with --datastates-near from what near tiers have\n" in text


# -- the drain ---------------------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds all copies until it is set."""
    gate, copy = threading.Event(), Copier.copy

    def slow(*arguments: object, **named: object) -> None:
        gate.wait()
        copy(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Copier, "copy", slow)
    return gate


def test_a_copy_that_panics_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients of object stores that are written in Rust panic with a BaseException."""
    copy, calls = Copier.copy, itertools.count()

    def panics_once(*arguments: object, **named: object) -> None:
        if next(calls) == 0:
            raise BaseException("a panic")
        copy(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Copier, "copy", panics_once)
    nodes = Nodes(tmp_path)
    nodes.save(1)
    nodes.close()
    nodes.check(1)


def test_saves_are_evicted_while_one_is_copied(tmp_path: Path, gate: threading.Event) -> None:
    nodes = Nodes(tmp_path, drain_every=3)
    for iteration in (1, 2, 3, 4, 5):
        nodes.save(iteration)
    expected = ["iter_0000003", "iter_0000005"]
    eventually(lambda: nodes.kept(0) == nodes.kept(1) == expected)
    gate.set()
    nodes.close()
    nodes.check(3)


def test_a_failed_second_save_is_put_right_while_one_is_copied(tmp_path: Path, gate: threading.Event) -> None:
    nodes = Nodes(tmp_path, {}, {"faults": "sync directory of manifest:2:EIO"})
    first = nodes.save(3).save.context.save_id
    assert nodes.save(3).outcome is Outcome.FAILED
    eventually(lambda: [published_in(nodes.near(node, 3)) for node in (0, 1)] == [first, first])
    gate.set()
    nodes.close()
    nodes.check(3)


def test_a_limit_of_one_byte_a_second_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    limit, waits = Limit(1), list[float]()
    monkeypatch.setattr(limit._is_lifted, "wait", waits.append)
    limit.take(10**11)
    limit.take(1)
    assert waits == [0.0, threading.TIMEOUT_MAX]
