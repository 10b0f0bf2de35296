"""Errors keep their type, and what the system said, on their way from native code to the program."""

from __future__ import annotations

import dataclasses
import errno
import pickle

import pytest
import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

import megatron_datastates as ds
from megatron_datastates.errors import (
    CorruptDataError,
    DataStatesError,
    EngineError,
    FailedCallError,
    LoadFailedError,
    MismatchError,
    SaveFailedError,
    StorageError,
)
from megatron_datastates.mcore.errors import LoadMismatch, load_errors
from megatron_datastates.mcore.save.request import raise_if_failed
from megatron_datastates.pipeline.loading.load import Checkpoint
from tests.unit.states import OPTIONS, SMALL, State, data_files, new_saver, random_tensor, save

TENSORS = {"w": random_tensor(torch.uint8, (3 << 20,), 1)}


@pytest.fixture
def saved(tmp_path):
    ds.save(TENSORS, tmp_path / "c", **SMALL)
    return tmp_path / "c"


def said(error: BaseException) -> tuple[int, str, str]:
    assert isinstance(error, FailedCallError)
    return error.code, error.path, error.operation


@pytest.mark.parametrize("operation", ["open", "write", "sync"])
def test_a_failed_save_is_raised_from_what_the_system_said(tmp_path, operation):
    saver = new_saver(faults=f"{operation}:1:ENOSPC")
    publication = save(saver, tmp_path / "c", TENSORS)
    saver.close()
    with pytest.raises(SaveFailedError, match="No space left") as raised:
        raise_if_failed(publication)
    assert isinstance(raised.value, CheckpointingException) and raised.value.is_agreed
    code, path, name = said(raised.value.__cause__)
    assert isinstance(raised.value.__cause__, StorageError)
    assert (code, name) == (errno.ENOSPC, operation) and path.startswith(str(tmp_path / "c" / "data-00000"))


def test_the_error_of_a_save_that_one_rank_has_abandoned_is_its_own(tmp_path):
    saver = new_saver()
    publication = saver.start(tmp_path / "c", State(TENSORS, {}))
    publication.abandon("the world has gone")
    publication.poll()
    saver.close()
    with pytest.raises(SaveFailedError, match="abandoned on rank 0: the world has gone") as raised:
        raise_if_failed(publication)
    assert not raised.value.is_agreed


def test_a_read_that_fails_says_of_which_file_and_why(saved):
    checkpoint = Checkpoint.open(saved, dataclasses.replace(OPTIONS, faults="read:1:EIO"))
    with pytest.raises(StorageError, match="Input/output error") as raised:
        checkpoint.read_tensor("w")
    assert said(raised.value) == (errno.EIO, str(data_files(saved)[0]), "read")


def test_a_missing_file_keeps_its_errno_with_what_its_rank_wrote_to_it(saved):
    (file,) = data_files(saved)
    file.unlink()
    with pytest.raises(StorageError, match="Rank 0 wrote 'w' to it") as raised:
        ds.open(saved, **SMALL).read_tensor("w")
    assert said(raised.value) == (errno.ENOENT, str(file), "read")


@pytest.mark.parametrize(
    "plan", ["nonsense", "read:x:EIO", "read:-1:EIO", "read:1:stall=", "read:1:stall=9s"]
)
def test_what_concerns_no_file_is_the_machines_fault(saved, plan):
    checkpoint = Checkpoint.open(saved, dataclasses.replace(OPTIONS, faults=plan))
    with pytest.raises(EngineError, match="read fault plan") as raised:
        checkpoint.read_tensor("w")
    assert said(raised.value) == (0, "", "read fault plan")


def test_what_the_system_said_reaches_other_ranks():
    error = StorageError("x", code=errno.EIO, path="/a", operation="write")
    sent = pickle.loads(pickle.dumps(error))
    assert type(sent) is StorageError and str(sent) == "x" and said(sent) == (errno.EIO, "/a", "write")


def test_errors_of_loads_through_megatron_are_both_sides_errors_once():
    with pytest.raises(LoadFailedError, match="why") as raised, load_errors(), load_errors():
        raise CorruptDataError("why")
    assert isinstance(raised.value, CheckpointingException)
    assert type(raised.value.__cause__) is CorruptDataError


def test_a_mismatch_is_what_each_of_three_sides_calls_one():
    error = LoadMismatch("shape\x1b")
    for kind in (
        DataStatesError,
        LoadFailedError,
        MismatchError,
        CheckpointingException,
        CheckpointException,
    ):
        assert isinstance(error, kind)
    assert str(error) == "shape\\x1b" and str(pickle.loads(pickle.dumps(error))) == str(error)
