"""Polls and starts that are interrupted in the middle, nested in each other, or made by two threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_datastates as ds
from megatron_datastates.engine import staging
from megatron_datastates.errors import DataStatesError, SaveFailedError
from megatron_datastates.format.values import MANIFEST_NAME
from megatron_datastates.pipeline import publication as publication_module
from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.pipeline.publisher import Publisher
from megatron_datastates.pipeline.publishing import directory_publisher
from megatron_datastates.pipeline.publishing.collectives import Collectives
from megatron_datastates.pipeline.saver import Saver
from megatron_datastates.providers.base import Mutability, StateReader
from megatron_datastates.providers.objects import ObjectSource
from megatron_datastates.providers.streams import StreamSource
from tests.unit.ranks_in_turn import RanksInTurn
from tests.unit.states import State, data_files, new_saver

NESTED = "in the middle of the start or the poll of another one"
LIMIT_SECONDS = 30.0


def state(value: float, rank: int = 0) -> State:
    return State({f"w{rank}": torch.full((300,), value)})


def once(function: Callable[..., Any], act: Callable[[], Any]) -> Callable[..., Any]:
    """Returns a function that calls `act` first, the first time that it is called."""
    left = [act]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if left:
            left.pop()()
        return function(*args, **kwargs)

    return wrapped


def interrupt() -> None:
    raise KeyboardInterrupt


def polled(publication: Publication) -> None:
    with pytest.raises(KeyboardInterrupt):
        while publication.poll() is Outcome.PENDING:
            pass


def assert_saves(saver: Saver, directory: Path) -> None:
    assert saver.start(directory, state(9)).wait() is Outcome.PUBLISHED
    assert ds.load(directory)["w0"].unique().tolist() == [9]


@pytest.mark.parametrize("owner, name", [(Publisher, "record"), (publication_module, "encode_failure")])
def test_an_interrupted_poll_is_no_success(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    """The sums of a poll are used once: acted on again, they would say that all is published."""
    monkeypatch.setattr(owner, name, once(getattr(owner, name), interrupt))
    publication = saver.start(tmp_path / "a", state(1))
    if name == "encode_failure":
        publication.save.fail(OSError("the disk"))
    polled(publication)
    assert publication.wait() is Outcome.FAILED
    assert "was abandoned on rank 0: a poll was interrupted by KeyboardInterrupt" in str(publication.error)
    assert "Nothing was published" in str(publication.error)
    assert not (tmp_path / "a" / MANIFEST_NAME).exists()
    assert publication.join(LIMIT_SECONDS) and not data_files(tmp_path / "a")
    assert_saves(saver, tmp_path / "b")


def test_an_interrupt_while_records_are_exchanged_leaves_later_saves_alone(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Publisher, "start", once(Publisher.start, interrupt))
    first, second = saver.start(tmp_path / "a", state(1)), saver.start(tmp_path / "b", state(2))
    polled(first)
    assert [one.wait() for one in (first, second)] == [Outcome.FAILED] * 2
    assert_saves(saver, tmp_path / "c")


def interrupt_while_it_publishes(monkeypatch: pytest.MonkeyPatch) -> None:
    look = Publisher.look

    def interrupted(publisher: Publisher) -> None:
        if publisher._thread is not None:
            monkeypatch.undo()
            raise KeyboardInterrupt
        look(publisher)

    monkeypatch.setattr(Publisher, "look", interrupted)


def test_what_was_being_published_is_published(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_while_it_publishes(monkeypatch)
    publication = saver.start(tmp_path / "a", state(1))
    polled(publication)
    assert publication.wait() is Outcome.PUBLISHED
    assert ds.load(tmp_path / "a")["w0"].unique().tolist() == [1]
    assert_saves(saver, tmp_path / "b")


def test_an_interrupted_save_that_nobody_polls_again_is_forgotten(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its saver would never be idle, and rank 0 would keep all layouts."""
    monkeypatch.setattr(Publisher, "start", once(Publisher.start, interrupt))
    first = saver.start(tmp_path / "a", state(1))
    polled(first)
    assert first.join(LIMIT_SECONDS)
    last = saver.start(tmp_path / "b", state(2))
    assert first.outcome is Outcome.FAILED and "was interrupted" in str(first.error)
    assert saver._unfinished == [last] and last.wait() is Outcome.PUBLISHED
    assert not any(saver.session.layouts._uses.values())


@pytest.mark.parametrize("point", ["rename manifest", "durable manifest"])
def test_what_was_interrupted_and_then_failed_keeps_its_file_where_a_manifest_names_it(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_while_it_publishes(monkeypatch)
    saver = new_saver(faults=f"{point}:1:EIO")
    publication = saver.start(tmp_path, state(1))
    polled(publication)
    assert publication.wait() is Outcome.FAILED
    saver.close()
    if point == "durable manifest":
        assert ds.load(tmp_path)["w0"].unique().tolist() == [1]
    else:
        assert data_files(tmp_path) == []


def test_an_interrupted_rank_keeps_a_file_that_a_manifest_may_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = RanksInTurn(2)
    saves = [saver.start(tmp_path, state(1, rank)) for rank, saver in enumerate(ranks.savers)]
    monkeypatch.setattr(Publisher, "start", once(Publisher.start, interrupt))
    with pytest.raises(KeyboardInterrupt):
        while True:
            for one in reversed(saves):
                one.poll()
    assert saves[1].wait() is Outcome.FAILED
    assert "`datastates ls` shows whether it was published; its files were kept" in str(saves[1].error)
    assert len(data_files(tmp_path)) == 2
    ranks.close()


def test_a_save_within_a_poll_is_refused_and_harms_nothing(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nested() -> None:
        with pytest.raises(DataStatesError, match=NESTED):
            saver.start(tmp_path / "b", state(2))
        assert publication.poll() is Outcome.PENDING, "a look takes no step"
        with pytest.raises(DataStatesError, match=NESTED):
            publication.wait()

    monkeypatch.setattr(Publisher, "record", once(Publisher.record, nested))
    publication = saver.start(tmp_path / "a", state(1))
    assert publication.wait() is Outcome.PUBLISHED
    assert_saves(saver, tmp_path / "c")


@pytest.mark.parametrize("mutability", [Mutability.NOW, Mutability.NEVER])
def test_a_save_within_the_writer_of_a_stream_is_refused(tmp_path: Path, mutability: Mutability) -> None:
    """Each would wait for the other; what may not change is written on a thread of its own."""

    class Nested:
        def entries(self) -> Iterator[StreamSource]:
            yield StreamSource("s", lambda write: ds.save({"x": torch.ones(1)}, tmp_path / "b"), mutability)

        def restore(self, reader: StateReader) -> None: ...

    with pytest.raises(SaveFailedError, match=NESTED):
        ds.save({"p": Nested()}, tmp_path / "a")
    ds.save({"x": torch.ones(1)}, tmp_path / "c")


def test_a_save_within_a_start_is_refused_and_harms_nothing(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nested() -> None:
        with pytest.raises(DataStatesError, match=NESTED):
            saver.start(tmp_path / "b", state(2))

    monkeypatch.setattr(saver, "_plan", once(saver._plan, nested))
    assert saver.start(tmp_path / "a", state(1)).wait() is Outcome.PUBLISHED


def test_an_interrupt_before_a_save_has_begun_holds_up_no_later_one(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Saver, "_start_save", once(Saver._start_save, interrupt))
        with pytest.raises(KeyboardInterrupt):
            saver.start(tmp_path / "a", state(1))
    later = saver.start(tmp_path / "b", state(2))
    deadline = time.monotonic() + LIMIT_SECONDS
    while later.poll() is Outcome.PENDING and time.monotonic() < deadline:
        time.sleep(0.01)
    assert later.outcome is Outcome.PUBLISHED


def test_an_interrupt_while_a_save_is_made_is_not_replaced_by_another_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interval that holds the trainer ends then, and has a holder: a save that is not complete."""
    monkeypatch.setattr(publication_module, "Lateness", once(publication_module.Lateness, interrupt))
    with pytest.raises(KeyboardInterrupt):
        ds.async_save({"w": torch.ones(3)}, tmp_path / "a")
    assert ds.save({"w": torch.ones(3)}, tmp_path / "b")["state"] == "published"


def test_an_interrupt_right_after_the_start_of_copies_ends_them(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.ones(1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(staging.FileSave, "__init__", once(staging.FileSave.__init__, interrupt))
        with pytest.raises(KeyboardInterrupt):
            saver.start(tmp_path / "a", State({"w0": tensor}))
    time.sleep(0.3)  # in which a job that nobody has ended would make its file
    assert list(tmp_path.glob("a/*")) == []
    open_files = [os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()]
    assert not any(name.startswith(str(tmp_path)) for name in open_files)
    assert_saves(saver, tmp_path / "b")


def test_threads_save_one_after_the_other(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second thread's start waits for the first one's to return."""
    entered, may_go = threading.Event(), threading.Event()

    def slow() -> None:
        entered.set()
        assert may_go.wait(LIMIT_SECONDS)

    monkeypatch.setattr(saver, "_plan", once(saver._plan, slow))
    outcomes: dict[str, Outcome] = {}

    def run(name: str, value: float) -> None:
        outcomes[name] = saver.start(tmp_path / name, state(value)).wait()

    threads = [threading.Thread(target=run, args=args) for args in (("a", 1.0), ("b", 2.0))]
    threads[0].start()
    assert entered.wait(LIMIT_SECONDS)
    threads[1].start()
    threads[1].join(0.2)
    assert threads[1].is_alive() and not (tmp_path / "b").exists()
    may_go.set()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    assert outcomes == {"a": Outcome.PUBLISHED, "b": Outcome.PUBLISHED}
    assert [ds.load(tmp_path / name)["w0"].unique().tolist() for name in "ab"] == [[1], [2]]


def test_a_handle_of_a_world_that_is_gone_says_so(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publication = saver.start(tmp_path / "a", state(1))
    monkeypatch.setattr(Collectives, "is_current", lambda self: False)
    monkeypatch.setattr(publication.collectives, "distributed", True)
    assert publication.wait() is Outcome.FAILED
    assert "torch.distributed was initialized anew, or ended, meanwhile" in str(publication.error)


def test_one_rank_needs_no_world(saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publication = saver.start(tmp_path / "a", state(1))
    monkeypatch.setattr(Collectives, "is_current", lambda self: False)
    assert publication.wait() is Outcome.PUBLISHED


def test_a_poll_waits_for_no_start_of_another_thread(saver: Saver, tmp_path: Path) -> None:
    """Else a state provider that needs a lock of the program's could wait forever."""
    user_lock, entered = threading.Lock(), threading.Event()

    class Locked:
        def entries(self) -> Iterator[ObjectSource]:
            entered.set()
            with user_lock:
                yield ObjectSource("x", 1)

        def restore(self, reader: object) -> None:
            pass

    publication = saver.start(tmp_path / "a", state(1))
    thread = threading.Thread(target=lambda: saver.start(tmp_path / "b", Locked()).wait())
    with user_lock:
        thread.start()
        assert entered.wait(LIMIT_SECONDS)
        for _ in range(10):
            assert publication.poll() is Outcome.PENDING
    assert publication.wait() is Outcome.PUBLISHED
    thread.join(LIMIT_SECONDS)
    assert (tmp_path / "b" / MANIFEST_NAME).exists()


def test_errors_of_any_kind_fail_a_save(saver: Saver, tmp_path: Path) -> None:
    class Strange(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    class Failing:
        def entries(self) -> Any:
            cause = ValueError("the cause")
            cause.__notes__ = ("not a list",)  # type: ignore[assignment]
            try:
                raise cause
            except ValueError as error:
                raise Strange from error

        def restore(self, reader: object) -> None:
            pass

    publication = saver.start(tmp_path / "a", Failing())
    assert publication.wait() is Outcome.FAILED
    assert "Strange" in str(publication.error)
    assert_saves(saver, tmp_path / "b")


def test_ranks_that_save_other_iterations_fail_together(tmp_path: Path) -> None:
    ranks = RanksInTurn(3)
    saves = [
        saver.start(tmp_path, state(1, rank), iteration=(100, 100, 200)[rank])
        for rank, saver in enumerate(ranks.savers)
    ]
    while not saves[0].is_over:
        for one in reversed(saves):
            one.poll()
    assert {one.outcome for one in saves} == {Outcome.FAILED}
    assert len({one.error for one in saves}) == 1
    assert "rank 0 of 100, rank 2 of 200. Every rank has to pass the same one" in str(saves[0].error)
    for one in saves:
        assert one.join(LIMIT_SECONDS)
    assert not (tmp_path / MANIFEST_NAME).exists() and not data_files(tmp_path)
    ranks.close()


def test_the_cause_of_a_failed_save_is_its_first_error(tmp_path: Path) -> None:
    class Failing:
        def entries(self) -> Any:
            raise KeyError("x")

        def restore(self, reader: object) -> None:
            pass

    with pytest.raises(SaveFailedError) as caught:
        ds.save({"own": Failing()}, tmp_path)
    assert "KeyError: 'x'" in str(caught.value.__cause__)


def test_closing_does_not_wait_without_limit_for_a_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron_datastates.pipeline import saver as saver_module

    hangs, reached = threading.Event(), threading.Event()

    def hang() -> None:
        reached.set()
        assert hangs.wait(LIMIT_SECONDS)

    monkeypatch.setattr(directory_publisher, "sync_above", once(directory_publisher.sync_above, hang))
    monkeypatch.setattr(saver_module, "_CLOSING_SECONDS", 0.2)
    saver = new_saver()
    publication = saver.start(tmp_path, state(1))
    while not reached.is_set():
        publication.poll()
    saver.close()
    assert "the manifest of the save to" in caplog.text and "still hangs after 0.2 s" in caplog.text
    hangs.set()
    assert publication.publisher.join(LIMIT_SECONDS)
