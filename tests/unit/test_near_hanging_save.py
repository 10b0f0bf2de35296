"""Saves into a near tier while the storage of --save hangs: the trainer does without its answers."""

from __future__ import annotations

import errno
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_datastates.config import Options
from megatron_datastates.format.directory import TRACKER_NAME
from megatron_datastates.mcore.training import checks
from megatron_datastates.pipeline.near import tier
from megatron_datastates.pipeline.near.places import near_run, published_in
from megatron_datastates.pipeline.publication import Outcome
from megatron_datastates.pipeline.saving import background
from megatron_datastates.pipeline.saving.background import Answers
from megatron_datastates.threads import BackgroundThread
from tests.support.waiting import PATIENCE_SECONDS, eventually
from tests.unit.test_near_tier import STALLED, Nodes, abandon, states_of
from tests.unit.test_near_tier_trouble import next_job

LIMIT_SECONDS = 20.0  # for a save whose questions are not answered, on a busy machine
_CALLS = ("open", "stat", "lstat", "listdir", "scandir", "mkdir", "link", "rename", "unlink")


class Storage:
    """Storage that answers none of Python's calls from now on, until it is mended."""

    def __init__(self, root: Path, patched: pytest.MonkeyPatch) -> None:
        self._root, self._answers = f"{root}{os.sep}", threading.Event()
        self.asked: list[str] = []
        for name in _CALLS:
            patched.setattr(os, name, self._hanging(name, getattr(os, name)))

    def _hanging(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def hang(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, str | os.PathLike) and f"{os.fspath(path)}{os.sep}".startswith(self._root):
                if not self._answers.is_set():
                    self.asked.append(name)
                assert self._answers.wait(PATIENCE_SECONDS)
            return call(path, *args, **kwargs)

        return hang

    def mend(self) -> None:
        self._answers.set()


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], Storage]]:
    monkeypatch.setattr(tier, "_PATIENCE_SECONDS", 0.2)
    made = list[Storage]()

    def hang(root: Path) -> Storage:
        made.append(Storage(root, monkeypatch))
        return made[0]

    yield hang
    for storage in made:
        storage.mend()


def timed(save: Callable[[], Any]) -> Any:
    begin = time.monotonic()
    saved = save()
    assert time.monotonic() - begin < LIMIT_SECONDS, "the trainer has waited for --save"
    return saved


def kept(nodes: Nodes, node: int) -> list[str]:
    folder = near_run(nodes.roots[node], nodes.run, follows_links=False)  # --save is not to be asked
    return sorted(path.name for path in folder.glob("iter_*"))


def await_answers(nodes: Nodes) -> None:
    for saver in nodes.ranks.savers:
        assert saver.near is not None and saver.near._storage.is_answered(PATIENCE_SECONDS)


def test_saves_from_the_first_one_on_do_not_wait_for_storage_that_hangs(
    tmp_path: Path, hangs: Callable[[Path], Storage]
) -> None:
    nodes = Nodes(tmp_path, near_keep=3)
    storage = hangs(tmp_path / "far")
    for iteration in (1, 2):
        assert timed(lambda: nodes.save(iteration)).outcome is Outcome.PUBLISHED  # noqa: B023
        assert kept(nodes, 0) == kept(nodes, 1) == [f"iter_{n:07d}" for n in range(1, iteration + 1)]
    assert storage.asked
    storage.mend()
    nodes.close()
    for iteration in (1, 2):
        nodes.check(iteration)


def test_storage_that_answers_too_late_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in every save: it may stay slow, and hang for none of them."""
    waited, answers = list[float | None](), Answers()
    join = BackgroundThread.join

    def noting(thread: BackgroundThread, seconds: float | None = None) -> bool:
        if seconds:  # else it is a look
            waited.append(seconds)
        return seconds != 0.5 and join(thread, seconds)

    monkeypatch.setattr(BackgroundThread, "join", noting)
    monkeypatch.setattr(background, "AFTER_LATE_SECONDS", 30.0)  # on a busy machine

    def ask(seconds: float) -> str:
        try:
            return answers.get(lambda: "an answer", seconds)
        except TimeoutError:
            return "none"
        finally:
            assert answers.is_answered(PATIENCE_SECONDS)

    assert [ask(0.5), ask(40.0), ask(40.0)] == ["none", "an answer", "an answer"]
    assert ask(0.5) == "none" and ask(20.0) == "an answer"
    assert [seconds for seconds in waited if seconds != PATIENCE_SECONDS] == [0.5, 30.0, 40.0, 0.5, 20.0]


def test_a_save_that_a_full_near_tier_does_not_hold_begins_without_an_answer(
    tmp_path: Path, hangs: Callable[[Path], Storage], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path)
    nodes.save(1)
    eventually(lambda: nodes.is_far(1))
    storage = hangs(tmp_path / "far")
    monkeypatch.setattr(tier, "free_bytes", lambda root: 0)
    saves = []
    for saver, state in zip(nodes.ranks.savers, states_of(2), strict=True):
        start = functools.partial(saver.start, nodes.directory(2), state, far_published=nodes.ranks.note_far)
        saves.append(timed(start))
    assert storage.asked
    storage.mend()
    eventually(lambda: [save.poll() for save in reversed(saves)] == [Outcome.PUBLISHED] * 2)
    nodes.close()
    nodes.check(2)


def test_once_storage_answers_again_a_rolled_back_run_saves_to_it(
    tmp_path: Path, hangs: Callable[[Path], Storage]
) -> None:
    nodes = Nodes(tmp_path, near_keep=3)
    nodes.save(1)
    eventually(lambda: nodes.is_far(1))
    (nodes.run / TRACKER_NAME).write_text("9")
    nodes.close()
    again = next_job(tmp_path, near_keep=5)
    storage = hangs(tmp_path / "far")
    assert timed(lambda: again.save(2)).outcome is Outcome.PUBLISHED
    assert kept(again, 0) == ["iter_0000001", "iter_0000002"]
    storage.mend()
    await_answers(again)
    again.save(3)
    assert again.is_far(3) and kept(again, 0) == ["iter_0000001", "iter_0000002"]
    again.close()


def test_a_rolled_back_run_saves_to_save_although_its_tracker_could_not_be_read_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path)
    (nodes.run / TRACKER_NAME).parent.mkdir(parents=True)
    (nodes.run / TRACKER_NAME).write_text("9")
    read, failures = tier.read_tracked, [OSError(errno.ESTALE, "Stale file handle")] * 2  # on each rank

    def stale_at_first(tracker: Path) -> int | None:
        if failures:
            raise failures.pop()
        return read(tracker)

    monkeypatch.setattr(tier, "read_tracked", stale_at_first)
    assert nodes.save(1).outcome is Outcome.PUBLISHED
    assert kept(nodes, 0) == ["iter_0000001"] and not failures
    nodes.save(2)
    assert nodes.is_far(2) and "iter_0000002" not in kept(nodes, 0)
    nodes.close()


def test_links_in_the_path_are_followed_once_storage_answers(
    tmp_path: Path, hangs: Callable[[Path], Storage]
) -> None:
    nodes = Nodes(tmp_path, near_keep=3)
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "link").symlink_to("real")
    (tmp_path / "far" / "real").mkdir()
    nodes.run = tmp_path / "far" / "link"
    storage = hangs(tmp_path / "far")
    timed(lambda: nodes.save(1))
    storage.mend()
    await_answers(nodes)
    nodes.save(2)
    assert published_in(nodes.near(0, 2)) is not None
    nodes.close()
    for iteration in (1, 2):
        nodes.check(iteration)


def test_the_next_job_finds_what_was_saved_while_storage_hung(
    tmp_path: Path, hangs: Callable[[Path], Storage]
) -> None:
    """Also below a link, which a job sees when it starts: later it cannot be followed."""
    (tmp_path / "far" / "real").mkdir(parents=True)
    (tmp_path / "far" / "link").symlink_to("real")
    nodes = Nodes(tmp_path, **STALLED)
    nodes.run = tmp_path / "far" / "link"
    checks.check_near_options(SimpleNamespace(save=str(nodes.run)), Options(near=str(nodes.roots[0])))
    storage = hangs(tmp_path / "far")
    assert timed(lambda: nodes.save(1)).outcome is Outcome.PUBLISHED
    for saver in nodes.ranks.savers:
        assert saver.near is not None
        saver.near.drain._abandoned = True
    storage.mend()
    abandon(nodes)
    assert not nodes.is_far(1)
    assert published_in(nodes.near(0, 1)) == published_in(nodes.near(1, 1)) is not None
