"""The index of a checkpoint, from ranks' own indexes.

Belongs here: joining what ranks store, and errors of ranks that disagree. Does not belong here: the tables of
all ranks as one (rows.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from megatron_datastates.errors import FormatError
from megatron_datastates.format.index import Index
from megatron_datastates.format.rows import Rows
from megatron_datastates.format.stored_entries import StoredTensors, checked_entries
from megatron_datastates.format.tables import Directory, starts
from megatron_datastates.format.tail import Kind
from megatron_datastates.format.tensor_entry import TensorEntry


def merge_indexes(parts: Iterable[tuple[Index, int]]) -> Index:
    """Returns the index of a checkpoint, given ranks' own indexes and the position of each rank's data file.

    It sorts the tables of all ranks at once: with many ranks, a loop over ranks and keys takes minutes.

    Raises:
        FormatError: ranks disagree on a tensor's dtype or global shape, or on whether it is encoded, or store
            one object or stream twice.
    """
    plain = [(_plain(index), file) for index, file in parts]
    places = _merge_objects(plain)
    rows = Rows.of(plain)
    order = np.argsort(rows.ids, kind="stable")  # by key, and within a key in the order of the parts
    rows.check_consistent(order)
    files = max((file for _, file in plain), default=-1) + 1
    tensors: dict[str, TensorEntry] = {}
    for dims in np.unique(rows.ndim).tolist():
        mine = order[rows.ndim[order] == dims]
        columns, firsts = rows.columns(mine, dims), np.flatnonzero(np.diff(rows.ids[mine], prepend=-1))
        bounds = [*starts(rows.counts[mine])[firsts].tolist(), columns.shape[1]]
        described = [rows.describe(row) for row in mine[firsts].tolist()]
        tensors |= checked_entries(described, columns, bounds, files, "the layout of all ranks")
    return Index(tensors, places[Kind.OBJECT], places[Kind.STREAM])


def _plain(index: Index) -> Directory:
    """Returns the directory of an index of which no section is packed, with its sections."""
    tensors = index.tensors
    if isinstance(tensors, StoredTensors) and tensors.directory.is_plain() and tensors.directory.sections:
        return tensors.directory
    data = index.encode()
    return Directory(data, "an index", len(data))


def _merge_objects(parts: Iterable[tuple[Directory, int]]) -> dict[int, dict[str, int]]:
    """Returns the data files of objects and of streams by key, for each kind."""
    found: dict[int, dict[str, int]] = {Kind.OBJECT: {}, Kind.STREAM: {}}
    for directory, file in parts:
        for kind, name in zip(directory.object_kinds(), directory.object_names(), strict=True):
            key, known = directory.text(name), found[kind]
            if key in known:
                what = Kind(kind).name.lower()
                raise FormatError(
                    f"{what} {key!r} is stored by two ranks, in the data files {known[key]} and {file}: put "
                    "the rank into the key, or yield it on one rank only"
                )
            known[key] = file
    return found
