"""Opens a checkpoint of any format: the one module that knows the concrete sources."""

from __future__ import annotations

import json
import os
from pathlib import Path

from megatron_datastates.convert.sources.datastates import DataStatesSource
from megatron_datastates.convert.sources.source import METADATA_NAME, TORCH_DIST_INDEX, Source
from megatron_datastates.convert.sources.torch_dist import TorchDistSource
from megatron_datastates.errors import NotACheckpointError, StorageError
from megatron_datastates.files import DOCUMENT_BYTES, read_regular
from megatron_datastates.pipeline.load import Checkpoint, is_published


def open_source(directory: str | os.PathLike[str]) -> Source:
    """The checkpoint that lies in `directory`, whatever its format.

    Raises:
        NotACheckpointError: nothing is there that can be read.
        StorageError: its name is not UTF-8.
        MissingPackageError: it is of a format that is read with a package which is not installed.
    """
    path = Path(directory)
    require_utf8(path)
    backend = _named_format(path)
    has_index = (path / TORCH_DIST_INDEX).is_file()
    if is_published(path) and not (backend == "torch_dist" and has_index):
        return DataStatesSource(path)
    if has_index and backend in (None, "torch_dist"):
        return TorchDistSource(path)
    if backend == "zarr":
        from megatron_datastates.convert.sources.zarr_legacy import (
            LegacyZarrSource,  # needs zarr, which is optional
        )

        return LegacyZarrSource(path)
    if backend == DataStatesSource.format or not path.is_dir():
        Checkpoint.open(path)  # which says what is wrong with it
    known = f" (its {METADATA_NAME} says {backend!r})" if backend is not None else ""
    raise NotACheckpointError(
        f"{path} holds no checkpoint of a known format{known}: give a directory such as CKPT/iter_0000100, "
        "written with --ckpt-format torch_dist, datastates or zarr"
    )


def require_utf8(path: Path) -> None:
    """Raises StorageError: native code and what is printed for programs take names in UTF-8 only."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise StorageError(
            f"{os.fsencode(path)!r} is not UTF-8: reach it by another name, such as a link"
        ) from None


def _named_format(path: Path) -> str | None:
    try:
        backend = json.loads(read_regular(path / METADATA_NAME, DOCUMENT_BYTES))["sharded_backend"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return backend if isinstance(backend, str) else None
