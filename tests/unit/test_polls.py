"""Saves that overlap: one poll advances them all, and they are published in the order of their beginning."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron_datastates.engine.fence import FENCE
from megatron_datastates.format.values import MANIFEST_NAME, SaveId
from megatron_datastates.pipeline.publication import Outcome, Publication
from megatron_datastates.pipeline.publisher import Publisher
from megatron_datastates.pipeline.publishing import directory_publisher
from megatron_datastates.pipeline.publishing.collectives import Collectives
from megatron_datastates.pipeline.publishing.polls import Flags, Polls
from megatron_datastates.pipeline.report import Listener
from megatron_datastates.pipeline.saver import Saver
from megatron_datastates.pipeline.saving.rank_save import RankSave
from megatron_datastates.pipeline.upkeep.verify import verify
from megatron_datastates.providers.base import Mutability
from tests.unit.ranks_in_turn import RanksInTurn
from tests.unit.states import State, new_saver

POLLS = 6  # that a save takes, and one for what its threads have not done yet


def state(number: int, mutability: Mutability = Mutability.NOW, rank: int = 0) -> State:
    return State({f"w{rank}": torch.full((300,), float(number))}, {f"n{rank}": number}, mutability)


def settled(publication: Publication) -> None:
    """Waits for what the save's own threads do, without a poll."""
    assert publication.save._durable.wait(60.0), publication.save.failure
    publication.publisher.join()


def test_a_loop_that_saves_in_every_iteration_publishes_as_often(saver: Saver, tmp_path: Path) -> None:
    """With one poll for each iteration: otherwise what a crash costs grows from save to save."""
    begun: list[Publication] = []
    for number in range(20):
        oldest = next((one for one in begun if not one.is_over), None)
        if oldest is not None:
            oldest.poll()
        begun.append(saver.start(tmp_path / str(number), state(number)))
        for one in begun:
            settled(one)
    assert sum(one.outcome is Outcome.PUBLISHED for one in begun) >= 20 - POLLS
    assert sum(saver.session.collectives.calls.values()) == 0, "there are no other ranks"


def test_ranks_sum_once_a_poll_however_many_saves_there_are(tmp_path: Path) -> None:
    ranks = RanksInTurn(2)
    saves = [
        [saver.start(tmp_path / str(number), state(number, rank=rank)) for number in range(5)]
        for rank, saver in enumerate(ranks.savers)
    ]
    polls = 0
    while not saves[0][4].is_over:
        polls += 1
        for own in reversed(saves):
            own[polls % 5].poll()  # whichever save is polled
            for one in own:
                settled(one)
        assert polls < 3 * POLLS
    assert all(one.outcome is Outcome.PUBLISHED for own in saves for one in own)
    assert ranks.savers[0].session.collectives.calls["sum"] <= polls
    ranks.close()


def test_one_save_that_fails_does_not_fail_the_others(saver: Saver, tmp_path: Path) -> None:
    saves = [saver.start(tmp_path / str(number), state(number)) for number in range(3)]
    saves[1].save.fail(OSError("a broken disk"))
    assert [one.wait() for one in saves] == [Outcome.PUBLISHED, Outcome.FAILED, Outcome.PUBLISHED]
    assert "a broken disk" in str(saves[1].error)
    assert not list((tmp_path / "1").glob("data-*"))


def test_a_save_that_is_given_up_does_not_hold_up_later_ones(saver: Saver, tmp_path: Path) -> None:
    saves = [saver.start(tmp_path / str(number), state(number)) for number in range(2)]
    saves[0].abandon("the queue was aborted")
    assert saves[1].wait() is Outcome.PUBLISHED
    assert not (tmp_path / "0" / MANIFEST_NAME).exists()


def test_a_later_save_is_not_published_before_an_earlier_one(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, order, look = threading.Event(), [], directory_publisher.require_files

    def dawdling(directory: Path, manifest) -> None:
        if manifest.ordinal == 1:
            begin.wait(60.0)
        order.append(manifest.ordinal)
        look(directory, manifest)

    monkeypatch.setattr(directory_publisher, "require_files", dawdling)
    first, second = (saver.start(tmp_path / str(number), state(number)) for number in range(2))
    for one in (first, second):
        assert one.save._durable.wait(60.0)
    for _ in range(3 * POLLS):
        assert second.poll() is Outcome.PENDING
    begin.set()
    assert second.wait() is Outcome.PUBLISHED
    assert first.outcome is Outcome.PUBLISHED, "although nobody has polled it"
    assert order == [1, 2]


def test_an_earlier_save_that_is_not_durable_holds_up_later_ones(
    saver: Saver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory ends with the state that was saved last, whichever file was written faster."""
    begin, seal = threading.Event(), RankSave._seal

    def dawdling(save: RankSave, *args):
        if save.context.save_id.ordinal == 1:
            begin.wait(60.0)
        return seal(save, *args)

    monkeypatch.setattr(RankSave, "_seal", dawdling)
    first, failing, second = (saver.start(tmp_path / "same", state(number)) for number in range(3))
    assert second.save._durable.wait(60.0)
    failing.save.fail(OSError("a broken disk"))  # one that is over lets no later one pass by the first
    for _ in range(3 * POLLS):
        assert second.poll() is Outcome.PENDING
    assert failing.outcome is Outcome.FAILED
    begin.set()
    assert second.wait() is first.wait() is Outcome.PUBLISHED


def test_what_is_polled_by_way_of_another_save_is_reported(saver: Saver, tmp_path: Path) -> None:
    reports: list[dict] = []
    saver.reporter.listeners.append(Listener(reports.append))
    saves = [saver.start(tmp_path / str(number), state(number)) for number in range(3)]
    saves[-1].wait()
    # Not in order: of those that end in one poll, the one that is waited for comes first.
    assert sorted(report["directory"] for report in reports) == [str(tmp_path / str(n)) for n in range(3)]


def test_copies_and_objects_wait_for_the_trainer(tmp_path: Path) -> None:
    """What follows a save in Megatron's loop needs cores and the GIL, and counts as held."""
    saver = new_saver(lazy_delay=3600.0)
    publication = saver.start(tmp_path, state(1, Mutability.AT_FENCE))
    assert not publication.save._durable.wait(0.3)
    assert publication.save.times()["staging"] == 0.0
    assert publication.save.tail.entries() == []
    publication.poll()
    FENCE.wait("the step")
    assert publication.wait() is Outcome.PUBLISHED
    saver.close()


def test_a_tracker_that_cannot_be_written_fails_the_save_on_all_ranks(tmp_path: Path) -> None:
    def full(save_id: SaveId, is_retried: bool) -> None:
        raise OSError(28, "No space left on device", "latest_checkpointed_iteration.txt")

    ranks = RanksInTurn(2)
    saves = [
        saver.start(tmp_path / "c", state(1, rank=rank), far_published=full)
        for rank, saver in enumerate(ranks.savers)
    ]
    while not saves[0].is_over:
        for one in reversed(saves):
            one.poll()
    for one in saves:
        assert one.outcome is Outcome.FAILED
        assert "latest_checkpointed_iteration.txt" in str(one.error)
        assert "files were kept" in str(one.error)
    assert (tmp_path / "c" / MANIFEST_NAME).exists()
    ranks.close()


def test_a_rank_that_fails_while_rank_0_publishes_costs_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has looked for all files, and is about to write a manifest that names them."""
    has_looked, goes_on, look = threading.Event(), threading.Event(), directory_publisher.require_files

    def dawdling(directory: Path, manifest) -> None:
        look(directory, manifest)
        has_looked.set()
        goes_on.wait(60.0)

    monkeypatch.setattr(directory_publisher, "require_files", dawdling)
    ranks = RanksInTurn(2)
    saves = [saver.start(tmp_path / "c", state(1, rank=rank)) for rank, saver in enumerate(ranks.savers)]
    while not saves[0].is_over:
        for one in reversed(saves):
            one.poll()
        if has_looked.is_set() and saves[1].save.failure is None:
            saves[1].save.fail(OSError("a broken link"))
    goes_on.set()
    assert saves[0].publisher.join(60.0)
    for one in saves:
        assert one.outcome is Outcome.FAILED
        assert "a broken link" in str(one.error) and "files were kept" in str(one.error)
    assert (tmp_path / "c" / MANIFEST_NAME).exists() and verify(tmp_path / "c").good
    ranks.close()


def test_a_layout_that_becomes_known_while_it_is_asked_for_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records of all ranks say how many bytes come: what a rank knows since then must not change that."""
    record_of, look = Publisher.record, directory_publisher.require_files
    goes_on = threading.Event()

    def dawdling(directory: Path, manifest) -> None:
        look(directory, manifest)
        assert goes_on.wait(60.0)

    def recorded(publisher: Publisher, **facts):
        record, context = record_of(publisher, **facts), publisher._save.context
        if context.save_id.ordinal == 2 and context.rank == 0:
            # The first one is over before the second one's records are read.
            goes_on.set()
            saves[0][0].publisher.join()
        return record

    monkeypatch.setattr(directory_publisher, "require_files", dawdling)
    monkeypatch.setattr(Publisher, "record", recorded)
    ranks = RanksInTurn(2)
    saves: list[list[Publication]] = [[], []]  # by rank
    for number in range(2):
        for rank, saver in enumerate(ranks.savers):
            # Of rank 0's another layout, or nothing would be merged.
            content = State({"v": torch.ones(9)}) if (rank, number) == (0, 1) else state(number, rank=rank)
            saves[rank].append(saver.start(tmp_path / str(number), content))
            assert saves[rank][number].save._durable.wait(60.0)
        while not (saves[0][number].is_over if number else saves[0][0].publisher._thread is not None):
            for own in reversed(saves):
                own[number].poll()
    assert [one.outcome for own in saves for one in own] == [Outcome.PUBLISHED] * 4, saves[0][1].error
    assert verify(tmp_path / "1").good
    ranks.close()


# -- the polls themselves ---------------------------------------------------------------------------------


class OfNobody:
    """Stands in for the collectives of a rank: a sum that is read when it should not be is an error."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.is_broken = False

    def start_sum(self, values: list[int]) -> Any:
        return SimpleNamespace(result=lambda: self._result(values))

    def _result(self, values: list[int]) -> list[int]:
        if self.is_broken:
            raise RuntimeError("a peer is gone")
        return values


class Noting:
    """A save that notes what it is stepped with."""

    def __init__(self, *, is_over: bool = False) -> None:
        self.is_over, self.sums_flags = is_over, True
        self.postponement = SimpleNamespace(charge=lambda: None, end_at_poll=lambda: None)
        self.steps: list[tuple[Flags | None, bool]] = []
        self.is_abandoned = False

    def flags(self) -> Flags:
        return Flags(1, 0, 0, 0, 0, 0)

    def abandon(self, reason: str) -> None:
        self.is_abandoned = True

    def step(self, sums: Flags | None, *, is_first: bool, may_publish: bool) -> bool:
        self.steps.append((sums, is_first))
        return True


@pytest.mark.parametrize("how", ["error", "discarded"])
def test_a_sum_of_saves_that_are_gone_is_not_read(how: str) -> None:
    collectives, gone, later = OfNobody(), Noting(), Noting()
    polls = Polls(cast(Collectives, collectives))
    polls.poll(gone)
    collectives.is_broken = True
    if how == "error":
        with pytest.raises(RuntimeError, match="a peer is gone"):
            polls.poll(gone)
        assert gone.is_abandoned
    else:
        polls.discard(gone)
    polls.poll(later)
    assert later.steps == [(None, True)]


def test_a_save_after_one_that_is_over_is_not_the_first_while_an_earlier_one_is_unfinished() -> None:
    first, second, third = Noting(), Noting(is_over=True), Noting()
    polls = Polls(cast(Collectives, OfNobody()))
    for save in (first, second, third):
        polls.add(save)
    assert polls.poll(third) == [second]
    assert [first.steps[0][1], third.steps[0][1]] == [True, False]
