"""What the near tier of a node has of each checkpoint, for `datastates ls`.

Nothing here imports torch or the native module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections import Counter
from pathlib import Path

from megatron_datastates.format.directory import iteration_in_name
from megatron_datastates.format.values import is_data_file_name
from megatron_datastates.pipeline.near.nodes import nodes_in
from megatron_datastates.pipeline.near.places import manifest_in
from megatron_datastates.pipeline.runs.runs import is_published


@dataclasses.dataclass(frozen=True)
class NearCheckpoint:
    """What a node's near tier has of one checkpoint."""

    files: int  # data files
    copies: dict[str, int]  # those of them that are copies, by the name of the node that wrote them
    own: str  # this node's name, as of the save; empty if that is not known
    elsewhere: list[str]  # the names of the other nodes that wrote files of it near
    has_manifest: bool = True  # one that can be read


def near_iterations(run: Path) -> dict[int, NearCheckpoint]:
    """Returns what a run's folder in a near tier holds, by iteration."""
    found, folders = {}, list[Path]()
    with contextlib.suppress(OSError):
        folders = list(run.iterdir())
    for folder in folders:
        number = iteration_in_name(folder.name)
        with contextlib.suppress(OSError):  # a drain removes it meanwhile
            if number is not None and is_published(folder):
                found[number] = _look(folder)
    return dict(sorted(found.items()))


def _look(folder: Path) -> NearCheckpoint:
    names = set(filter(is_data_file_name, os.listdir(folder)))
    nodes, manifest = nodes_in(folder), manifest_in(folder)
    if nodes is None or manifest is None:
        return NearCheckpoint(len(names), {}, "", [], manifest is not None)
    ranks = [file.rank for file in manifest.files if file.name in names]  # without left-overs of other saves
    others = [node for n, node in enumerate(nodes.nodes) if n != nodes.own]
    copies = Counter(node.name for node in others for rank in ranks if rank in node.ranks)
    return NearCheckpoint(
        len(ranks),
        dict(copies),
        nodes.nodes[nodes.own].name,
        [node.name for node in others],
    )
