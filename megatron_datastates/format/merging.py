"""The index of a checkpoint, from ranks' own indexes.

Belongs here: joining what ranks store, and errors of ranks that disagree. Does not belong here: the tables of
all ranks as one (rows.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from megatron_datastates.errors import FormatError
from megatron_datastates.format.index import Index
from megatron_datastates.format.rows import Rows
from megatron_datastates.format.stored_entries import checked_entries
from megatron_datastates.format.tables import Directory, starts
from megatron_datastates.format.tail import Kind
from megatron_datastates.format.tensor_entry import TensorEntry


def merge_indexes(parts: Iterable[Directory]) -> Index:
    """Returns the index of a checkpoint, given the directories of own indexes, with their sections.

    They are in the order of the data files.

    It sorts the tables of all ranks at once: with many ranks, a loop over ranks and keys takes minutes.

    Raises:
        FormatError: ranks disagree on a tensor's dtype or global shape, or on whether it is encoded, or store
            one object or stream twice.
    """
    directories = list(parts)
    places = _merge_objects(directories)
    rows = Rows.of(directories)
    order = np.argsort(rows.ids, kind="stable")  # by key, and within a key in the order of the parts
    rows.check_consistent(order)
    tensors: dict[str, TensorEntry] = {}
    for dims in np.unique(rows.ndim).tolist():
        mine = order[rows.ndim[order] == dims]
        columns, firsts = rows.columns(mine, dims), np.flatnonzero(np.diff(rows.ids[mine], prepend=-1))
        bounds = [*starts(rows.counts[mine])[firsts].tolist(), columns.shape[1]]
        described = [rows.describe(row) for row in mine[firsts].tolist()]
        tensors |= checked_entries(described, columns, bounds, len(directories), "the layout of all ranks")
    return Index(tensors, places[Kind.OBJECT], places[Kind.STREAM])


def _merge_objects(directories: Sequence[Directory]) -> dict[int, dict[str, int]]:
    """Returns the data files of objects and of streams by key, for each kind."""
    found: dict[int, dict[str, int]] = {Kind.OBJECT: {}, Kind.STREAM: {}}
    for file, directory in enumerate(directories):
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
