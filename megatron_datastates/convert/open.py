"""Opens a checkpoint of any format: the one module that chooses among all sources.

Each is imported when it is used: looks at one format are not to wait for the others.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from megatron_datastates.errors import NotACheckpointError
from megatron_datastates.files import is_object, names_in, path_of, require_utf8
from megatron_datastates.format.directory import BACKEND, LEGACY, METADATA_NAME, TORCH_DIST, TORCH_DIST_INDEX
from megatron_datastates.pipeline.runs.run_folders import what_is_below
from megatron_datastates.pipeline.runs.runs import format_of, format_seen, require_readable

if TYPE_CHECKING:
    from megatron_datastates.convert.sources.source import Source


def open_source(directory: str | os.PathLike[str]) -> Source:
    """Opens the checkpoint in `directory`, of any format.

    Raises:
        NotACheckpointError: the directory holds no checkpoint of a known format.
        StorageError: its name is not UTF-8, or it cannot be read.
    """
    path = path_of(directory)
    require_utf8(path)
    format = format_of(path)
    if format == BACKEND or (format is None and is_object(path)) or not path.is_dir():
        from megatron_datastates.convert.sources.datastates import DataStatesSource

        return DataStatesSource(path)  # raises an error that says what is missing
    if is_object(path):
        raise NotACheckpointError(
            f"{path} holds a checkpoint of the format {format}, which is not read from object stores: "
            "expected one of datastates, or a copy of it in a file system"
        )
    if format == TORCH_DIST and (path / TORCH_DIST_INDEX).is_file():
        from megatron_datastates.convert.sources.torch_dist import TorchDistSource

        return TorchDistSource(path)
    if format == "zarr":
        from megatron_datastates.convert.sources.zarr_legacy import LegacyZarrSource

        return LegacyZarrSource(path)
    require_readable(path)
    seen = format_seen(path)  # what DCP or a program of its own has begun to save says so by names alone
    if seen == BACKEND:
        from megatron_datastates.convert.sources.datastates import DataStatesSource

        return DataStatesSource(path)  # raises an error that says what is missing
    if seen == TORCH_DIST:
        raise NotACheckpointError(
            f"{path} holds a checkpoint of {TORCH_DIST} or DCP whose {TORCH_DIST_INDEX} is missing: nothing "
            "else says where its tensors are. Restore that file, or choose another checkpoint"
        )
    if seen == LEGACY:
        raise NotACheckpointError(
            f"{path} holds a checkpoint of Megatron's legacy format (--ckpt-format {LEGACY}), which only "
            "Megatron reads: let a run resume from it, and save in another format"
        )
    known = f" (its {METADATA_NAME} says {format!r})" if format is not None else ""
    known = known or ("" if names_in(path) else " (it is empty)")
    raise NotACheckpointError(
        f"{path} holds no checkpoint of a known format{known}: choose a directory such as CKPT/iter_0000100, "
        f"written with --ckpt-format torch_dist, datastates or zarr{what_is_below(path)}"
    )
