"""Tensors that do not change are written once and then linked, and nothing is linked that did change."""

from __future__ import annotations

import dataclasses
import errno
import functools
import gc
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_datastates as ds
from megatron_datastates.config import MIB
from megatron_datastates.engine.fence import FENCE
from megatron_datastates.engine.native import Output
from megatron_datastates.errors import CHANGED_TOO_EARLY
from megatron_datastates.format.manifest import Manifest
from megatron_datastates.format.values import MANIFEST_NAME, SaveId
from megatron_datastates.pipeline.loading.load import Checkpoint
from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.pipeline.publisher import Publisher
from megatron_datastates.pipeline.publishing import directory_publisher, lateness
from megatron_datastates.pipeline.report import save_report
from megatron_datastates.pipeline.saver import Saver
from megatron_datastates.pipeline.saving import links, postponement, stable
from megatron_datastates.pipeline.saving.links import Link, LinkableFile
from megatron_datastates.pipeline.saving.records import DurableFile
from megatron_datastates.pipeline.saving.stable import StableFile
from megatron_datastates.pipeline.upkeep.verify import verify_checkpoint
from megatron_datastates.providers.base import Mutability, TensorSource
from megatron_datastates.providers.named import NamedState
from megatron_datastates.threads import BackgroundThread
from tests.support.bytecodes import interrupted
from tests.unit.states import OPTIONS, SMALL, Yields, bits, data_files, new_saver, random_tensor

LINKING = {"link_from": MIB}
Tensors = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def hard_links(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips these tests in file systems without hard links (`make test-filesystem`)."""
    first, second = (tmp_path_factory.mktemp("link") / "file" for _ in range(2))
    first.touch()
    try:
        os.link(first, second)
        has_links = first.samefile(second)
    except OSError:
        has_links = False
    if not has_links:
        pytest.skip("this file system has no hard links")


def frozen(seed: int, size: int = 5 * MIB // 2) -> torch.nn.Parameter:
    """Half a block longer than two blocks."""
    return torch.nn.Parameter(random_tensor(torch.uint8, (size,), seed), requires_grad=False)


def state_of(seed: int = 1) -> dict[str, torch.Tensor]:
    return {"base": frozen(seed), "adapter": torch.nn.Parameter(torch.arange(1000.0)), "x": torch.ones(3)}


def start(
    saver: Saver, directory: Path, state: Tensors, mutability: Mutability = Mutability.NOW
) -> Publication:
    return saver.start(directory, NamedState({**state, "step": 7}, mutability))


def save(saver: Saver, directory: Path, state: Tensors, mutability: Mutability = Mutability.NOW) -> Any:
    """Saves and checks all that was stored; returns the report."""
    publication = start(saver, directory, state, mutability)
    assert publication.wait() is Outcome.PUBLISHED, publication.error
    check(directory, state)
    return save_report(publication, "sync")


def check(directory: Path, state: Tensors) -> None:
    checkpoint = Checkpoint.open(directory, OPTIONS)
    assert verify_checkpoint(checkpoint, OPTIONS).faults == []
    for key, tensor in state.items():
        assert bits(checkpoint.read_tensor(key)) == bits(tensor), key
    assert checkpoint.read_object("step") == 7


def stable_file(directory: Path) -> Path:
    (path,) = directory.glob("data-00000.1-*.bin")
    return path


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_what_changes_in_every_save_is_compared_ever_more_rarely(linking: Any, tmp_path: Path) -> None:
    """A comparison reads everything before the trainer may go on, and then everything is written."""
    compared, make = [], Link.make

    def noted(link: Link) -> None:
        compared.append(link.file.path.parent.name)
        make(link)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Link, "make", noted)
        for number in range(25):
            save(linking, tmp_path / f"{number:02}", state_of(seed=number))
        assert [int(name) for name in compared] == [1, 2, 5, 12]  # 2, 6 and 14 are left out
        for number in range(25, 31):  # it is trained no more
            report = save(linking, tmp_path / f"{number:02}", state_of(seed=25))
            assert (report["linked_bytes"] > 0) == (number >= 27)
        assert [int(name) for name in compared[4:]] == [27, 28, 29, 30]


@pytest.fixture
def linking() -> Any:
    saver = new_saver(**LINKING)
    yield saver
    saver.close()


@pytest.mark.parametrize("mutability", list(Mutability), ids=lambda m: m.name)
def test_unchanged_tensors_are_linked_and_changed_ones_written(linking, tmp_path, mutability):
    state, big = state_of(), state_of()["base"].nbytes
    reports = [save(linking, tmp_path / "0", state, mutability)]
    state["adapter"].data += 1
    reports.append(save(linking, tmp_path / "1", state, mutability))
    state["base"].data[-1] ^= 1
    reports.append(save(linking, tmp_path / "2", state, mutability))
    reports.append(save(linking, tmp_path / "3", state, mutability))
    assert [report["linked_bytes"] > big for report in reports] == [False, True, False, True]
    assert [report["written_bytes"] > big for report in reports] == [True, False, True, False]
    assert all(report["bytes"] == report["written_bytes"] + report["linked_bytes"] for report in reports)
    paths = [stable_file(tmp_path / str(number)) for number in range(4)]
    assert paths[0].samefile(paths[1]) and paths[2].samefile(paths[3]) and not paths[1].samefile(paths[2])
    assert [path.stat().st_nlink for path in paths] == [2, 2, 2, 2]


def test_a_save_that_could_not_link_is_freed_without_the_garbage_collector(linking, tmp_path):
    """Megatron's --manual-gc switches it off. The error that is kept had frames that refer to the save."""
    state = state_of()
    save(linking, tmp_path / "0", state)
    shutil.rmtree(tmp_path / "0")
    gc.collect()
    gc.disable()
    try:
        publication = start(linking, tmp_path / "1", state)
        assert publication.wait() is Outcome.PUBLISHED
        publication.join()
        stable = publication.save.stable
        assert stable is not None and stable.link_error is not None
        left = [weakref.ref(one) for one in (stable, *stable._jobs)]
        del publication, stable
        start(linking, tmp_path / "2", {"x": torch.ones(1)}).wait()
        assert [one() for one in left] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("mutability", list(Mutability), ids=lambda m: m.name)
def test_a_save_whose_finishing_thread_cannot_start_links_too(linking, tmp_path, monkeypatch, mutability):
    def refuse(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(BackgroundThread, "start", refuse)
    reports = [save(linking, tmp_path / str(seed), state_of(seed // 2), mutability) for seed in (2, 3, 4)]
    assert [report["linked_bytes"] > 0 for report in reports] == [False, True, False]


def test_the_manifest_says_which_save_wrote_a_linked_file(linking, tmp_path):
    state = state_of()
    for number in range(2):
        save(linking, tmp_path / str(number), state)
    first, second = (
        Manifest.decode((tmp_path / name / MANIFEST_NAME).read_bytes(), name) for name in ("0", "1")
    )
    assert [(file.rank, file.group, file.save_id) for file in second.files] == [
        (0, 0, ""),
        (0, 1, str(first.save_id)),
    ]
    assert first.files[1].save_id == "" and first.files[1].content_sha256 == second.files[1].content_sha256
    assert first.files[0].content_sha256 == ""


BESIDE: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "an object": lambda: {"step": 7},
    "a tensor that may change at once": lambda: {"x": torch.ones(3)},
    "a tensor that never changes": lambda: {"x": torch.ones(1000, dtype=torch.complex64).conj()},
    "a tensor that changes after the fence": lambda: {
        "x": Yields(TensorSource("x", torch.ones(9), Mutability.AT_FENCE))
    },
}


@pytest.mark.parametrize("call", [ds.save, ds.async_save])
@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_a_call_that_holds_the_trainer_does_not_wait_for_its_own_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: Callable[[], dict[str, Any]], call: Any
) -> None:
    """Linking and lazy copies begin after the call, as a rule; here the call itself waits for them."""
    monkeypatch.setattr(postponement, "_HELD_SECONDS", 3600.0)  # such a wait would last
    reports = []
    for number in range(2):
        done = call({"base": frozen(1), **beside()}, tmp_path / str(number), **SMALL, **LINKING)
        reports.append(done if call is ds.save else done.wait())
    assert [report["linked_bytes"] > 0 for report in reports] == [False, True]


def test_removing_the_directory_that_wrote_a_file_harms_no_other(linking, tmp_path):
    state = state_of()
    for number in range(3):
        save(linking, tmp_path / str(number), state)
    shutil.rmtree(tmp_path / "0")
    check(tmp_path / "1", state)
    save(linking, tmp_path / "3", state)
    shutil.rmtree(tmp_path / "1")
    for number in (2, 3):
        check(tmp_path / str(number), state)


def test_a_last_checkpoint_that_was_removed_is_not_missed(linking, tmp_path):
    state = state_of()
    save(linking, tmp_path / "0", state)
    shutil.rmtree(tmp_path / "0")
    assert save(linking, tmp_path / "1", state)["linked_bytes"] == 0
    assert save(linking, tmp_path / "2", state)["linked_bytes"] > 0


@pytest.mark.parametrize("mutability", list(Mutability), ids=lambda m: m.name)
@pytest.mark.parametrize("change", ["other file of the same bytes", "longer", "shorter", "symbolic link"])
def test_a_file_that_is_not_the_one_published_is_not_linked(linking, tmp_path, change, mutability):
    state = state_of()
    save(linking, tmp_path / "0", state, mutability)
    path = stable_file(tmp_path / "0")
    if change == "other file of the same bytes":
        shutil.copy(path, tmp_path / "copy")
        (tmp_path / "copy").replace(path)
    elif change == "symbolic link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        os.truncate(path, path.stat().st_size + (4096 if change == "longer" else -4096))
    assert save(linking, tmp_path / "1", state, mutability)["linked_bytes"] == 0
    assert len(data_files(tmp_path / "1")) == 2
    assert save(linking, tmp_path / "2", state, mutability)["linked_bytes"] > 0


@pytest.mark.parametrize("code", ["EXDEV", "EPERM", "EOPNOTSUPP", "EMLINK", "ENOENT", "EACCES"])
def test_without_a_link_everything_is_written(tmp_path, code, caplog):
    saver = new_saver(**LINKING, faults=f"link:1:{code}")
    state = state_of()
    linked = [save(saver, tmp_path / str(number), state)["linked_bytes"] > 0 for number in range(4)]
    saver.close()
    for_ever = code in ("EXDEV", "EPERM", "EOPNOTSUPP")
    assert linked == [False, False, not for_ever, not for_ever]
    refusals = [record.message for record in caplog.records if "hard link was refused" in record.message]
    assert len(refusals) == for_ever and all(os.strerror(getattr(errno, code)) in one for one in refusals)


def test_another_file_system_is_found_out_and_everything_is_written(linking, tmp_path):
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system at /dev/shm")
    state, elsewhere = state_of(), memory / f"datastates-links-{os.getpid()}"
    try:
        elsewhere.mkdir()
        save(linking, tmp_path / "0", state)
        (tmp_path / "1").symlink_to(elsewhere)
        assert save(linking, tmp_path / "1", state)["linked_bytes"] == 0
    finally:
        shutil.rmtree(elsewhere)


# -- the fence ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thawed", [False, True], ids=["unchanged", "changed"])
@pytest.mark.parametrize("fault", ["", "link:1:ENOENT"], ids=["linked", "no link"])
@pytest.mark.parametrize("paranoid", [False, True], ids=["", "paranoid"])
def test_after_the_fence_tensors_may_change(tmp_path, thawed, fault, paranoid):
    saver = new_saver(**LINKING, faults=fault, copy_limit=20 * MIB, paranoid=paranoid)
    state = state_of()
    save(saver, tmp_path / "0", state, Mutability.AT_FENCE)
    if thawed:
        state["base"].data[MIB] ^= 1
    publication = start(saver, tmp_path / "1", state, Mutability.AT_FENCE)
    kept = {key: tensor.detach().clone() for key, tensor in state.items()}
    FENCE.wait("a test that changes everything")
    for tensor in state.values():
        tensor.data.zero_()
    assert publication.wait() is Outcome.PUBLISHED, publication.error
    check(tmp_path / "1", kept)
    assert (save_report(publication, "sync")["linked_bytes"] > 0) is not (thawed or bool(fault))
    saver.close()


@pytest.mark.parametrize("thawed", [False, True], ids=["unchanged", "changed"])
def test_what_may_change_at_once_is_compared_and_copied_before_the_call_returns(tmp_path, thawed):
    saver = new_saver(**LINKING, copy_limit=20 * MIB, write_limit=20 * MIB)
    state = state_of()
    save(saver, tmp_path / "0", state)
    if thawed:
        state["base"].data[MIB] ^= 1
    kept = {key: tensor.detach().clone() for key, tensor in state.items()}
    publication = start(saver, tmp_path / "1", state)
    for tensor in state.values():
        tensor.data.zero_()
    assert publication.wait() is Outcome.PUBLISHED, publication.error
    check(tmp_path / "1", kept)
    assert (save_report(publication, "sync")["linked_bytes"] > 0) is not thawed
    saver.close()


def test_a_change_before_the_fence_fails_the_save_and_removes_the_link(linking, tmp_path):
    state = state_of()
    save(linking, tmp_path / "0", state)
    publication = start(linking, tmp_path / "1", state, Mutability.AT_FENCE)
    FENCE.witness_mutation("a test")
    assert publication.wait() is Outcome.FAILED
    publication.join()
    assert names(tmp_path / "1") == set()
    check(tmp_path / "0", state)


def test_a_tensor_that_changes_while_it_is_compared_fails_the_save(tmp_path):
    saver = new_saver(**LINKING, lazy_delay=3600.0, paranoid=True)  # the comparison begins at the first poll
    state = state_of()
    save(saver, tmp_path / "0", state)
    publication = start(saver, tmp_path / "1", state, Mutability.AT_FENCE)
    state["base"].data.bitwise_not_()
    assert publication.wait() is Outcome.FAILED
    assert f"'base' {CHANGED_TOO_EARLY}" in publication.error
    saver.close()
    assert names(tmp_path / "1") == set()


def test_a_tensor_that_changes_between_being_compared_and_written_fails_the_save(linking, tmp_path):
    """As a moving average of weights does, if a program updates it in the forward pass."""
    state = state_of()
    save(linking, tmp_path / "0", state)
    state["base"].data.add_(1)
    publication = start(linking, tmp_path / "1", state, Mutability.AT_FENCE)
    compared = publication.save.stable
    compared.allow_lazy_copies()
    assert compared._digesting.wait_hashed(60.0)
    state["base"].data.add_(1)
    FENCE.wait("a step")
    assert publication.wait() is Outcome.FAILED
    assert CHANGED_TOO_EARLY in publication.error
    publication.join()
    assert names(tmp_path / "1") == set()


@pytest.mark.parametrize("slow", ["link", "copies"])
def test_a_fence_waits_no_longer_than_its_deadline(tmp_path, monkeypatch, slow):
    saver, fence_is_over = new_saver(**LINKING, fence_deadline=1.0), threading.Event()
    state = state_of()
    save(saver, tmp_path / "0", state)
    if slow == "link":
        make = Link.make
        monkeypatch.setattr(Link, "make", lambda link: fence_is_over.wait(60) and make(link))
    else:
        limited = new_saver(**LINKING, fence_deadline=1.0, copy_limit=1)
        limited.session.links = saver.session.links
        limited.session._run_id, limited.session._ordinal = saver.session._run_id, 7
        saver.close()
        saver = limited
    publication = start(saver, tmp_path / "1", state, Mutability.AT_FENCE)
    FENCE.wait("a test")
    fence_is_over.set()
    assert publication.wait() is Outcome.FAILED
    assert "waited 1 s for its copies" in publication.error
    saver.close()
    assert names(tmp_path / "1") == set()
    check(tmp_path / "0", state)


def test_memory_is_given_up_only_when_it_is_not_read_again(tmp_path):
    saver = new_saver(**LINKING, lazy_delay=3600.0)  # nothing is read before somebody waits
    state = state_of()
    save(saver, tmp_path / "0", state)
    state["base"].data[0] ^= 1
    kept = {key: tensor.detach().clone() for key, tensor in state.items()}
    publication = start(saver, tmp_path / "1", state, Mutability.AT_FENCE)
    storage = state["base"].untyped_storage()
    assert publication.save.reads(storage._cdata)
    FENCE.wait_until_unread(storage._cdata)
    assert not publication.save.reads(storage._cdata)
    state["base"].data.zero_()
    assert publication.wait() is Outcome.PUBLISHED, publication.error
    check(tmp_path / "1", kept)
    saver.close()


def changed_file(begun: list[Output], meanwhile: Callable[[StableFile], Any]) -> StableFile:
    """Returns a file whose tensors have changed; `meanwhile` is called while it begins to write them."""
    no_link: Any = SimpleNamespace(file=SimpleNamespace(content_sha256=b"another"), make=lambda: None)
    job: dict[str, Any] = {"close_input": lambda: None, "cancel": lambda reason: None}
    job |= {"block_digests": lambda: b"", "wait_hashed": lambda seconds: True}

    def begin(output: Output) -> Any:
        begun.append(output)
        if output is not Output.DIGESTS:
            meanwhile(file)
        return SimpleNamespace(**job, failure=None)

    file = StableFile(SaveId(1, 1), begin, (), no_link)
    file.start()
    file.make_link()
    return file


def test_threads_that_look_at_once_begin_to_write_once():
    begun: list[Output] = []
    file = changed_file(begun, lambda file: time.sleep(0.2))
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: file.settle(60.0), range(4)))
    assert begun == [Output.DIGESTS, Output.FILE_AND_DIGESTS] and file.failure is None


def test_a_save_that_is_cancelled_before_it_decides_begins_no_job():
    """Nobody would end it."""
    begun: list[Output] = []
    file = changed_file(begun, lambda file: None)
    file.cancel("another rank failed")
    assert file.settle(60.0)
    assert begun == [Output.DIGESTS] and "another rank failed" in str(file.failure)


def test_a_signal_handler_that_looks_meanwhile_waits_for_nothing():
    begun: list[Output] = []
    looked: list[bool] = []
    file = changed_file(begun, lambda file: looked.append(file.settle(60.0)))
    assert file.settle(60.0)
    assert looked == [False] and begun == [Output.DIGESTS, Output.FILE_AND_DIGESTS]


@pytest.mark.parametrize("link", [SimpleNamespace(), None], ids=["compared", "written"])
def test_an_interrupt_leaves_no_job_that_nobody_ends(link):
    """What it reads would be freed while it reads."""
    number = 1
    while True:
        begun: list[SimpleNamespace] = []

        def begin(output: Output, begun: list[SimpleNamespace] = begun) -> Any:
            job = SimpleNamespace(close_input=lambda: None, reasons=[])
            job.cancel = job.reasons.append
            begun.append(job)
            return job

        file = StableFile(SaveId(1, 1), functools.partial(begin), (), link)
        was_interrupted = interrupted(file.start, stable.__file__, number)
        file.cancel("the end")
        assert all(job.reasons for job in begun), f"interrupted before bytecode {number}"
        if not was_interrupted:
            break
        number += 1
    assert number > 10 and begun


# -- saves that fail, and saves side by side ------------------------------------------------------------


def test_a_link_is_durable_before_a_manifest_names_it(
    linking: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, second = state_of(), tmp_path / "run" / "second"
    save(linking, tmp_path / "run" / "first", state)
    steps, sync, replace = list[tuple[str, Path]](), links.sync_directory, os.replace

    def synced(directory: Path) -> None:
        assert stable_file(second).exists()
        steps.append(("sync", directory))
        sync(directory)

    def renamed(source: Path, target: Path) -> None:
        steps.append(("rename", target))
        replace(source, target)

    monkeypatch.setattr(links, "sync_directory", synced)
    monkeypatch.setattr(os, "replace", renamed)
    save(linking, second, state)
    assert ("sync", second) in steps[: steps.index(("rename", second / MANIFEST_NAME))]
    check(second, state)


@pytest.mark.parametrize("fault", ["sync link:1:EIO", "write index:2:EIO", "write manifest:2:EIO"])
def test_a_failed_save_removes_its_own_link_only(tmp_path, fault):
    saver = new_saver(**LINKING, faults=fault)
    state = state_of()
    save(saver, tmp_path / "0", state)
    publication = start(saver, tmp_path / "1", state)
    assert publication.wait() is Outcome.FAILED
    publication.join()
    assert data_files(tmp_path / "1") == []
    check(tmp_path / "0", state)
    assert save(saver, tmp_path / "2", state)["linked_bytes"] > 0
    saver.close()


def test_a_link_that_cannot_be_removed_ends_no_poll(tmp_path, monkeypatch):
    """An error of one rank alone there would leave the others waiting."""
    saver = new_saver(**LINKING, faults="write manifest:2:EIO")
    state = state_of()
    save(saver, tmp_path / "0", state)
    unlink = Path.unlink

    def refuse(path: Path, *args: Any, **kwargs: Any) -> None:
        if path.parent == tmp_path / "1" and path.name.startswith("data-"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        unlink(path, *args, **kwargs)

    monkeypatch.setattr(Path, "unlink", refuse)
    publication = start(saver, tmp_path / "1", state)
    assert publication.wait() is Outcome.FAILED
    assert "Input/output error" in publication.error
    saver.close()


def test_saving_over_a_checkpoint_keeps_the_file_that_both_need(linking, tmp_path):
    state = state_of()
    save(linking, tmp_path / "0", state)
    before = stable_file(tmp_path / "0").stat()
    for _ in range(2):
        assert save(linking, tmp_path / "0", state)["linked_bytes"] > 0
    after = stable_file(tmp_path / "0").stat()
    assert (after.st_ino, after.st_nlink) == (before.st_ino, 1)
    assert len(data_files(tmp_path / "0")) == 2
    state["base"].data[0] ^= 1
    assert save(linking, tmp_path / "0", state)["linked_bytes"] == 0
    assert len(data_files(tmp_path / "0")) == 2


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
def test_a_save_over_a_checkpoint_that_fails_leaves_it_whole(tmp_path, how):
    saver = new_saver(**LINKING, faults="write manifest:2:EIO" if how == "fails" else "")
    state = state_of()
    save(saver, tmp_path / "0", state)
    publication = start(saver, tmp_path / "0", state)
    if how == "fails":
        assert publication.wait() is Outcome.FAILED
    else:
        publication.abandon("a test")
    publication.join()
    check(tmp_path / "0", state)
    saver.close()


def test_an_abandoned_save_removes_its_link(tmp_path):
    saver = new_saver(**LINKING)
    state = state_of()
    save(saver, tmp_path / "0", state)
    publication = start(saver, tmp_path / "1", state)
    publication.abandon("a test")
    publication.join()
    assert names(tmp_path / "1") == set()
    check(tmp_path / "0", state)
    saver.close()


def test_a_save_that_was_not_published_is_not_linked_to(tmp_path):
    saver = new_saver(**LINKING, faults="write manifest:1:EIO")
    state = state_of()
    assert start(saver, tmp_path / "0", state).wait() is Outcome.FAILED
    assert save(saver, tmp_path / "1", state)["linked_bytes"] == 0
    saver.close()


@pytest.mark.parametrize("same", [False, True], ids=["other directory", "same directory"])
def test_two_saves_under_way_at_once(linking, tmp_path, same):
    state = state_of()
    save(linking, tmp_path / "0", state)
    first = start(linking, tmp_path / "1", state)
    second_path = tmp_path / ("1" if same else "2")
    second = start(linking, second_path, state)
    assert [second.wait(), first.wait()][0] is Outcome.PUBLISHED
    assert (save_report(second, "sync")["linked_bytes"] > 0) is not same
    check(second_path, state)
    if not same:
        assert first.outcome is Outcome.PUBLISHED
        check(tmp_path / "1", state)


def test_beside_a_save_with_other_options_into_the_same_directory_nothing_is_linked(linking, tmp_path):
    """It has a saver of its own, and removes what the manifest before named."""
    state, other = state_of(), new_saver(link=False)
    other.session = linking.session
    save(linking, tmp_path / "0", state)
    first, second = start(other, tmp_path / "0", state), start(linking, tmp_path / "0", state)
    assert [first.wait(), second.wait()] == [Outcome.PUBLISHED] * 2, second.error
    assert save_report(second, "sync")["linked_bytes"] == 0
    check(tmp_path / "0", state)
    other.close()


def test_a_save_that_failed_does_not_remove_what_a_later_one_has_published(tmp_path, monkeypatch):
    """It removes its link once its threads are done with its files, which slow storage may delay."""
    saver, going, remove = new_saver(**LINKING, faults="sync:3:EIO"), threading.Event(), Link.remove
    state = state_of()
    save(saver, tmp_path / "0", state)
    monkeypatch.setattr(Link, "remove", lambda link: going.wait(30) and remove(link))
    failed = start(saver, tmp_path / "1", state)
    assert failed.wait() is Outcome.FAILED
    save(saver, tmp_path / "1", state)
    going.set()
    failed.join()
    check(tmp_path / "1", state)
    assert save(saver, tmp_path / "1", state)["linked_bytes"] > 0
    saver.close()


@pytest.mark.parametrize("saves_later", ["the same saver", "another saver"])
def test_an_interrupted_save_does_not_remove_what_a_later_one_has_published(
    saves_later, tmp_path, monkeypatch
):
    """It was abandoned while it was being published: then it removes nothing before its end is known."""
    saver, state, record_of = new_saver(**LINKING), state_of(), Publisher.record
    save(saver, tmp_path / "0", state)

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(Publisher, "record", record_of)
        raise KeyboardInterrupt

    monkeypatch.setattr(Publisher, "record", interrupt)
    abandoned = start(saver, tmp_path / "1", state)
    with pytest.raises(KeyboardInterrupt):
        while abandoned.poll() is Outcome.PENDING:
            pass
    assert abandoned.join(30)
    other = Saver(dataclasses.replace(saver.options, read_threads=2), saver.session)
    later = start(other if saves_later == "another saver" else saver, tmp_path / "1", state)
    assert later.wait() is Outcome.PUBLISHED
    assert abandoned.wait() is Outcome.FAILED
    check(tmp_path / "1", state)
    other.close()
    saver.close()


def test_a_save_of_an_old_world_leaves_the_links_and_counts_of_the_new_one_alone(tmp_path):
    saver, state = new_saver(**LINKING), state_of()
    for number in range(3):
        save(saver, tmp_path / f"before {number}", state)
    old = start(saver, tmp_path / "old", state)
    while old.publisher._thread is None:
        old.poll()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert old.publisher.join(30)
        save(saver, tmp_path / "1", state)
        assert old.wait() is Outcome.PUBLISHED
        for name in ("2", "3"):
            save(saver, tmp_path / name, state)
            check(tmp_path / name, state)
        assert saver.session._published == (3, tmp_path / "3")
    finally:
        torch.distributed.destroy_process_group()
    check(tmp_path / "old", state)
    saver.close()


def test_another_job_that_publishes_meanwhile_keeps_the_file_that_its_saves_share(
    linking, tmp_path, monkeypatch
):
    """The manifest that was replaced, and the one that replaces ours while we publish, name the same file."""
    latest, first, second = (tmp_path / name for name in ("latest", "first", "second"))
    save(linking, latest, state_of())
    shutil.copytree(latest, first)
    newer = {**state_of(), "x": torch.zeros(3)}
    assert save(linking, latest, newer)["linked_bytes"] > 0
    latest.rename(second)
    first.rename(latest)
    require_published = directory_publisher.require_published

    def publish_meanwhile(*args: Any) -> None:
        require_published(*args)
        shutil.copytree(second, latest, dirs_exist_ok=True)

    monkeypatch.setattr(directory_publisher, "require_published", publish_meanwhile)
    other = new_saver(**LINKING)
    assert start(other, latest, state_of(2)).wait() is Outcome.PUBLISHED
    other.close()
    check(latest, newer)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_removes_no_link_of_its_parent(linking, tmp_path):
    state = state_of()
    save(linking, tmp_path / "0", state)
    publication = start(linking, tmp_path / "1", state)
    while publication.save.state.value != "durable":
        publication.save.advance()
    child = os.fork()
    if child == 0:
        publication.abandon("a child")
        publication.save.stable.remove()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert publication.wait() is Outcome.PUBLISHED
    check(tmp_path / "1", state)


# -- what is linked at all ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"link": False}, {"link_from": 3 * MIB}, {"slot_size": 3 * MIB // 2, "staging_memory": 0}],
    ids=["off", "too few bytes", "slots that cut blocks"],
)
def test_without_the_option_or_below_a_size_there_is_one_file(tmp_path, options):
    saver = new_saver(**{**LINKING, **options})
    for number in range(2):
        assert save(saver, tmp_path / str(number), state_of())["linked_bytes"] == 0
        assert len(data_files(tmp_path / str(number))) == 1
    saver.close()


def test_only_parameters_without_gradients_are_expected_to_stay(tmp_path, linking):
    state = {
        "trained": torch.nn.Parameter(frozen(1).data.float()),
        "plain": torch.ones(3 * MIB),
        "frozen": frozen(2),
        "view": frozen(3)[: 2 * MIB],
    }
    save(linking, tmp_path / "0", state)
    checkpoint = Checkpoint.open(tmp_path / "0", OPTIONS)
    apart = {key for key in checkpoint.tensors if checkpoint.index.tensor(key).files[0] == 1}
    assert apart == {"frozen", "view"}


@pytest.mark.parametrize("mutability", [Mutability.NOW, Mutability.AT_FENCE], ids=lambda m: m.name)
def test_parameters_may_thaw_and_freeze_again(linking, tmp_path, mutability):
    """A file is shared with the last checkpoint that had the same tensors frozen, if none has changed."""
    state = {"turns": frozen(1), "stays": frozen(2), "adapter": torch.nn.Parameter(torch.arange(1000.0))}
    turns = state["turns"] = torch.nn.Parameter(state["turns"].data.view(torch.float32), requires_grad=False)
    kept, paths = [], []
    for number, (trains, changes) in enumerate(
        [(False, False), (True, True), (True, True), (False, False), (False, False), (True, False),
         (False, False), (False, True)]
    ):  # fmt: skip
        turns.requires_grad_(trains)
        FENCE.wait("a step")
        if changes:
            turns.data.view(torch.uint8)[number] += 1
        report = save(linking, tmp_path / str(number), state, mutability)
        linked = [path for path in paths if path.samefile(stable_file(tmp_path / str(number)))]
        assert bool(linked) is (report["linked_bytes"] > 0)
        paths.append(stable_file(tmp_path / str(number)))
        kept.append({key: tensor.detach().clone() for key, tensor in state.items()})
    first_of = [next(i for i, other in enumerate(paths) if other.samefile(path)) for path in paths]
    assert first_of == [0, 1, 1, 3, 3, 1, 3, 7]
    for number, then in enumerate(kept):
        check(tmp_path / str(number), then)


def test_a_state_of_frozen_tensors_alone_is_linked(linking, tmp_path):
    provider = NamedState({"base": frozen(1)})
    for number in range(2):
        publication = linking.start(tmp_path / str(number), provider)
        assert publication.wait() is Outcome.PUBLISHED
    assert save_report(publication, "sync")["linked_bytes"] > 0
    assert verify_checkpoint(Checkpoint.open(tmp_path / "1", OPTIONS), OPTIONS).faults == []


@settings(max_examples=10, deadline=None)
@given(
    steps=st.lists(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3 * MIB - 1))), min_size=2, max_size=5)
)
def test_whatever_changes_is_found_in_every_checkpoint(tmp_path_factory, steps):
    folder, saver = tmp_path_factory.mktemp("run"), new_saver(**LINKING)
    state = {f"t{i}": frozen(i, size) for i, size in enumerate((100, MIB, 3 * MIB, 3 * MIB - 1))}
    kept, is_compared = [], True
    for number, changes in enumerate(steps):
        for tensor, at in changes:
            data = state[f"t{tensor}"].data
            data[at % len(data)] += 1
        report = save(saver, folder / str(number), state)
        kept.append({key: tensor.detach().clone() for key, tensor in state.items()})
        unchanged = number > 0 and not changes
        assert (report["linked_bytes"] > 0) is (unchanged and is_compared)
        is_compared = is_compared and not (number > 1 and changes and steps[number - 1])
    saver.close()
    for number, then in enumerate(kept):
        check(folder / str(number), then)
    shutil.rmtree(folder)


@pytest.mark.parametrize("beside", [True, False])
def test_no_file_is_linked_beside_another_save_to_the_same_directory(tmp_path, beside):
    """Also where both are written to a near tier first, whose folders have other paths."""
    directory, folder = tmp_path / "far" / "iter_0000001", tmp_path / "near" / "iter_0000001"
    saver = new_saver()
    shared = LinkableFile(folder / "data.bin", SaveId(1, 1), DurableFile(1, 1, 1), b"", (1, 1, 1))
    saver.session.links.find = lambda where, digest: shared
    other = directory if beside else tmp_path / "far" / "iter_0000002"
    context = SimpleNamespace(directory=other, folder=folder)
    saver.session.begun = [SimpleNamespace(is_at_work=True, save=SimpleNamespace(context=context))]
    plan = SimpleNamespace(stable=SimpleNamespace(layout=SimpleNamespace(digest=b"digest")))
    link = saver._link(plan, SimpleNamespace(directory=directory, folder=folder))
    saver.close()
    assert (link is None) is beside


def test_a_slow_write_of_what_does_not_change_is_no_storage_that_hangs(tmp_path, monkeypatch, caplog):
    """The other file is whole by then, and all is copied."""
    monkeypatch.setattr(lateness, "LATE_SECONDS", 1.2)
    slow = ",".join(f"write:{n}:stall=200" for n in range(1, 30))
    saver = new_saver(**LINKING, faults=slow, staging_memory=32 * MIB, write_threads=1)
    save(saver, tmp_path / "c", state_of() | {"base": frozen(1, 24 * MIB)})
    saver.close()
    assert "keeps all others waiting" not in caplog.text


def test_a_job_that_saves_again_does_not_lose_what_it_shares_with_what_another_job_has_replaced(
    linking: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory had the file already, so that no link shows that it is needed again."""
    save(linking, tmp_path / "c", state_of(1))
    sync, other = directory_publisher.sync_above, new_saver(**LINKING)
    has_looked, is_published = threading.Event(), threading.Event()

    def after_the_other(directory: Path) -> None:  # between the look at all files and the rename
        if not has_looked.is_set():
            has_looked.set()
            assert is_published.wait(30.0)
        sync(directory)

    monkeypatch.setattr(directory_publisher, "sync_above", after_the_other)
    slow = start(linking, tmp_path / "c", state_of(1))
    while not has_looked.is_set():
        assert slow.poll() is Outcome.PENDING
    save(other, tmp_path / "c", state_of(2))
    is_published.set()
    assert slow.wait() is Outcome.PUBLISHED, slow.error
    check(tmp_path / "c", state_of(1))
    other.close()


def test_a_save_that_awaits_its_copies_notices_that_the_thread_that_links_dies(
    linking: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(linking, tmp_path / "1", state_of())
    thread_start = BackgroundThread.start

    def losing(thread: BackgroundThread) -> None:
        if getattr(getattr(thread._function, "func", None), "__name__", "") == "_finish":
            monkeypatch.setattr(thread, "_run", lambda running: time.sleep(0.2))
        thread_start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(BackgroundThread, "start", losing)
        began = time.monotonic()
        provider = NamedState({**state_of(), "step": 7}, Mutability.AT_FENCE)
        publication = linking.start(tmp_path / "2", provider, await_copies=True)
        assert time.monotonic() - began < OPTIONS.fence_deadline / 2
    assert publication.wait() is Outcome.FAILED and "ended too early" in publication.error
    assert not list((tmp_path / "2").iterdir())
    save(linking, tmp_path / "2", state_of())
