"""Megatron's warning of an old checkpoint, in a directory in which only the save that begins has files."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_datastates.format.values import SaveId
from megatron_datastates.mcore.save.overwriting import only_of_old_ones
from megatron_datastates.pipeline import saver_pool
from tests.unit.states import OPTIONS, save

WARNING = "Overwriting old incomplete / corrupted checkpoint..."  # Megatron's, since 0.16
logger = logging.getLogger("megatron.core.dist_checkpointing.serialization")


@pytest.fixture
def last(tmp_path: Path) -> Iterator[SaveId]:
    """Saves once, as a process of a training has, and returns the id of that save."""
    saver = saver_pool.saver_for(OPTIONS)
    yield save(saver, tmp_path / "first", {"w": torch.ones(3)}).save.context.save_id
    saver_pool.close_all()


@pytest.mark.parametrize(
    ("others", "is_logged"),
    [
        ([], False),
        (["next"], False),  # of rank 1, which has begun the save already
        (["next", "next index"], False),
        (["last"], True),
        (["next", "last"], True),
        (["next", "metadata.json"], True),
    ],
)
def test_files_of_the_save_that_begins_are_no_old_checkpoint(
    others: list[str], is_logged: bool, last: SaveId, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    following = SaveId(last.run_id, last.ordinal + 1)
    names = {
        "next": following.data_file_name(1),
        "next index": following.dcp_file_name(),
        "last": last.data_file_name(1),
    }
    directory = tmp_path / "second"
    directory.mkdir()
    for other in others:
        (directory / names.get(other, other)).touch()
    with only_of_old_ones(lambda: str(directory)):
        logger.warning(WARNING)
        logger.warning("another one")
    assert (WARNING in caplog.messages) is is_logged and "another one" in caplog.messages
    logger.warning(WARNING)
    assert WARNING in caplog.messages


def test_all_is_old_before_the_first_save_and_where_nothing_can_be_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / SaveId(0, 1).data_file_name(1)).touch()
    for directory in (tmp_path, tmp_path / "missing"):
        with only_of_old_ones(lambda path=directory: str(path)):
            logger.warning(WARNING)
    assert caplog.messages == [WARNING] * 2
