"""Megatron's warning of an old checkpoint in the directory of a save, where there is none.

Megatron looks into the directory on rank 0 when that rank begins a save. No rank waits for another one at the
start of a save, so others may have opened their data files of the same save there already.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_datastates.files import is_object, names_in, path_of
from megatron_datastates.format.values import save_id_in_name

_LOGGER = logging.getLogger("megatron.core.dist_checkpointing.serialization")
_WARNING = "Overwriting old incomplete / corrupted checkpoint..."


class _Filter(logging.Filter):
    def __init__(self, directory: Callable[[], str]) -> None:
        super().__init__()
        self._directory = directory

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg != _WARNING:
            return True
        path = path_of(self._directory())
        return is_object(path) or not _has_next_save_alone(path)


@contextlib.contextmanager
def only_of_old_ones(directory: Callable[[], str]) -> Iterator[None]:
    """Drops that warning in the block if all that is in `directory()` is of the save that begins there."""
    found = _Filter(directory)
    _LOGGER.addFilter(found)
    try:
        yield
    finally:
        _LOGGER.removeFilter(found)


def _has_next_save_alone(path: Path) -> bool:
    from megatron_datastates.pipeline.saver_pool import begins_next

    try:
        return all((one := save_id_in_name(name)) is not None and begins_next(one) for name in names_in(path))
    except OSError:
        return False
