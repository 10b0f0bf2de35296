"""Wrappers for Megatron's own tools, which read a directory with DCP's reader and never ask for its format.

They are `checkpoint_inspector.py`, `dist_checkpoint_io.py` and the hybrid converter, in tools/checkpoint.
Other formats are read as before.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_datastates.format.directory import BACKEND
from megatron_datastates.mcore.load.opening import is_ours, open_checkpoint, read_common_state

if TYPE_CHECKING:
    from megatron_datastates.mcore.load.reader import DataStatesReader


_READER = "_datastates_reader"  # in a reader of DCP's: ours, from its metadata until its data


def _reader(directory: str | Path) -> DataStatesReader:
    from megatron_datastates.mcore.load.reader import DataStatesReader

    return DataStatesReader(open_checkpoint(directory))


def wrap_dcp_read_metadata(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps `FileSystemReader.read_metadata`; our own reader, and Megatron's loads with it, override it."""
    vars(self).pop(_READER, None)
    if not is_ours(self.path):
        return original(self, *args, **kwargs)
    reader = vars(self)[_READER] = _reader(self.path)
    return reader.read_metadata()


def wrap_dcp_read_data(original: Callable[..., Any], self: Any, plan: Any, planner: Any) -> Any:
    """Wraps `FileSystemReader.read_data`."""
    # The one whose metadata the plan is made of: another save may have been published there meanwhile.
    reader = vars(self).pop(_READER, None)
    if reader is None and is_ours(self.path):
        reader = _reader(self.path)
    return original(self, plan, planner) if reader is None else reader.read_data(plan, planner)


def wrap_load_common_of_tools(original: Callable[..., Any], checkpoint_dir: str | Path) -> Any:
    """Wraps the `load_common` that only tools still call."""
    return read_common_state(checkpoint_dir) if is_ours(checkpoint_dir) else original(checkpoint_dir)


def wrap_detect_checkpoint_format(original: Callable[..., Any], load_dir: str) -> Any:
    """Wraps `detect_checkpoint_format`: the hybrid converter knows its own two formats only.

    It reads ours with the reader above, and by default writes the format that this returns.
    """
    found = original(load_dir)
    return "torch_dist" if found == BACKEND else found
