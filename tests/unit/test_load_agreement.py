"""What all ranks hear of a failed load, and which failures an older checkpoint helps against."""

from __future__ import annotations

import pytest

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
from megatron_datastates.mcore.load.agreement import Failure, _cause, _summary, is_caused_by_damage


def reported(*texts: str | None) -> str:
    """Returns the error that ranks with these failures agree on."""
    return _summary({rank: Failure(text, None, False) for rank, text in enumerate(texts) if text is not None})


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["a"], "rank 0: a"),
        ([None, "a", None, "b"], "rank 1: a; rank 3: b"),
        (["a", "b", "a"], "ranks 0, 2: a; rank 1: b"),
        (["a"] * 3, "ranks 0, 1, 2: a"),
        (["a"] * 8, "ranks 0, 1, 2 and 5 more: a"),
        (["a", "b", "c", "d", "e", "d"], "rank 0: a; rank 1: b; rank 2: c (and 3 more ranks)"),
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
    failures = {rank: Failure("", cause, False) for rank, cause in enumerate(causes)}
    assert _cause(failures) is causes[2]
