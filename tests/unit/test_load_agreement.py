"""What all ranks hear of a failed load, and which failures an older checkpoint helps against."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch.distributed as dist

from megatron_datastates.errors import (
    CorruptDataError,
    DataStatesError,
    FormatError,
    MissingKeyError,
    NotACheckpointError,
    StorageError,
    UnsafeObjectError,
    UnsupportedFormatError,
)
from megatron_datastates.mcore.load.agreement import Agreement, Failure, _cause, _summary, is_caused_by_damage
from megatron_datastates.pipeline.publishing import collectives


def reported(*texts: str | None) -> str:
    """Returns the error that ranks with these failures agree on; two ranks are on each node."""
    failed = {rank: text for rank, text in enumerate(texts) if text is not None}
    return _summary({rank: Failure(text, f"n{rank // 2}", None, False) for rank, text in failed.items()})


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["a"], "rank 0: a (on node n0)"),
        ([None, "a", None, "b"], "rank 1: a (on node n0); rank 3: b (on node n1)"),
        (["a", "b", "a"], "ranks 0, 2: a (on nodes n0, n1); rank 1: b (on node n0)"),
        (["a"] * 2, "ranks 0, 1: a (on node n0)"),
        (["a"] * 8, "ranks 0, 1, 2 and 5 more: a (on nodes n0, n1, n2 and 1 more)"),
        (
            ["a", "b", "c", "d", "e", "d"],
            "rank 0: a (on node n0); rank 1: b (on node n0); rank 2: c (on node n1) (and 3 more ranks)",
        ),
    ],
)
def test_ranks_are_named_with_what_they_met(texts, expected):
    assert reported(*texts) == expected


def raised_from(cause: DataStatesError) -> Exception:
    error = RuntimeError("it")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("kind", [CorruptDataError, StorageError, FormatError, NotACheckpointError])
def test_damage_is_damage(kind):
    assert is_caused_by_damage(raised_from(kind("x")))


@pytest.mark.parametrize("kind", [MissingKeyError, UnsupportedFormatError, UnsafeObjectError])
def test_what_an_older_checkpoint_would_say_too_is_no_damage(kind):
    assert not is_caused_by_damage(raised_from(kind("x")))


def test_damage_on_any_rank_is_the_cause_on_all():
    causes = [None, MissingKeyError("a"), StorageError("b"), CorruptDataError("c")]
    failures = {rank: Failure("", "n", cause, False) for rank, cause in enumerate(causes)}
    assert _cause(failures) is causes[2]


def test_of_several_failures_of_a_rank_the_first_one_counts():
    agreement = Agreement("ck", None)
    for text in ("the cause", "what followed"):
        agreement.fail(ValueError(text))
    assert agreement.failure is not None and agreement.failure.text == "ValueError: the cause"


def test_a_failure_without_a_text_reaches_the_other_ranks():
    class NoText(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    agreement = Agreement("ck", None)
    agreement.fail(NoText())
    assert agreement.failure is not None and agreement.failure.text == "NoText"


def test_failures_of_many_ranks_fit_into_memory_together(monkeypatch):
    """A strict load names every key that the model lacks, on each rank; each gets the texts of all."""
    monkeypatch.setattr(collectives, "ranks_of", lambda group=None: range(16384))
    agreement = Agreement("ck", None)
    agreement.fail(ValueError("Missing keys: " + "'decoder.layers.mlp.weight', " * 50_000))
    assert agreement.failure is not None
    assert agreement.failure.text.startswith("ValueError: Missing keys: 'decoder.layers.mlp.weight', ")
    assert agreement.failure.text.endswith("... (1445930 more characters)")
    assert len(pickle.dumps(agreement.failure)) * 16384 < 100 << 20


def test_causes_of_many_ranks_fit_into_memory_together(monkeypatch):
    monkeypatch.setattr(collectives, "ranks_of", lambda group=None: range(16384))
    agreement = Agreement("ck", None)
    agreement.fail(raised_from(FormatError("the index names " + "'decoder.layers.mlp.weight', " * 50_000)))
    assert agreement.failure is not None and type(agreement.failure.cause) is FormatError
    assert str(agreement.failure.cause).startswith("the index names 'decoder.layers.mlp.weight', ")
    assert str(agreement.failure.cause).endswith(" more characters)")
    assert len(pickle.dumps(agreement.failure)) * 16384 < 100 << 20


def part(rank: int, ranks: int) -> dict[str, int]:
    return {"rank": rank, "ranks": ranks}


@pytest.fixture
def world(monkeypatch):
    """Two ranks that exchange parts. This one is the first; the other has failed, and sends nothing."""
    sent: list[Any] = []

    class Two:
        rank, size = 0, 2

        def gather_values(self, value: Any) -> list[Any]:
            sent.append(value)
            return [value, None]

    monkeypatch.setattr(collectives, "ranks_of", lambda group=None: [0, 1])
    monkeypatch.setattr(collectives, "Collectives", Two)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    return sent


def test_what_any_rank_finds_counts_on_all(monkeypatch, world):
    monkeypatch.setattr(collectives, "sum_now", lambda values, group: [values[0] + 1])
    assert Agreement("ck", None).parts_if_any(lambda: False, part) == [{"rank": 0, "ranks": 2}]


def test_what_no_rank_finds_is_not_exchanged(monkeypatch, world):
    monkeypatch.setattr(collectives, "sum_now", lambda values, group: values)
    assert Agreement("ck", None).parts_if_any(lambda: False, part) is None and world == []


def test_the_ranks_of_the_world_are_known_to_old_torch_too(monkeypatch, world_of_one):
    """Before 2.7, it knows the ranks of groups only, and None is none."""
    known = dist.get_process_group_ranks
    monkeypatch.setattr(
        dist, "get_process_group_ranks", lambda group: {dist.group.WORLD: known(group)}[group]
    )
    assert collectives.ranks_of() == collectives.ranks_of(dist.group.WORLD) == [0]


def test_ranks_of_several_groups_exchange_nothing(monkeypatch, world):
    """Another group may be loading another checkpoint, or none."""
    monkeypatch.setattr(collectives, "sum_now", lambda values, group: values)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    assert Agreement("ck", None).parts_if_any(lambda: True, part) == [] and world == []


def test_a_rank_whose_part_cannot_be_read_takes_part(monkeypatch, world):
    def fails(rank: int, ranks: int) -> dict[str, int]:
        raise ValueError("damaged")

    monkeypatch.setattr(collectives, "sum_now", lambda values, group: values)
    assert Agreement("ck", None).parts_if_any(lambda: True, fails) == [] and world == [None]


@pytest.mark.parametrize("problem", [None, ValueError("before")])
def test_a_rank_that_fails_raises_once_it_has_taken_part(monkeypatch, world, problem):
    def fails() -> bool:
        assert problem is None, "is not called where something has failed before"
        raise ValueError("now")

    summed = []
    monkeypatch.setattr(collectives, "sum_now", lambda values, group: summed.append(values) or [1])
    with pytest.raises(ValueError, match="before" if problem else "now"):
        Agreement("ck", None).parts_if_any(fails, part, problem)
    assert summed == [[0]] and world == [None], "in the exchange, too"
